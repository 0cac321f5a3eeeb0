"""Model sizes computed from config.json alone: parameters, activations, and engine memory per sequence.

Used by the engine's memory budget, the doctor and the benchmarks. Norms and biases, less than a thousandth of the
parameters, are not counted. Imports no torch.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from colocated_grpo.settings.config_json import text_part
from colocated_grpo.settings.model_support import DELTA_RULE_TYPES, has_latent_attention, has_linear_attention
from colocated_grpo.types import JsonObject

TIED_BY_DEFAULT = ("gemma", "gpt2")
"""Families whose embeddings are tied by default. Their config.json may omit tie_word_embeddings."""
UNGATED = {"bloom", "falcon", "gpt2", "gpt_neox", "gptj", "opt", "phi", "starcoder2"}
"""Model types whose MLP has two linear layers, not three."""
STATE_BYTES = 4
"""Bytes per number in a recurrent state. An upper bound: vLLM stores the state in float32 or in the model's type."""
ENGINE_RESERVE = 6 << 30
"""Bytes that an engine on a GPU keeps free for its activations, sampler, CUDA graphs and fragmentation."""
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
FULL_ATTENTION_INTERVAL = 4
"""transformers' default, used if config.json has neither the interval nor the layer types."""

LinearLayers = Mapping[str, tuple[int, int]]
"""Name of a linear layer -> its input and output width. If models use different names, the name is Llama's."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Attention of a block: full (keys and values), latent (one vector instead of keys and values) or linear.

    Linear attention has a convolution and a recurrent state.
    """

    linear: LinearLayers
    kv_width: int = 0
    """Width of one token's keys: key-value heads times head size."""
    head_size: int = 0
    latent: int = 0
    """Width of one token's latent vector, from which the keys and values of all heads are computed."""
    channels: int = 0
    """Channels of the convolution."""
    window: int = 0
    """Number of tokens before the current token in the convolution's window."""
    state: int = 0
    """Numbers in the recurrent state of one sequence."""

    def cached(self, ranks: int) -> int:
        """Return the count of numbers per token in the KV cache of each rank of an engine."""
        # Key-value heads are split over the ranks. Every rank stores the whole latent vector.
        return self.latent + 2 * max(self.kv_width // ranks, self.head_size)


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """MLP of a block, or its mixture of experts."""

    linear: LinearLayers
    """Layers applied to every token."""
    experts: int = 0
    """Parameters of the routed experts and of their router."""
    routed: int = 0
    """Activations of one token in the experts to which the router sends it."""


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    attention: Attention
    mlp: Mlp

    @cached_property
    def linear(self) -> LinearLayers:
        """Linear layers applied to every token, without routed experts."""
        return {**self.attention.linear, **self.mlp.linear}

    @cached_property
    def total(self) -> int:
        linear = sum(inputs * outputs for inputs, outputs in self.linear.values())
        return linear + self.attention.channels * (self.attention.window + 1) + self.mlp.experts

    def activations(self, hidden: int) -> int:
        """Return the minimum count of activations that the backward pass needs per token.

        The backward pass needs the inputs of linear layers (including the outputs of both norms), of attention and of
        activation functions. hidden: the model's hidden size.
        """
        inner = sum(inputs if outputs == hidden else outputs for inputs, outputs in self.linear.values())
        return 2 * hidden + inner + self.attention.channels + self.mlp.routed


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Parameters of a decoder, by part."""

    blocks: Sequence[BlockSizes]
    hidden: int
    vocab: int
    outside: int
    """Parameters outside the blocks: embeddings and output layer."""

    @cached_property
    def total(self) -> int:
        return self.outside + sum(block.total for block in self.blocks)

    def kv_bytes_per_token(self, itemsize: int, ranks: int = 1) -> int:
        """Return the bytes per token in the KV cache of each rank of an engine."""
        return itemsize * sum(block.attention.cached(ranks) for block in self.blocks)

    def state_bytes(self, itemsize: int, ranks: int = 1) -> int:
        """Return the bytes per sequence of convolutions and recurrent states on each rank of an engine."""
        parts = [block.attention for block in self.blocks]
        return sum(part.window * part.channels * itemsize + part.state * STATE_BYTES for part in parts) // ranks

    def chosen(self, layers: Collection[int] | None) -> Sequence[BlockSizes]:
        """Return the blocks with these indices; None: all."""
        return self.blocks if layers is None else [self.blocks[index] for index in layers if index < len(self.blocks)]


CACHE_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Types of vLLM's KV cache whose tokens are plain numbers. auto: that of the engine's weights."""


def cache_itemsize(args: Mapping[str, object], itemsize: int) -> int:
    """Return the bytes of one number in the KV cache. args: `engine.args`; itemsize: of the engine's weights."""
    return CACHE_BYTES.get(str(args.get("kv_cache_dtype")), itemsize)


def sizes_of(config_json: JsonObject) -> Sizes | None:
    """Return the sizes of the model; None if config.json omits sizes or describes another kind of attention."""
    model = text_part(config_json)
    hidden = _first(model, "hidden_size", "n_embd")
    num_blocks = _first(model, "num_hidden_layers", "n_layer")
    heads = _first(model, "num_attention_heads", "n_head")
    vocab = _first(model, "vocab_size")
    if not (hidden and num_blocks and heads and vocab):
        return None
    latent = has_latent_attention(config_json)
    attention = {False: _latent_attention(model, hidden, heads) if latent else _full_attention(model, hidden, heads)}
    if has_linear_attention(config_json):
        attention[True] = _linear_attention(model, hidden)
    known = {linear: one for linear, one in attention.items() if one is not None}
    if len(known) < len(attention):
        return None
    linear_layers = _linear_layers(model, num_blocks)
    dense = Mlp(linear=_mlp_layers(model, hidden, _intermediate(model, hidden)))
    mlp = {True: dense, False: _mixture(model, hidden)}
    kinds = list(zip(linear_layers, _dense_layers(model, num_blocks), strict=True))
    block_of = {kind: BlockSizes(attention=known[kind[0]], mlp=mlp[kind[1]]) for kind in set(kinds)}
    default = str(model.get("model_type")).startswith(TIED_BY_DEFAULT)
    is_tied = config_json.get("tie_word_embeddings", model.get("tie_word_embeddings", default))
    # GPT-2 alone has a learned embedding of positions.
    positions = _first(model, "n_positions") or 0 if model.get("model_type") == "gpt2" else 0
    outside = hidden * (vocab * (1 if is_tied else 2) + positions)
    return Sizes(blocks=[block_of[kind] for kind in kinds], hidden=hidden, vocab=vocab, outside=outside)


def _linear_layers(model: JsonObject, num_blocks: int) -> list[bool]:
    """Return for each block whether its attention is linear."""
    if model.get("model_type") not in DELTA_RULE_TYPES:
        return [False] * num_blocks
    # The config.json of the released Qwen3-Next has an interval instead of layer types.
    interval = _first(model, "full_attention_interval") or FULL_ATTENTION_INTERVAL
    types = model.get("layer_types") or []
    stated = {index: kind == "linear_attention" for index, kind in enumerate(types)}
    return [stated.get(index, (index + 1) % interval != 0) for index in range(num_blocks)]


def _full_attention(model: JsonObject, hidden: int, heads: int) -> Attention:
    head_size = _first(model, "head_dim") or hidden // heads
    kv_width = (_first(model, "num_key_value_heads") or heads) * head_size
    gated = model.get("model_type") in DELTA_RULE_TYPES  # q_proj also returns a gate for each output
    linear = {
        "q_proj": (hidden, heads * head_size * (2 if gated else 1)),
        "k_proj": (hidden, kv_width),
        "v_proj": (hidden, kv_width),
        "o_proj": (heads * head_size, hidden),
    }
    return Attention(linear=linear, kv_width=kv_width, head_size=head_size)


def _latent_attention(model: JsonObject, hidden: int, heads: int) -> Attention | None:
    """Return the attention of DeepSeek-V3; None if sizes are missing."""
    rank, rotated = _first(model, "kv_lora_rank"), _first(model, "qk_rope_head_dim")
    plain, value = _first(model, "qk_nope_head_dim"), _first(model, "v_head_dim")
    if not (rank and rotated and plain and value):
        return None
    queries, query_rank = heads * (plain + rotated), _first(model, "q_lora_rank")
    linear = {"q_a_proj": (hidden, query_rank), "q_b_proj": (query_rank, queries)} if query_rank else {}
    linear = linear or {"q_proj": (hidden, queries)}
    linear |= {"kv_a_proj_with_mqa": (hidden, rank + rotated), "kv_b_proj": (rank, heads * (plain + value))}
    return Attention(linear=linear | {"o_proj": (heads * value, hidden)}, latent=rank + rotated)


def _linear_attention(model: JsonObject, hidden: int) -> Attention | None:
    """Return the gated delta rule of Qwen3-Next and Qwen 3.5; None for other models, or if sizes are missing."""
    if model.get("model_type") not in DELTA_RULE_TYPES:
        return None
    key_heads, value_heads = (_first(model, f"linear_num_{kind}_heads") for kind in ("key", "value"))
    key_size, value_size = (_first(model, f"linear_{kind}_head_dim") for kind in ("key", "value"))
    kernel = _first(model, "linear_conv_kernel_dim")
    if not (key_heads and value_heads and key_size and value_size and kernel):
        return None
    values = value_heads * value_size
    channels = 2 * key_heads * key_size + values
    if model.get("model_type") == "qwen3_next":
        inputs = {"in_proj_qkvz": channels + values, "in_proj_ba": 2 * value_heads}
    else:
        inputs = {"in_proj_qkv": channels, "in_proj_z": values, "in_proj_b": value_heads, "in_proj_a": value_heads}
    linear = {name: (hidden, outputs) for name, outputs in inputs.items()} | {"out_proj": (values, hidden)}
    return Attention(linear=linear, channels=channels, window=kernel - 1, state=value_heads * key_size * value_size)


def _dense_layers(model: JsonObject, num_blocks: int) -> list[bool]:
    """Return for each block whether it has an MLP instead of experts."""
    if not _num_experts(model):
        return [True] * num_blocks
    first = _first(model, "first_k_dense_replace") or 0
    step = _first(model, "decoder_sparse_step") or 1
    listed = set(model.get("mlp_only_layers") or ())
    return [index < first or index in listed or (index + 1) % step != 0 for index in range(num_blocks)]


def _mixture(model: JsonObject, hidden: int) -> Mlp:
    count = _num_experts(model)
    size = _first(model, "moe_intermediate_size") or _intermediate(model, hidden)
    shared = _first(model, "shared_expert_intermediate_size")
    width = shared or (_first(model, "n_shared_experts") or 0) * size
    linear = _mlp_layers(model, hidden, width) if width else {}
    return Mlp(
        linear=linear | ({"shared_expert_gate": (hidden, 1)} if shared else {}),
        experts=count * (3 * hidden * size + hidden),
        routed=(_first(model, "num_experts_per_tok") or 1) * (hidden + 3 * size),
    )


def _mlp_layers(model: JsonObject, hidden: int, width: int) -> dict[str, tuple[int, int]]:
    gate = {} if model.get("model_type") in UNGATED else {"gate_proj": (hidden, width)}
    return gate | {"up_proj": (hidden, width), "down_proj": (width, hidden)}


def _intermediate(model: JsonObject, hidden: int) -> int:
    return _first(model, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden


def _num_experts(model: JsonObject) -> int:
    return _first(model, "num_experts", "num_local_experts", "n_routed_experts") or 0


def _first(model: JsonObject, *keys: str) -> int | None:
    return next((model[key] for key in keys if isinstance(model.get(key), int)), None)
