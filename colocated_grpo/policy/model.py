"""Build a model: meta device -> checkpointing -> compile -> fully_shard.

Parameters have no storage until `masters` allocates those of this rank, so that no rank of several holds a whole model.

Shapes: T packed tokens, N scored tokens, H hidden size.
"""

from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from colocated_grpo.batching.micro_batch import PackedTokens
from colocated_grpo.errors import ConfigError, RunError, in_one_line
from colocated_grpo.policy.attention import PACKED, capped_attention, with_own_keys
from colocated_grpo.policy.blocks import Block, blocks_of
from colocated_grpo.policy.checkpoint_files import conversion_of
from colocated_grpo.policy.linear_attention import pack_linear_attention
from colocated_grpo.policy.logprobs import head_logits, linear_logprobs
from colocated_grpo.policy.lora.linear import FACTORS, is_factor
from colocated_grpo.policy.routing import LoadBalancing, RoutingReplay
from colocated_grpo.runtime.text_part import read_text_config
from colocated_grpo.settings.generation import ModelConfig
from colocated_grpo.settings.model_support import check_trains

Head = Callable[..., tuple[Tensor, ...]]
"""`linear_logprobs`, or a function with the same arguments."""
COMPILE_OPTIONS = {"triton.mix_order_reduction_non_strict_mode": True}
"""By default Inductor chooses the reduction of norms by the number of tokens and compiles twice, for few and for many
tokens. Trial steps are small, so the second compilation would slow down a run's first training step."""
COMPILE_OPTIONS_OF = {
    # The mix-order reduction pads with zero rows. A negative power of their mean is infinite, so the sum is NaN.
    "gemma4_text": {"triton.mix_order_reduction": False},
    # The tiling analysis fails for varying numbers of tokens in torch 2.11 (pytorch issue 181563).
    "deepseek_v3": {"triton.coalesce_tiling_analysis": False},
}
"""Options that avoid errors of Inductor, by model type."""


class PackedLM(nn.Module):
    """A causal language model whose forward returns log-probabilities of given tokens, or a loss, instead of logits.

    Parameters, including the output layer's, are used only inside `forward`, where FSDP's hooks gather them.
    """

    def __init__(self, lm: PreTrainedModel, chunk_tokens: int) -> None:
        super().__init__()
        self.lm = lm
        self.chunk_tokens = chunk_tokens
        self.softcap = getattr(lm.config, "final_logit_softcapping", None)
        self.logit_divisor = logit_divisor(lm.config)
        self.shares_prefixes = not lm._is_stateful
        """True if a prompt may be computed once for all siblings. False with a recurrent state."""
        self.conversion = conversion_of(lm.config.model_type)
        """Converts the model's parameters to the tensors of a checkpoint."""
        self.arrange: Callable[[PackedTokens], PackedTokens] = lambda tokens: tokens
        """Applied to the tokens of each forward pass; compiled blocks need `with_own_keys`."""
        self.head_logits = head_logits
        """Computes the logits of a chunk of tokens."""
        self.replay: RoutingReplay | None = None
        """Replaces the routers' choice of experts by the recorded routes."""
        self.balancing: LoadBalancing | None = None
        """Adds a loss of the routers to every backward pass."""

    def forward(self, tokens: PackedTokens, head: Head = linear_logprobs) -> tuple[Tensor, ...]:
        """Apply `head` to the scored tokens; by default return log-probabilities and entropies, both [N] float32."""
        if self.balancing is not None:
            self.balancing.load(tokens)
        tokens = self.arrange(tokens)
        if self.replay is not None:
            self.replay.load(tokens)
        hidden_1TH = self.lm.base_model(
            input_ids=tokens.input_ids_T[None],
            position_ids=tokens.position_ids_T[None],
            use_cache=False,
            cu_seq_lens_q=tokens.cu_seqlens,
            max_length_q=tokens.max_seqlen,
            prefix_keys=tokens.prefix_keys,
            capped=capped_attention(self.lm.config, tokens),
            context_group=None if tokens.context is None else tokens.context.name,
        ).last_hidden_state
        output_layer = self.lm.get_output_embeddings()
        assert output_layer is not None
        return head(
            hidden_1TH[0, tokens.source_N],
            output_layer.weight,
            tokens.targets_N,
            # Scaled logits, as in Granite and Cohere, are logits at another temperature.
            temperature_N=tokens.temperature_N * self.logit_divisor,
            chunk_tokens=self.chunk_tokens,
            softcap=self.softcap,
            logits=self.head_logits,
        )

    def hf_parameters(self) -> dict[str, nn.Parameter]:
        """Return parameters by their name in a Hugging Face checkpoint; a tied output layer appears once.

        The factors of adapters and weights in 4 bits are left out: no checkpoint has them.
        """
        own = (*FACTORS, "packed")
        return {checkpoint_name(name): p for name, p in self.named_parameters() if not name.endswith(own)}

    def hf_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that checkpoints store, by checkpoint name. Buffers are not trained.

        Most families have none. In Gemma 4, a buffer scales the output of each block.
        """
        return {
            checkpoint_name(f"{path}.{name}"): buffer
            for path, module in self.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        }


def checkpoint_name(name: str) -> str:
    """Return the checkpoint name of a parameter of PackedLM."""
    return name.removeprefix("lm.").replace("_checkpoint_wrapped_module.", "")


def logit_divisor(hf_config: PretrainedConfig) -> float:
    """Return the number that the output layer's result is divided by to get logits: 1 for most families."""
    divisor, factor = (getattr(hf_config, key, None) or 1.0 for key in ("logits_scaling", "logit_scale"))
    return divisor / factor


def read_model_config(config: ModelConfig, folder: Path) -> PretrainedConfig:
    """Return the settings of the model or text part to train. Raises ConfigError if transformers rejects them."""
    try:
        return read_text_config(folder, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # unknown type, or invalid settings, for which transformers raises many kinds
        raise ConfigError(f"model.name={config.name!r}: transformers cannot read it: {in_one_line(error)}") from error


def build_empty(
    hf_config: PretrainedConfig, chunk_tokens: int, *, trust_remote_code: bool, attention: str = PACKED
) -> PackedLM:
    """Build the module tree with parameters on the meta device and real buffers (rotary frequencies).

    attention: name of an implementation registered with transformers. Raises ConfigError for models that do not train.
    """
    check_trains(hf_config.to_dict(), f"model.name={hf_config.name_or_path!r}")
    with init_empty_weights(include_buffers=False), no_init_weights():
        try:
            lm = AutoModelForCausalLM.from_config(
                hf_config, attn_implementation=attention, dtype=torch.float32, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # a missing package of the model's own code, or sizes that cannot be built
            problem = f"cannot be built: {in_one_line(error)}"
            raise ConfigError(f"model.name={hf_config.name_or_path!r}: {problem}") from error
    # Models with their own code have no rule in `check_trains`.
    if lm._is_stateful and not pack_linear_attention(lm):
        raise ConfigError(f"model type {hf_config.model_type!r}: layers that carry a state from token to token")
    if not lm._can_set_attn_implementation():
        raise ConfigError(f"model type {hf_config.model_type!r}: attention outside transformers' interface")
    # vLLM builds some families from transformers' classes and replaces their `__call__` for the whole process. The new
    # `__call__` reads `do_not_compile`; without that attribute, the policy's next forward pass would fail.
    lm.base_model.do_not_compile = True
    lm.tie_weights()  # init_empty_weights gave tied parameters separate tensors
    head = lm.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ConfigError(f"model type {hf_config.model_type!r}: an output layer with a bias is not supported")
    # Eval mode turns dropout off, because the engine samples without dropout. Gradients still work.
    return PackedLM(lm, chunk_tokens).eval()


def transformer_blocks(lm: nn.Module) -> nn.ModuleList:
    """Return the list of decoder blocks: the largest ModuleList, by parameters, whose modules are of one class."""
    lists = [module for module in lm.modules() if isinstance(module, nn.ModuleList) and len(module)]
    uniform = [modules for modules in lists if len({type(block) for block in modules}) == 1]
    if not uniform:
        raise ConfigError(f"{type(lm).__name__}: no list of transformer blocks found")
    return max(uniform, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))


def freeze(model: PackedLM, dtype: torch.dtype, trained: Collection[int] = ()) -> None:
    """Freeze all parameters on the meta device, and store them in `dtype`, except those of the `trained` blocks."""
    blocks = transformer_blocks(model.lm)
    kept = {parameter for index in trained for parameter in blocks[index].parameters()}
    for parameter in model.parameters():
        if parameter not in kept:
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype)


def prepare_blocks(model: PackedLM, *, checkpointed: bool, compiled: bool) -> None:
    """Wrap each transformer block for activation checkpointing and compilation, in place."""
    blocks = transformer_blocks(model.lm)
    kind = model.lm.config.model_type
    if compiled:
        # The floats of a block are constants. As inputs, they would make Dynamo trace a block a second time.
        torch._dynamo.config.specialize_float = True
        if model.shares_prefixes:
            model.arrange = with_own_keys
    for index, module in enumerate(blocks):
        blocks[index] = Block(module, checkpointed=checkpointed)
        if compiled:
            blocks[index].compile(dynamic=True, options=COMPILE_OPTIONS | COMPILE_OPTIONS_OF.get(kind, {}))


def require_input_gradients(model: PackedLM) -> None:
    """Make the first block's input require a gradient, as the input of every later block does.

    With frozen embeddings, the first block's input would not require a gradient, and torch.compile would compile the
    first block separately. The cost is the backward pass of the first block's first norm and input projections.
    """
    embeddings = model.lm.get_input_embeddings()
    assert isinstance(embeddings, nn.Module)
    embeddings.register_forward_hook(lambda _, _inputs, hidden: hidden.requires_grad_(torch.is_grad_enabled()))


@contextmanager
def compiler_errors_in_one_line() -> Generator[None]:
    """Raise errors of torch.compile, which compiles blocks at their first call, as RunError."""
    try:
        yield
    except TorchDynamoException as error:
        cause = in_one_line(getattr(error, "inner_exception", error))
        problem = f"torch {torch.__version__} cannot compile the model; set it to false"
        raise RunError(f"policy.compile: {problem} ({cause})") from error


def shard(model: PackedLM, mesh: DeviceMesh, dtype: torch.dtype, *, offloaded: bool) -> None:
    """Apply FSDP2 to each prepared block, then to the whole model, in place.

    mesh: `World.mesh`. offloaded: as in `load_shards`.
    """
    in_4_bits = any(name.endswith(".packed") for name, _ in model.named_parameters())
    # 4-bit weights are stored as float32 but are not numbers to cast. All others have `dtype` already.
    precision = MixedPrecisionPolicy(None if in_4_bits else dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offloaded else OffloadPolicy()
    factors = {parameter for name, parameter in model.named_parameters() if is_factor(name)}  # replicated on every rank
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, mp_policy=precision, offload_policy=offload, ignored_params=factors)
    # Do not cast the model's inputs: the sampling temperatures are among them, and 0.7 is not exact in bfloat16.
    precision = replace(precision, cast_forward_inputs=False)
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload, ignored_params=factors)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is a local sum divided by a global count: gradients are summed over ranks, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def host_copy(model: PackedLM, dtype: torch.dtype, *, pinned: bool) -> dict[str, DTensor]:
    """Copy this rank's shards in `dtype` to host memory, by checkpoint name.

    The copies serve as the source of a weight sync, not for computing. pinned: page-locked, for full copy speed.
    """
    copies = {}
    for name, parameter in model.hf_parameters().items():
        assert isinstance(parameter, DTensor)
        local = parameter.to_local().detach().to("cpu", dtype)
        meta = TensorMeta(parameter.shape, parameter.stride(), dtype)
        spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
        # The same constructor as in FSDP2: from_local would move the rows to the mesh's device.
        copies[name] = DTensor(local.pin_memory() if pinned else local, spec, requires_grad=False)
    return copies


def reshard(model: PackedLM) -> None:
    """Free gathered parameters. Otherwise a later forward pass would use them even if the shards have changed."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
