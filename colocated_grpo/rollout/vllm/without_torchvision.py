"""vLLM's text models of Qwen 3.5 where torchvision is missing, as in the CPU installation.

vLLM defines them beside the models that see images, whose processors need torchvision. The text models use none of it.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec

from vllm import ModelRegistry

DEFINED_IN = dict.fromkeys(("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), "vllm.model_executor.models.qwen3_5")
PROCESSORS = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
PROCESSORS_FOR_PILLOW = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
"""The same names without torchvision; transformers itself falls back to them where a model is loaded by its name."""


@cache  # each engine of a process calls it, and vLLM warns of a second registration
def register(architecture: str) -> None:
    """Import vLLM's class and register it. Does nothing for other models, or if torchvision is installed."""
    if architecture not in DEFINED_IN or find_spec("torchvision") is not None:
        return
    sys.modules.setdefault(PROCESSORS, import_module(PROCESSORS_FOR_PILLOW))
    # Registered as a class: vLLM would import a module that is named only in another process, where it fails.
    ModelRegistry.register_model(architecture, getattr(import_module(DEFINED_IN[architecture]), architecture))
