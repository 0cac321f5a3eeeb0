"""Select the layers that get an adapter, by PEFT's rules, and replace them in a model on the meta device."""

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence

from torch import nn
from transformers import PreTrainedModel

from colocated_grpo.policy.lora.linear import ADAPTED
from colocated_grpo.settings.base import DEFAULT_INIT
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.training import ALL_LINEAR, LoRAConfig

FULL_MATCHES = """\
import json, re, sys
rule, *names = json.load(sys.stdin)
print(json.dumps([name for name in names if re.fullmatch(rule, name)]))
"""
"""Program that reads a regular expression and names, and prints the names that it matches."""
REGEX_SECONDS = 5.0


def insert_adapters(lm: PreTrainedModel, blocks: nn.ModuleList, config: LoRAConfig) -> None:
    """Replace the targeted layers of `lm` by layers with adapters, in place. blocks: the transformer blocks of `lm`.

    Parameters are on the meta device. Raises ConfigError if a target does not exist or is not a linear layer.
    """
    for name in target_names(lm, blocks, config):
        parent, _, leaf = name.rpartition(".")
        layer = lm.get_submodule(name)
        setattr(lm.get_submodule(parent), leaf, ADAPTED[type(layer)](layer, config.rank, config.scale))


def target_names(lm: PreTrainedModel, blocks: nn.ModuleList, config: LoRAConfig) -> list[str]:
    """Return the names of the targeted layers, in the model's order. Raises ConfigError as `insert_adapters` does."""
    linear = list(linear_names(lm))
    everything = isinstance(config.target_modules, str) and config.target_modules.lower() == ALL_LINEAR
    wanted = linear if everything else config.target_modules
    selected = _selected("target_modules", wanted, lm) - _selected("exclude_modules", config.exclude_modules, lm)
    matched = [name for name, _ in lm.named_modules() if name in selected]
    by_name = config.init == DEFAULT_INIT and isinstance(wanted, list)  # a loaded adapter may also name absent layers
    if by_name:
        _require_all_found(wanted, (name for name, _ in lm.named_modules()), linear)
    if config.layers is not None:
        chosen = {id(module) for index in config.layers for module in blocks[index].modules()}
        matched = [name for name in matched if id(lm.get_submodule(name)) in chosen]
    if not matched:
        raise ConfigError(
            f"policy.lora.target_modules={config.target_modules!r}: matches no layer; linear layers of this model: "
            f"{_kinds(linear)}"
        )
    for name in matched:
        if name not in linear:
            kind = "the output layer" if lm.get_submodule(name) is lm.get_output_embeddings() else "no linear layer"
            raise ConfigError(
                f"policy.lora.target_modules={config.target_modules!r}: {name} is {kind}; only linear layers inside "
                f"the model can have an adapter: {_kinds(linear)}"
            )
    return matched


def _selected(setting: str, rule: str | Sequence[str] | None, lm: nn.Module) -> set[str]:
    """Return the names of the modules that a rule selects. Raises ConfigError if a regular expression takes too long.

    As in PEFT, text is a regular expression for whole names, and a list has names or last parts of names.
    """
    names = [name for name, _ in lm.named_modules() if name]
    if not isinstance(rule, str):
        return {name for name in names for one in rule or () if name == one or name.endswith(f".{one}")}
    command = [sys.executable, "-I", "-S", "-c", FULL_MATCHES]
    given = json.dumps([rule, *names]).encode()
    try:
        # In a process: a match may take years, and cannot be interrupted.
        found = subprocess.run(command, input=given, capture_output=True, check=True, timeout=REGEX_SECONDS)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"policy.lora.{setting}={rule!r}: takes more than {REGEX_SECONDS:g} s to match the names of the modules; "
            "write it without nested repetitions"
        ) from None
    return set(json.loads(found.stdout))


def linear_names(lm: PreTrainedModel) -> Iterator[str]:
    """Yield the names of the layers that `all-linear` selects: every linear layer except the output layer."""
    head = lm.get_output_embeddings()
    for name, module in lm.named_modules():
        if type(module) in ADAPTED and module is not head:
            yield name


def _require_all_found(wanted: Iterable[str], names: Iterable[str], linear: list[str]) -> None:
    names = list(names)
    missing = [one for one in wanted if not any(name == one or name.endswith(f".{one}") for name in names)]
    if missing:
        raise ConfigError(
            f"policy.lora.target_modules: no module is called {missing[0]!r}; linear layers of this model: "
            f"{_kinds(linear)}"
        )


def _kinds(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
