"""The model that a tool loads into an engine: a folder, an adapter with its base, or the export of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from colocated_grpo.servers.engine_servers import LORA_RANKS
from colocated_grpo.settings.adapter_files import CONFIG_FILE as ADAPTER_CONFIG
from colocated_grpo.settings.config_file import load_config
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.schema import Config
from colocated_grpo.types import JsonObject

if TYPE_CHECKING:
    from colocated_grpo.rollout.vllm.spec import EngineSpec
    from colocated_grpo.rollout.vllm.vllm_engine import VLLMEngine
    from colocated_grpo.runtime.distributed import World

RUN_CONFIG = "config.yaml"
EXPORTS = ("best_model", "best_adapter", "final_model", "final_adapter")
"""Export folders of a run, in order of preference."""
_EXPORT_OF_STEP = re.compile(r"(?:adapter_)?step_(\d+)")


@dataclass(frozen=True, kw_only=True)
class ModelSubject:
    """A model, and the settings that come with it."""

    model: str
    """Folder or Hub name of the weights; for an adapter, of its base."""
    adapter: Path | None = None
    rank: int = 0
    """Rank of the adapter."""
    run_config: Path | None = None
    """Config of the run that exported the model."""

    @property
    def folder(self) -> str:
        """The adapter's folder, else the model's folder or name."""
        return str(self.adapter or self.model)


def subject_of(name: str) -> ModelSubject:
    """Return the subject called `name`. A run folder stands for its best, else final, else newest export.

    Raises ConfigError.
    """
    folder = Path(name)
    run_config = folder / RUN_CONFIG
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
    for name in EXPORTS:
        if (run / name).is_dir():
            return run / name
    steps = {int(found[1]): path for path in run.iterdir() if (found := _EXPORT_OF_STEP.fullmatch(path.name))}
    if not steps:
        raise ConfigError(
            f"MODEL={str(run)!r}: this run has exported no model yet ({', '.join(EXPORTS)}, step_N); it does so at its "
            "end, and every checkpoint.export_every steps"
        )
    return steps[max(steps)]


def read_settings(subject: ModelSubject, path: str | Path, overrides: Sequence[str]) -> Config:
    """Return the settings of a config file for the subject's model in one engine per rank. Raises ConfigError.

    The base of an adapter may be overridden, because its folder may have moved since the training.
    """
    model = ["--model.name", subject.model]
    return with_subject(load_config(path, [*model, *overrides] if subject.adapter else [*overrides, *model]), subject)


def with_subject(config: Config, subject: ModelSubject) -> Config:
    """Return the config for engines of the subject in this process, without a policy. Raises ConfigError."""
    arguments: JsonObject = {"use_tqdm_on_load": False, **config.engine.args}
    if subject.adapter is not None:
        fitting = [rank for rank in LORA_RANKS if rank >= subject.rank]
        if not fitting:
            raise ConfigError(f"MODEL: the adapter's rank {subject.rank} is above {LORA_RANKS[-1]}, vLLM's largest")
        arguments |= {"enable_lora": True, "max_lora_rank": fitting[0]}
    return config.model_copy(
        update={
            "engine": config.engine.model_copy(update={"placement": "colocated", "args": arguments}),
            "policy": config.policy.model_copy(update={"lora": None, "train_layers": None, "routing_replay": False}),
            "weights": "copied",
        }
    )


def subject_engine(spec: EngineSpec, adapter: Path | None, world: World) -> VLLMEngine:
    """Return an engine with the model's weights from disk, and with the adapter if given. Raises RunError. Collective.

    spec: built from a config that `with_subject` returned.
    """
    # Imported here: a wrong name of a model is reported before the engine's libraries are imported.
    from colocated_grpo.errors import RunError
    from colocated_grpo.rollout.vllm.vllm_engine import VLLMEngine

    engine = VLLMEngine(replace(spec, reads_weights=True), world)
    if adapter is not None:
        try:
            engine.adapters.load(adapter.name, str(adapter))
        except ValueError as error:
            raise RunError(str(error)) from None
    return engine
