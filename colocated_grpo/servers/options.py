"""Command line of the engine server, and the state that survives its restarts. Imports no slow library."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, Json, TypeAdapter, ValidationError

from colocated_grpo.runtime.program import LAST_PORT, LOG_LEVEL_VARIABLE, LOG_LEVELS, OneLineParser
from colocated_grpo.servers.engine_servers import LORA_RANKS
from colocated_grpo.types import JsonObject

if TYPE_CHECKING:
    from colocated_grpo.settings.generation import ModelConfig

DEFAULT_PORT = 9001
DEFAULT_LENGTH = 4096
DTYPES = ("auto", "bfloat16", "float16", "float32")
SHARE_VARIABLE = "VLLM_ENABLE_SHARED_WEIGHTS"
"""Environment variable: 1 means --share-weights on one GPU, as in Atropos' example server."""
STATE_VARIABLE = "COLOCATED_GRPO_SERVE_STATE"
"""Environment variable with the path of the state file. The file exists once the engine has been ready."""
REQUESTED = "requested"
"""Key of the state file: the model to load in place of `model`, the last one that was served."""
RESTART = 75
"""Exit code that requests a restart of the engine process (EX_TEMPFAIL)."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    model: str
    revision: str | None
    trust_remote_code: bool
    host: str
    port: int
    dtype: Literal["auto", "bfloat16", "float16", "float32"]
    gpu_memory_utilization: float | None
    kv_cache_memory_bytes: int | None
    max_model_len: int
    max_num_seqs: int
    tensor_parallel_size: int
    enforce_eager: bool
    engine_args: JsonObject
    share_weights: bool
    enable_lora: bool
    max_lora_rank: int
    api_key_variable: str | None
    allow_host: list[str]
    log_level: str


def parse(arguments: Sequence[str] | None) -> ServeOptions:
    """Parse the arguments. Exits with code 2 and one line if an argument is invalid."""
    parser = _parser()
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


def _checked(kind: Any, rule: str) -> Callable[[str], object]:
    """Return an argparse type for values that pydantic parses as `kind`. rule: completes the message "must be ..."."""
    adapter = TypeAdapter(kind)

    def read(text: str) -> object:
        try:
            return adapter.validate_strings(text)
        except ValidationError:
            raise argparse.ArgumentTypeError(f"{text!r}: must be {rule}") from None

    return read


_port = _checked(Annotated[int, Field(ge=0, le=LAST_PORT)], f"a port, 0-{LAST_PORT}; 0 is any free one")
_fraction = _checked(Annotated[float, Field(gt=0, le=1)], "above 0 and at most 1")
_positive = _checked(Annotated[int, Field(gt=0)], "a positive whole number")
_length = _checked(Annotated[int, Field(ge=2)], "at least 2, a token of prompt and one sampled")
_object = _checked(Json[JsonObject], "a JSON object")


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="colocated-grpo serve",
        allow_abbrev=False,
        description="Serve a model over HTTP: /generate, the OpenAI API, and routes that pause the engine.",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="folder or Hugging Face name of a causal language model"
    )
    parser.add_argument("--model", dest="named_model", metavar="MODEL", help="the same, as a flag")
    parser.add_argument("--revision", help="branch, tag or commit on the Hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code of the checkpoint")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=_port, default=DEFAULT_PORT, help=f"port (default: {DEFAULT_PORT})")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="type of the weights (default: auto, which is bfloat16 on a GPU and float32 on the CPU)",
    )
    parser.add_argument(
        "--gpu-memory-utilization",
        type=_fraction,
        metavar="FRACTION",
        help="part of the GPU's memory for weights and KV cache (default: as much as the sequences can use)",
    )
    parser.add_argument(
        "--kv-cache-memory-bytes", type=_positive, metavar="N", help="exact size of the KV cache (default: see above)"
    )
    parser.add_argument(
        "--max-model-len",
        type=_length,
        default=DEFAULT_LENGTH,
        metavar="N",
        help=f"longest prompt plus completion in tokens (default: {DEFAULT_LENGTH}, or the model's own limit)",
    )
    parser.add_argument(
        "--max-num-seqs", type=_positive, default=256, metavar="N", help="sequences decoded together (default: 256)"
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=_positive,
        default=1,
        metavar="N",
        help="GPUs that share the weights (default: 1)",
    )
    parser.add_argument("--enforce-eager", action="store_true", help="decode without CUDA graphs")
    parser.add_argument(
        "--engine-args",
        type=_object,
        default={},
        metavar="JSON",
        help='further vLLM engine arguments, such as {"quantization": "fp8"}',
    )
    parser.add_argument(
        "--share-weights",
        action="store_true",
        help="let a trainer of this machine compute with the engine's weights (vllm_bridge_config.json)",
    )
    parser.add_argument("--enable-lora", action="store_true", help="accept adapters at /lora/load")
    parser.add_argument(
        "--max-lora-rank",
        type=int,
        choices=LORA_RANKS,
        default=32,
        help="largest rank of an adapter (default: 32)",
    )
    parser.add_argument(
        "--api-key-variable", metavar="NAME", help="environment variable with the key that requests must send"
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a further name of this machine that clients use; repeat for several (not needed with a key)",
    )
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="INFO", help=f"or {LOG_LEVEL_VARIABLE}")
    return parser


def model_settings(options: ServeOptions) -> ModelConfig:
    from colocated_grpo.settings.generation import ModelConfig

    return ModelConfig(name=options.model, revision=options.revision, trust_remote_code=options.trust_remote_code)


def within_model(options: ServeOptions) -> ServeOptions:
    """Return the options with max_model_len lowered to the model's own limit.

    Raises ConfigError if the model does not exist.
    """
    from colocated_grpo.settings.config_json import longest_sequence, read_config_json, text_part

    own_limit = longest_sequence(text_part(read_config_json(model_settings(options))))
    return replace(options, max_model_len=min(options.max_model_len, own_limit or options.max_model_len))


def resumed(options: ServeOptions) -> ServeOptions:
    """Return the options with the port of the previous process, if there was one, and the model that was requested."""
    file = _file()
    if file is None or not file.exists():
        return options
    state = json.loads(file.read_text(encoding="utf-8"))
    return replace(options, port=state["port"], model=state[REQUESTED] or state["model"])


def fall_back(file: Path) -> str | None:
    """Withdraw the request for a model and return the model's name: the process that was to load it has ended.

    Returns None if there is no such request.
    """
    state = json.loads(file.read_text(encoding="utf-8"))
    if (requested := state[REQUESTED]) is not None:
        _write(file, {**state, REQUESTED: None})
    return requested


def _write(file: Path, state: JsonObject) -> None:
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(state), encoding="utf-8")
    partial.replace(file)


class Restart:
    """A request to restart the engine with another model on the same port."""

    def __init__(self) -> None:
        self.requested = False
        self._state: JsonObject = {}

    def ready(self, model: str, port: int) -> None:
        """Record the model and port to use for a restart after a crash."""
        self._state = {"model": model, "port": port, REQUESTED: None}
        self._save()

    def request(self, model: str) -> None:
        """End this process and request a restart with `model`."""
        self._state[REQUESTED] = model
        self._save()
        self.requested = True

    def _save(self) -> None:
        if (file := _file()) is not None:
            _write(file, self._state)


def _file() -> Path | None:
    path = os.environ.get(STATE_VARIABLE)
    return None if path is None else Path(path)
