"""From a model name to a sharded module: meta device -> checkpointing -> compile -> fully_shard -> own rows from disk.

No rank ever holds the whole model: parameters are created without storage, and each rank reads only its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.initialization import no_init_weights

from colocated_grpo.batching import SharedKeys
from colocated_grpo.config.errors import ConfigError
from colocated_grpo.config.schema import ModelConfig
from colocated_grpo.policy.attention import PACKED
from colocated_grpo.policy.blocks import Block, blocks_of
from colocated_grpo.policy.checkpoint_files import CheckpointReader
from colocated_grpo.policy.logprobs import linear_logprobs
from colocated_grpo.runtime.distributed import local_part

Head = Callable[..., tuple[Tensor, ...]]
"""`linear_logprobs`, or anything else called like it."""


STATEFUL = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""transformers' names for layers in which a token gets more of the tokens before it than their keys and values."""
COMPILE_OPTIONS = {"triton.mix_order_reduction_non_strict_mode": True}
"""Inductor would choose how norms reduce by the number of tokens and compile once for few and once for many: the second
time in a run's first step, for the rehearsals before it are small."""


@dataclass(frozen=True, kw_only=True)
class PackedTokens:
    """Input of one forward pass, as in a micro-batch: the model predicts targets_N at rows source_N."""

    input_ids_T: Tensor
    position_ids_T: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    source_N: Tensor
    targets_N: Tensor
    temperature_N: Tensor
    shared_keys: SharedKeys | None


class PackedLM(nn.Module):
    """A causal language model whose forward returns log-probabilities of chosen tokens, or a loss, instead of logits.

    Everything that touches parameters, the head included, happens inside `forward`, so that FSDP's hooks see it.
    """

    def __init__(self, lm: nn.Module, chunk_tokens: int) -> None:
        super().__init__()
        self.lm = lm
        self.chunk_tokens = chunk_tokens
        self.softcap = getattr(lm.config, "final_logit_softcapping", None)

    def forward(self, tokens: PackedTokens, head: Head = linear_logprobs) -> tuple[Tensor, ...]:
        """What `head` makes of the scored tokens: by default log-probabilities and entropies, both [N] float32."""
        hidden_1TH = self.lm.base_model(
            input_ids=tokens.input_ids_T[None],
            position_ids=tokens.position_ids_T[None],
            use_cache=False,
            cu_seq_lens_q=tokens.cu_seqlens,
            cu_seq_lens_k=tokens.cu_seqlens,
            max_length_q=tokens.max_seqlen,
            max_length_k=tokens.max_seqlen,
            shared_keys=tokens.shared_keys,
        ).last_hidden_state
        return head(
            hidden_1TH[0, tokens.source_N],
            self.lm.get_output_embeddings().weight,
            tokens.targets_N,
            temperature_N=tokens.temperature_N,
            chunk_tokens=self.chunk_tokens,
            softcap=self.softcap,
        )

    def hf_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters under the names that a Hugging Face checkpoint gives them; a tied head appears once."""
        return {checkpoint_name(name): parameter for name, parameter in self.named_parameters()}


def checkpoint_name(name: str) -> str:
    return name.removeprefix("lm.").replace("_checkpoint_wrapped_module.", "")


def read_model_config(config: ModelConfig, folder: Path) -> PretrainedConfig:
    hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    for key in ("logit_scale", "logits_scaling"):
        if getattr(hf_config, key, None) not in (None, 1, 1.0):
            raise ConfigError(f"model.name={config.name!r}: models that scale their logits ({key}) are not supported")
    return hf_config


def build_empty(
    hf_config: PretrainedConfig, chunk_tokens: int, *, trust_remote_code: bool, attention: str = PACKED
) -> PackedLM:
    """The module tree with parameters on the meta device and real buffers (rotary frequencies).

    attention: an implementation's name.
    """
    with init_empty_weights(include_buffers=False), no_init_weights():
        lm = AutoModelForCausalLM.from_config(
            hf_config, attn_implementation=attention, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    kinds = set(getattr(lm.config, "layer_types", None) or ())
    if lm._is_stateful or STATEFUL & kinds:
        # Packed sequences would run into one another, and what follows a shared beginning would not know its state.
        raise ConfigError(
            f"model type {hf_config.model_type!r}: layers that carry a state from token to token (linear attention, "
            "Mamba, convolutions) are not supported"
        )
    if "chunked_attention" in kinds:
        raise ConfigError(f"model type {hf_config.model_type!r}: attention within chunks is not supported")
    lm.tie_weights()  # creating parameters empty gave each its own tensor
    head = lm.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ConfigError(f"model type {hf_config.model_type!r}: an output layer with a bias is not supported")
    # Dropout off for good: the engine samples without it. Gradients do not depend on the module's mode.
    return PackedLM(lm, chunk_tokens).eval()


def transformer_blocks(lm: nn.Module) -> nn.ModuleList:
    """The list of decoder blocks: of the ModuleLists of one class the one with most parameters."""
    lists = [module for module in lm.modules() if isinstance(module, nn.ModuleList) and len(module)]
    uniform = [modules for modules in lists if len({type(block) for block in modules}) == 1]
    if not uniform:
        raise ConfigError(f"{type(lm).__name__}: no list of transformer blocks found")
    return max(uniform, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))


def prepare_blocks(model: PackedLM, *, checkpointed: bool, compiled: bool) -> None:
    """Let each transformer block recompute its activations and compile, in place."""
    blocks = transformer_blocks(model.lm)
    for index, module in enumerate(blocks):
        blocks[index] = Block(module, checkpointed=checkpointed)
        if compiled:
            blocks[index].compile(dynamic=True, options=COMPILE_OPTIONS)


def shard(model: PackedLM, mesh: DeviceMesh, dtype: torch.dtype, *, offloaded: bool) -> None:
    """Apply FSDP2 to each prepared block, then to the rest, in place. offloaded: as in `load_shards`."""
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if offloaded else OffloadPolicy()
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, mp_policy=precision, offload_policy=offload)
    # What the whole model is given stays as it is: 0.7 is no bfloat16, and the engine sampled with 0.7.
    precision = replace(precision, cast_forward_inputs=False)
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is a local sum over a global count: ranks add up, FSDP must not average.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if mesh.size() == 1 and not offloaded:
        # Nobody to gather from: compute weights are made once an optimizer step, not in each pass of a micro-batch.
        model.set_reshard_after_forward(False)
        model.set_reshard_after_backward(False)


def host_copy(model: PackedLM, dtype: torch.dtype, *, pinned: bool) -> dict[str, DTensor]:
    """This rank's shards in `dtype` in host memory, under checkpoint names: weights to write somewhere, not to compute
    with. pinned: for copies to the device at full speed."""
    copies = {}
    for name, parameter in model.hf_parameters().items():
        local = parameter.to_local().detach().to("cpu", dtype)
        meta = TensorMeta(parameter.shape, parameter.stride(), dtype)
        spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
        # As FSDP2 makes its own: from_local would move the rows to the mesh's device.
        copies[name] = DTensor(local.pin_memory() if pinned else local, spec, requires_grad=False)
    return copies


def free_gathered(model: PackedLM) -> None:
    """Let go of gathered parameters: a later forward pass would use them whatever became of the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def load_shards(model: PackedLM, folder: Path, device: torch.device, *, offloaded: bool) -> None:
    """Give the parameters storage and fill this rank's rows from the checkpoint in `folder`.

    device: where the model computes. offloaded: its parameters rest in host memory between uses (FSDP2 CPU offload).
    """
    _allocate(model, torch.device("cpu") if offloaded else device, device)
    read_parameters(model.hf_parameters(), model.lm.base_model_prefix, folder)


@torch.no_grad()
def read_parameters(parameters: Mapping[str, nn.Parameter], prefix: str, folder: Path) -> None:
    """Read parameters, of shards this rank's rows, from the checkpoint in `folder`.

    prefix: of the base model's names ("model"), which a checkpoint may have or lack.
    """
    reader = CheckpointReader(folder)
    names = reader.names()
    prefix += "."
    missing = []
    for name, parameter in parameters.items():
        source = next((n for n in (name, name.removeprefix(prefix), prefix + name) if n in names), None)
        if source is None:
            missing.append(name)
        else:
            _fill(parameter, reader, source)
    if missing:
        raise ConfigError(
            f"model.name={str(folder)!r}: the checkpoint lacks {len(missing)} tensors, first {missing[0]!r}"
        )


def _allocate(model: PackedLM, parameters_on: torch.device, buffers_on: torch.device) -> None:
    """Storage for parameters, and buffers moved; `to_empty` alone would lose the values of the buffers."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=parameters_on)
    for name, buffer in model.named_buffers():
        buffer.data = buffers[name].to(buffers_on)


def _fill(parameter: nn.Parameter, reader: CheckpointReader, source: str) -> None:
    local = local_part(parameter)
    start, rows = 0, local.shape[0]
    if isinstance(parameter, DTensor):
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        start, rows = offset[0], shape[0]
    if rows:
        local.copy_(reader.read(source, slice(start, start + rows)))
