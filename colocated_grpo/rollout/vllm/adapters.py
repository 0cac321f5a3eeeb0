"""Adapters that vLLM applies on top of the base weights, for engine servers. Training merges its adapter instead."""

import itertools
import os
from contextlib import suppress
from pathlib import Path

import torch
from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine

from colocated_grpo.errors import in_one_line
from colocated_grpo.runtime.checksums import exported_damage, exported_digest
from colocated_grpo.types import JsonObject


def avoid_dependent_launches(device: torch.device) -> None:
    """Turn off dependent launches in adapter kernels on Blackwell GPUs: Triton cannot compile them (vllm#30872)."""
    if torch.cuda.get_device_capability(device) >= (10, 0):
        os.environ.setdefault("VLLM_LORA_DISABLE_PDL", "1")


class VLLMAdapters:
    """The adapter of all requests that an engine receives from now on; none at first."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._ids = itertools.count(1)
        self._name: str | None = None
        self.active: LoRARequest | None = None

    def load(self, name: str, path: str) -> JsonObject:
        """Use the PEFT adapter in folder `path`. No request may be running.

        Returns the new status and the folder's `exported_digest`. If the engine cannot load the adapter, or files
        differ from their checksums, raises ValueError and keeps the previous adapter.
        """
        self._require_support()
        if (problem := exported_damage(Path(path))) is not None:
            raise ValueError(f"adapter {path!r}: {problem}")
        number = next(self._ids)
        # vLLM 0.26 looks up cached prefixes by name alone: a second adapter of the name would hit those of the first.
        request = LoRARequest(f"{name}#{number}", number, path)
        try:
            loaded = self._engine.add_lora(request)
        except Exception as error:  # errors have many types: unreadable files, PEFT's settings, vLLM's checks
            raise ValueError(f"adapter {path!r}: {in_one_line(error)}") from error
        if not loaded:
            raise ValueError(f"adapter {path!r}: vLLM did not load it")
        return self._replace(name, request) | {"exported": exported_digest(Path(path))}

    def unload(self) -> JsonObject:
        """Use the base weights, and return the new status. No request may be running."""
        self._require_support()
        return self._replace(None, None)

    def status(self) -> JsonObject:
        """Return name and folder of the active adapter; None without an adapter."""
        active = self.active
        return {
            "enabled": self._engine.vllm_config.lora_config is not None,
            "adapter_name": self._name,
            "adapter_path": None if active is None else active.lora_path,
        }

    def _replace(self, name: str | None, request: LoRARequest | None) -> JsonObject:
        former, self._name, self.active = self.active, name, request
        if former is not None:
            with suppress(ValueError):  # vLLM may have evicted it
                self._engine.remove_lora(former.lora_int_id)
        self._engine.reset_prefix_cache()
        runner = self._engine.model_executor.driver_worker.worker.model_runner  # pyrefly: ignore[missing-attribute]
        for cache in runner.kv_caches:
            for part in cache if isinstance(cache, list | tuple) else [cache]:
                part.zero_()  # else a NaN of an adapter would stay in the unused slots of later sequences' blocks
        return self.status()

    def _require_support(self) -> None:
        if self._engine.vllm_config.lora_config is None:
            raise ValueError("the server was started without --enable-lora")
