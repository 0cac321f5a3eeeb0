"""Export of the policy as a Hugging Face folder that transformers and vLLM load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from colocated_grpo.errors import in_one_line, write_failed
from colocated_grpo.policy.policy import Policy
from colocated_grpo.runtime.distributed import World, whole

FILE_BYTES = 4 << 30


def export(
    policy: Policy,
    hf_config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    source: Path,
    target: Path,
    dtype: torch.dtype,
    world: World,
) -> None:
    """Write weights in `dtype`, config, tokenizer and the `source` model's generation settings to `target`. Collective.

    Tensors are gathered one at a time, and rank 0 buffers at most one file (FILE_BYTES) of them. The folder is renamed
    to `target` once it is complete.
    """
    partial = target.with_name(target.name + ".partial")
    writer = _Writer(partial) if world.is_main else None
    for name, tensor in _full_tensors(policy, dtype):
        if writer is not None:
            with _write_errors_in_one_line(target.parent):
                writer.add(name, tensor.cpu().contiguous())
    if writer is not None:
        with _write_errors_in_one_line(target.parent):
            writer.close()
            hf_config.dtype = dtype
            hf_config.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            if (source / "generation_config.json").exists():
                shutil.copy(source / "generation_config.json", partial)
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
    world.barrier()


@contextmanager
def _write_errors_in_one_line(folder: Path) -> Iterator[None]:
    """Convert any error to a RunError: safetensors and tokenizers raise types of their own for a full disk."""
    try:
        yield
    except Exception as error:
        raise write_failed("export", folder, in_one_line(error)) from error


def _full_tensors(policy: Policy, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in policy.parameters().items():
        # Cast before the gather: half the bytes move.
        yield name, whole(parameter.detach().to(dtype))


class _Writer:
    """Writes tensors to safetensors files of at most FILE_BYTES (or one tensor), and their index."""

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
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
        """Write the last file and the index, and rename the files: their names contain the number of files."""
        self._flush()
        count = len(self._files)
        if count == 1:
            self._part(0).rename(self._folder / "model.safetensors")
            return
        names = [f"model-{index + 1:05d}-of-{count:05d}.safetensors" for index in range(count)]
        for index, name in enumerate(names):
            self._part(index).rename(self._folder / name)
        weight_map = {tensor: name for tensors, name in zip(self._files, names, strict=True) for tensor in tensors}
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
