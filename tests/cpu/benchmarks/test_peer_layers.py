"""TRL as the peer on several GPUs: accelerate finds every layer class that a model names for FSDP."""

from __future__ import annotations

import pytest
from accelerate.utils import FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.peer_layers import name_present_layers
from tests.support.families import SETTINGS
from tests.support.training_runs import tiny_model


def wrapped_classes(model: nn.Module) -> set[str]:
    """Return the names of the classes that accelerate would wrap. Raises ValueError if it does not find one."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    plugin.set_auto_wrap_policy(model)
    return {layer.__name__ for layer in plugin.auto_wrap_policy.keywords["transformer_layer_cls"]}


@pytest.mark.parametrize("adapter", [False, True], ids=["all weights", "adapter"])
def test_layers_that_a_text_model_lacks_are_not_looked_for(adapter):
    model = AutoModelForCausalLM.from_pretrained(tiny_model("qwen3_5", edits=SETTINGS["qwen3_5"]))
    if adapter:
        model = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    with pytest.raises(ValueError, match="Could not find the transformer layer class Qwen3_5VisionBlock"):
        wrapped_classes(model)
    name_present_layers(model)
    assert wrapped_classes(model) == {"Qwen3_5DecoderLayer"}
