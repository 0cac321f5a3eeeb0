"""Export of the policy as a Hugging Face model, or of its adapter, for transformers, PEFT and vLLM."""

import json
import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from colocated_grpo.errors import in_one_line, write_failed
from colocated_grpo.policy.model_loader import dtype_of
from colocated_grpo.policy.policy import Policy
from colocated_grpo.runtime.checksums import CHECKSUMS_FILE, write_checksums
from colocated_grpo.runtime.distributed import World, whole
from colocated_grpo.settings.schema import CheckpointConfig
from colocated_grpo.settings.training import LoRAConfig

if TYPE_CHECKING:
    from colocated_grpo.policy.model_files import ModelFiles

FILE_BYTES = 4 << 30


@dataclass(frozen=True, kw_only=True)
class Export:
    """One kind of folder that a run exports."""

    policy: Policy
    world: World
    final_name: ClassVar[str]
    best_name: ClassVar[str]
    step_prefix: ClassVar[str]

    def name_at(self, step: int) -> str:
        return f"{self.step_prefix}{step}"

    def write(self, target: Path) -> None:
        """Write the folder under another name, and rename it to `target` once it is complete. Collective."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ModelExport(Export):
    """All weights, merged if there is an adapter, with config, tokenizer and generation settings."""

    final_name, best_name, step_prefix = "final_model", "best_model", "step_"
    files: "ModelFiles"
    """Files of the model that the run started from."""
    dtype: torch.dtype

    def write(self, target: Path) -> None:
        """Write the model. Gathers one tensor at a time; rank 0 buffers at most one file of tensors (FILE_BYTES)."""
        with _renamed_when_complete(target, self.world) as partial:
            writer = None if partial is None else _Writer(partial)
            for name, tensor in self._full_tensors():
                if writer is not None:
                    with _write_errors_in_one_line(target.parent):
                        writer.add(name, tensor.cpu().contiguous())
            if partial is not None and writer is not None:
                with _write_errors_in_one_line(target.parent):
                    writer.close()
                    self._write_settings(partial)

    def _full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.policy.weights.published().items():
            # Cast before the gather: a 16-bit type halves the bytes that move.
            yield from self.policy.model.conversion.stored(name, whole(parameter.detach().to(self.dtype)))
        for name, buffer in self.policy.model.hf_buffers().items():
            yield name, buffer

    def _write_settings(self, folder: Path) -> None:
        self.files.hf_config.dtype = self.dtype
        self.files.hf_config.save_pretrained(folder)
        self.files.tokenizer.save_pretrained(folder)
        if (settings := self.files.folder / "generation_config.json").exists():
            shutil.copy(settings, folder)


@dataclass(frozen=True, kw_only=True)
class AdapterExport(Export):
    """The adapter in PEFT's format, float32, with the tokenizer."""

    final_name, best_name, step_prefix = "final_adapter", "best_adapter", "adapter_step_"
    lora: LoRAConfig
    base: str
    """Name of the base model, as PEFT records it."""
    tokenizer: PreTrainedTokenizerBase

    def write(self, target: Path) -> None:
        from colocated_grpo.policy.lora.files import write_adapter  # imports PEFT

        with _renamed_when_complete(target, self.world) as partial:
            if partial is not None:
                with _write_errors_in_one_line(target.parent):
                    write_adapter(partial, self.lora, self.base, self.policy.model, self.policy.parameters())
                    self.tokenizer.save_pretrained(partial)


def build_exports(
    checkpoint: CheckpointConfig, lora: LoRAConfig | None, base: str, policy: Policy, model: "ModelFiles", world: World
) -> list[Export]:
    """Return the run's exports: its model, or the adapter of `base` and, with export_merged, the merged model."""
    dtype = dtype_of(checkpoint.export_dtype, auto=policy.dtype)
    whole_model = ModelExport(policy=policy, files=model, dtype=dtype, world=world)
    if lora is None:
        return [whole_model]
    adapter = AdapterExport(policy=policy, lora=lora, base=base, tokenizer=model.tokenizer, world=world)
    return [adapter, whole_model] if checkpoint.export_merged else [adapter]


@contextmanager
def _renamed_when_complete(target: Path, world: World) -> Generator[Path | None]:
    """Yield an empty folder on rank 0 and None on other ranks; rename it to `target` at the end. Collective."""
    partial = target.with_name(target.name + ".partial") if world.is_main else None
    if partial is not None:
        with _write_errors_in_one_line(target.parent):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    yield partial
    if partial is not None:
        with _write_errors_in_one_line(target.parent):
            write_checksums(partial)
            for weights in partial.glob("*.safetensors"):  # safetensors lets only this user read its files
                with suppress(PermissionError):  # a filesystem without modes
                    shutil.copymode(partial / CHECKSUMS_FILE, weights)
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
    world.barrier()


@contextmanager
def _write_errors_in_one_line(folder: Path) -> Generator[None]:
    """Convert any error to a RunError: safetensors and tokenizers raise their own types for a full disk."""
    try:
        yield
    except Exception as error:
        raise write_failed("export", folder, in_one_line(error)) from error


class _Writer:
    """Writes tensors and their index to safetensors files. A file has at most FILE_BYTES, or a single larger tensor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, Tensor] = {}
        self._bytes = self._total = 0
        self._files: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        if self._pending and self._bytes + tensor.nbytes > FILE_BYTES:
            self._flush()
        self._pending[name] = tensor
        self._bytes += tensor.nbytes
        self._total += tensor.nbytes

    def _flush(self) -> None:
        save_file(self._pending, self._part(len(self._files)), metadata={"format": "pt"})
        self._files.append(list(self._pending))
        self._pending, self._bytes = {}, 0

    def _part(self, index: int) -> Path:
        return self._folder / f"part-{index:05d}.safetensors"

    def close(self) -> None:
        """Write the last file and the index, and rename all files: the final names contain the number of files."""
        self._flush()
        if (count := len(self._files)) == 1:
            self._part(0).rename(self._folder / "model.safetensors")
            return
        names = [f"model-{index + 1:05d}-of-{count:05d}.safetensors" for index in range(count)]
        for index, name in enumerate(names):
            self._part(index).rename(self._folder / name)
        weight_map = {tensor: name for tensors, name in zip(self._files, names, strict=True) for tensor in tensors}
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
