"""An engine that a tool fills with a model's weights from disk."""

from __future__ import annotations

from pathlib import Path

from colocated_grpo.errors import RunError
from colocated_grpo.policy.loading import engine_dtype
from colocated_grpo.policy.model_files import ModelFiles
from colocated_grpo.rollout.vllm.engine import VLLMEngine
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.schema import Config


def subject_engine(config: Config, model: ModelFiles, adapter: Path | None, world: World) -> VLLMEngine:
    """Return an engine with the model's weights, and the adapter beside them. Raises RunError. Collective.

    config: of `with_subject`.
    """
    engine = VLLMEngine(config, model.folder, engine_dtype(config, world.device), world)
    if adapter is not None:
        try:
            engine.adapters.load(adapter.name, str(adapter))
        except ValueError as error:
            raise RunError(str(error)) from None
    return engine
