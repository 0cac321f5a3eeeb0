"""Command line of the engine server, and the state that survives its restarts. Imports no slow library."""

import argparse
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, Json, TypeAdapter, ValidationError

from colocated_grpo.errors import ConfigError
from colocated_grpo.runtime.program import LAST_PORT, LOG_LEVEL_VARIABLE, LOG_LEVELS, OneLineParser
from colocated_grpo.servers.engine_servers import LORA_RANKS, lora_limit
from colocated_grpo.settings.generation import ModelConfig
from colocated_grpo.settings.inputs import ADAPTER_CONFIG
from colocated_grpo.tracking.files import BEST, FINAL, exports, write_atomically
from colocated_grpo.types import JsonObject

DEFAULT_PORT = 9001
DEFAULT_LENGTH = 4096
SHARE_VARIABLE = "VLLM_ENABLE_SHARED_WEIGHTS"
"""Environment variable: 1 means --share-weights on one GPU, as in Atropos' example server."""
STATE_VARIABLE = "COLOCATED_GRPO_SERVE_STATE"
"""Environment variable with the path of the state file. The file exists once the engine has been ready."""
REQUESTED = "requested"
"""Key of the state file: the model to load in place of `model`, the last one that was served."""
RESTART = 75
"""Exit code that requests a restart of the engine process (EX_TEMPFAIL)."""


def checked(kind: Any, rule: str) -> Callable[[str], object]:
    """Return an argparse type for values that pydantic parses as `kind`. rule: completes the message "must be ..."."""
    adapter = TypeAdapter(kind)

    def read(text: str) -> object:
        try:
            return adapter.validate_strings(text)
        except ValidationError:
            raise argparse.ArgumentTypeError(f"{text!r}: must be {rule}") from None

    return read


_port = checked(Annotated[int, Field(ge=0, le=LAST_PORT)], f"a port, 0-{LAST_PORT}; 0 is any free one")
_fraction = checked(Annotated[float, Field(gt=0, le=1)], "above 0 and at most 1")
positive = checked(Annotated[int, Field(gt=0)], "a positive whole number")
_length = checked(Annotated[int, Field(ge=2)], "at least 2, a token of prompt and one sampled")
_object = checked(Json[JsonObject], "a JSON object")


def _flag(help: str, **settings: Any) -> Any:
    """Return a field that is a flag. settings: arguments of argparse."""
    return field(metadata={"help": help, **settings})


def _switch(help: str) -> Any:
    return _flag(help, action="store_true")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    model: str
    named: str = ""
    """MODEL as given on the command line."""
    adapter: Path | None = None
    """Folder of the adapter to load, if MODEL is an adapter or a run with one."""
    revision: str | None = _flag("branch, tag or commit on the Hub")
    trust_remote_code: bool = _switch("run Python code of the checkpoint")
    tokenizer: str | None = _flag("folder or Hugging Face name of another tokenizer", metavar="NAME")
    chat_template: str | None = _flag("Jinja text, or a file with it (default: the tokenizer's)", metavar="TEMPLATE")
    chat_template_kwargs: JsonObject = _flag(  # noqa: RUF009
        "variables of the chat template that requests do not set", type=_object, default={}, metavar="JSON"
    )
    host: str = _flag("address to listen on (default: 127.0.0.1)", default="127.0.0.1")
    port: int = _flag(f"port (default: {DEFAULT_PORT})", type=_port, default=DEFAULT_PORT)
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = _flag(
        "type of the weights (default: auto, which is bfloat16 on a GPU and float32 on the CPU)",
        choices=("auto", "bfloat16", "float16", "float32"),
        default="auto",
    )
    gpu_memory_utilization: float | None = _flag(
        "part of the GPU's memory for weights and KV cache (default: as much as the sequences can use)",
        type=_fraction,
        metavar="FRACTION",
    )
    kv_cache_memory_bytes: int | None = _flag(
        "exact size of the KV cache (default: see above)", type=positive, metavar="N"
    )
    max_model_len: int = _flag(
        f"longest prompt plus completion in tokens (default: {DEFAULT_LENGTH}, or the model's own limit)",
        type=_length,
        default=DEFAULT_LENGTH,
        metavar="N",
    )
    max_num_seqs: int = _flag("sequences decoded together (default: 256)", type=positive, default=256, metavar="N")
    tensor_parallel_size: int = _flag("GPUs that share the weights (default: 1)", type=positive, default=1, metavar="N")
    enforce_eager: bool = _switch("decode without CUDA graphs")
    engine_args: JsonObject = _flag(  # noqa: RUF009
        'further vLLM engine arguments, such as {"quantization": "fp8"}', type=_object, default={}, metavar="JSON"
    )
    share_weights: bool = _switch(
        "let a trainer of this machine compute with the engine's weights (vllm_bridge_config.json)"
    )
    enable_lora: bool = _switch("accept adapters at /lora/load")
    max_lora_rank: int = _flag("largest rank of an adapter (default: 32)", type=int, choices=LORA_RANKS, default=32)
    api_key_variable: str | None = _flag("environment variable with the key that requests must send", metavar="NAME")
    allow_host: list[str] = _flag(  # noqa: RUF009
        "a further name of this machine that clients use; repeat for several (not needed with a key)",
        action="append",
        default=[],
        metavar="NAME",
    )
    log_level: str = _flag(f"or {LOG_LEVEL_VARIABLE}", choices=LOG_LEVELS, default="INFO")


def parse(arguments: Sequence[str] | None) -> ServeOptions:
    """Parse the arguments. Exits with code 2 and one line if an argument is invalid."""
    parser = OneLineParser(
        prog="colocated-grpo serve",
        description="Serve a model over HTTP: /generate, the OpenAI API, and routes that pause the engine.",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="folder of a model, a run or an adapter, or a name on the Hub"
    )
    parser.add_argument("--model", dest="named_model", metavar="MODEL", help="the same, as a flag")
    for option in fields(ServeOptions):
        if option.metadata:
            parser.add_argument(f"--{option.name.replace('_', '-')}", **option.metadata)
    values = vars(parser.parse_args(arguments))
    named = values.pop("named_model")
    if (named is None) == (values["model"] is None):
        parser.error("MODEL: must be given once, as MODEL or as --model MODEL")
    options = ServeOptions(**values | {"model": named or values["model"]})
    if options.share_weights and options.tensor_parallel_size > 1:
        parser.error(f"--share-weights: needs --tensor-parallel-size 1, not {options.tensor_parallel_size}")
    # Guides of Atropos' example trainer set the variable for servers on several GPUs too: their trainer broadcasts.
    wanted = os.environ.get(SHARE_VARIABLE) == "1" and options.tensor_parallel_size == 1
    return replace(options, share_weights=options.share_weights or wanted)


OF_MODEL = ("revision", "trust_remote_code", "tokenizer", "chat_template", "chat_template_kwargs")


def model_settings(options: ServeOptions) -> ModelConfig:
    return ModelConfig(name=options.model, **{name: getattr(options, name) for name in OF_MODEL})


_EXPORT_OF_STEP = re.compile(r"(?:adapter_)?step_(\d+)")


@dataclass(frozen=True, kw_only=True)
class ModelSubject:
    """A model, and the settings that come with it."""

    model: str
    """Folder or Hub name of the weights; for an adapter, of its base."""
    adapter: Path | None = None
    rank: int = 0
    run_config: Path | None = None
    """Config of the run that exported the model."""


def subject_of(name: str) -> ModelSubject:
    """Return the subject called `name`; of a run, its best, else final, else newest export. Raises ConfigError."""
    folder = Path(name)
    run_config = folder / "config.yaml"
    if run_config.is_file() and not (folder / "config.json").exists():
        return replace(subject_of(str(_exported(folder))), run_config=run_config)
    if not (folder / ADAPTER_CONFIG).is_file():
        return ModelSubject(model=name)
    try:
        saved = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        return ModelSubject(model=saved["base_model_name_or_path"], adapter=folder.absolute(), rank=saved["r"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"MODEL={name!r}: {ADAPTER_CONFIG} names no base model and rank ({error!r})") from None


def _exported(run: Path) -> Path:
    for names in (BEST, FINAL):
        if found := exports(run, names):
            return max(found, key=os.path.getmtime)  # a resume with other exports leaves the older one behind
    steps = {int(found[1]): path for path in run.iterdir() if (found := _EXPORT_OF_STEP.fullmatch(path.name))}
    if not steps:
        problem = f"this run has exported no model yet ({', '.join((*BEST, *FINAL))}, step_N)"
        rule = "it does so at its end, and every checkpoint.export_every steps"
        raise ConfigError(f"MODEL={str(run)!r}: {problem}; {rule}")
    return steps[max(steps)]


def with_model(options: ServeOptions) -> ServeOptions:
    """Replace a run or an adapter by its model, and lower max_model_len to the model's limit. Raises ConfigError."""
    from colocated_grpo.settings.config_file import load_config
    from colocated_grpo.settings.config_json import longest_sequence, read_config_json, text_part

    subject = subject_of(options.model)
    found: JsonObject = {"model": subject.model, "adapter": subject.adapter}
    if subject.adapter is not None:
        found |= {"enable_lora": True, "max_lora_rank": max(options.max_lora_rank, lora_limit(subject.rank))}
    if subject.run_config is not None:
        saved = load_config(subject.run_config, ["--model.name", subject.model]).model
        found |= {name: getattr(saved, name) for name in OF_MODEL if not getattr(options, name)}
    options = replace(options, named=options.model, **found)
    own_limit = longest_sequence(text_part(read_config_json(model_settings(options))))
    return replace(options, max_model_len=min(options.max_model_len, own_limit or options.max_model_len))


def save_ready(file: Path, model: str, port: int) -> None:
    """Record the model and the port to use for a restart after a crash."""
    write_atomically(file, json.dumps({"model": model, "port": port, REQUESTED: None}))


def save_requested(file: Path, model: str | None) -> str | None:
    """Record the model to load at the next start; None: the last one served. Return the model recorded before."""
    state = json.loads(file.read_text(encoding="utf-8"))
    write_atomically(file, json.dumps({**state, REQUESTED: model}))
    return state[REQUESTED]


def resumed(options: ServeOptions, file: Path) -> ServeOptions:
    """Return the options with the port of the previous process, if there was one, and the model that was requested."""
    if not file.exists():
        return options
    state = json.loads(file.read_text(encoding="utf-8"))
    return replace(options, port=state["port"], model=state[REQUESTED] or state["model"])
