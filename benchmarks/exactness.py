"""The first operator in which engine and policy differ: `python -m benchmarks.exactness --model FOLDER --gpus 1`.

1. One sequence is decoded alone and without CUDA graphs, while hooks record each operator of the engine: its prompt in
   one step, then one token in each step. The policy computes the whole sequence at once. For each operator, rows are
   compared bit for bit.
2. Many sequences are decoded as in a run. The policy scores them in one batch, and the log-probabilities are compared.
3. On CUDA: time of the matrix product by number of rows, and whether its rows depend on that number.

Settings follow the flags, as in `colocated_grpo train`: `--numerics fast` shows the differences without this mode.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness import config_of, main_in_ranks, model_folder, model_name, rank_parser
from benchmarks.results import table
from benchmarks.roofline import median_seconds
from colocated_grpo.batching.micro_batch import TrainSequence, build_micro_batch
from colocated_grpo.policy import exact
from colocated_grpo.policy.model import checkpoint_name, read_model_config
from colocated_grpo.policy.policy import Policy
from colocated_grpo.rollout.engine import Request, RolloutEngine, Sampling
from colocated_grpo.runtime.distributed import World
from colocated_grpo.types import Completion, JsonObject

OPERATORS = (
    "input_layernorm",
    "self_attn.qkv_proj",
    "self_attn.rotation",
    "self_attn.attn",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "mlp.gate_up_proj",
    "mlp.act_fn",
    "mlp.down_proj",
    "mlp",
    "post_feedforward_layernorm",
)
"""Names of the engine's modules in a layer, in the order of the forward pass. rotation: the queries that attn reads,
after the norms of heads."""
PARTS = {
    "self_attn.q_proj": "self_attn.qkv_proj",
    "self_attn.k_proj": "self_attn.qkv_proj",
    "self_attn.v_proj": "self_attn.qkv_proj",
    "mlp.gate_proj": "mlp.gate_up_proj",
    "mlp.up_proj": "mlp.gate_up_proj",
}
"""The policy's modules -> the engine's module that computes them together."""
INPUTS = {"self_attn.o_proj": "self_attn.attn", "mlp.down_proj": "mlp.act_fn"}
"""Modules whose input is the output of an operator that is no module of the policy. The engine has one gated activation
for all layers."""
ROWS = (16, 64, 256, 4096, 16384)
CACHE = 4 << 30
Outputs = dict[tuple[int, str], list[Tensor]]
"""(layer, operator) -> outputs of its calls, [rows, features]."""


def main(arguments: Sequence[str] | None = None) -> int:
    return main_in_ranks("exactness", parser(), measure, arguments)


def parser() -> argparse.ArgumentParser:
    parser = rank_parser(__doc__)
    parser.add_argument("--sequences", type=int, default=96, help="sequences that decode together in part 2")
    parser.add_argument("--prompt", type=int, default=90, help="prompt tokens of the longest prompt")
    parser.add_argument("--sampled", type=int, default=160, help="sampled tokens of a sequence")
    parser.add_argument("--skip-graphs", action="store_true", help="part 1 only")
    return parser


def measure(world: World, options: argparse.Namespace) -> JsonObject:
    from colocated_grpo.assembly.engines import engine_spec
    from colocated_grpo.rollout.vllm.vllm_engine import VLLMEngine

    on_gpu = world.device.type == "cuda"
    lengths = {"max_prompt_tokens": options.prompt, "max_completion_tokens": options.sampled}
    with model_folder(options, world) as folder:
        config = config_of(folder, options, rollout=lengths, numerics="exact")
        policy = Policy(config, read_model_config(config.model, folder), folder, world)
        spec = replace(engine_spec(config, folder, 1, world.device), reads_weights=True, sleep=False)
        if on_gpu:
            spec = replace(spec, kv_cache_memory_bytes=CACHE)  # or the first engine would take all memory
        result: JsonObject = {"model": model_name(options), "numerics": config.numerics, "dtype": str(policy.dtype)}
        with closing(VLLMEngine(replace(spec, enforce_eager=True, max_num_seqs=8), world)) as engine:
            result |= shown(compare_operators(engine, policy, options))
        if not options.skip_graphs:
            with closing(VLLMEngine(replace(spec, max_num_seqs=options.sequences), world)) as engine:
                result |= shown({"logprobs": compare_logprobs(engine, policy, options)})
    if on_gpu:
        text = policy.model.lm.config
        result |= shown({"matmul": time_matmuls(text.hidden_size, text.intermediate_size, world.device)})
    return result


def shown(found: JsonObject) -> JsonObject:
    """Print a part's result at once, in case that a later part fails, and return it."""
    for name, value in found.items():
        print(f"{name}:", table(value) if isinstance(value, list) else value, sep="\n", flush=True)
    return found


def compare_operators(engine: Any, policy: Policy, options: argparse.Namespace) -> JsonObject:
    """Return one row for each operator, and the first that differs."""
    prompt = prompts(policy, [options.prompt])[0]
    decoded: Outputs = defaultdict(list)
    hooks = record_engine(engine.model, decoded)
    (completion,) = generate(engine, [prompt], options.sampled, temperature=1.0)
    for hook in hooks:
        hook.remove()
    packed: Outputs = defaultdict(list)
    hooks = record_policy(policy.model, packed)
    differences = difference(policy, [prompt], [completion], temperature=1.0)
    for hook in hooks:
        hook.remove()
    rows: list[JsonObject] = []
    firsts: list[tuple[int, int, str]] = []
    layers = 1 + max(layer for layer, _ in packed)
    for operator in OPERATORS:
        found = [compare(decoded[layer, operator], packed[layer, operator], len(prompt)) for layer in range(layers)]
        found = [one for one in found if one is not None]
        if found:
            different = [(layer, one) for layer, one in enumerate(found) if one["differing"]]
            rows.append(
                {
                    "operator": operator,
                    "equal_layers": f"{len(found) - len(different)} of {len(found)}",
                    "largest": max(one["largest"] for one in found),
                    "differing_rows": sum(one["differing"] for one in found),
                    "first": different[0][1]["first"] if different else "",
                }
            )
            firsts += [(layer, len(rows), f"{operator} in layer {layer}, {one['first']}") for layer, one in different]
    first = min(firsts)[2] if firsts else "none"
    return {"rows": rows, "first difference": first, "logprobs of the sequence": [differences]}


def compare(decoded: list[Tensor], packed: list[Tensor], prompt: int) -> JsonObject | None:
    """Compare the rows of one operator. decoded: of each step, of which all but the first have one token."""
    if not decoded or not packed:
        return None
    one_by_one = torch.cat([decoded[0][:prompt], *(step[:1] for step in decoded[1:])])
    together = torch.cat(packed, dim=-1)
    rows = min(len(one_by_one), len(together))
    distance = (one_by_one[:rows].float() - together[:rows].float()).abs().amax(-1)
    differing = torch.nonzero(distance)[:, 0]
    token = int(differing[0]) if len(differing) else -1
    first = f"token {token} ({'prompt' if token < prompt else 'decode'})"
    return {"differing": len(differing), "largest": float(distance.max()), "first": first}


def record_engine(model: nn.Module, outputs: Outputs) -> list[Any]:
    hooks = []
    for name, module in model.named_modules():
        layer, operator = layer_and_operator(name) or (0, "")
        if operator not in OPERATORS or operator == "mlp.act_fn":
            continue
        hooks.append(module.register_forward_hook(partial(keep_decoded, outputs[layer, operator])))
        if operator == "self_attn.attn":
            rotated = outputs[layer, "self_attn.rotation"]
            hooks.append(module.register_forward_pre_hook(partial(keep_inputs, rotated, 1)))
        if operator == "mlp.down_proj":
            hooks.append(module.register_forward_pre_hook(partial(keep_inputs, outputs[layer, INPUTS[operator]], 1)))
    return hooks


def record_policy(model: nn.Module, outputs: Outputs) -> list[Any]:
    hooks: list[Any] = []
    for name, module in model.named_modules():
        place = layer_and_operator(checkpoint_name(name))
        if place is None:
            continue
        layer, operator = place
        if PARTS.get(operator, operator) in OPERATORS:
            kept = outputs[layer, PARTS.get(operator, operator)]
            hooks.append(module.register_forward_hook(partial(keep_output, kept)))
        if operator in INPUTS:
            hooks.append(module.register_forward_pre_hook(partial(keep_inputs, outputs[layer, INPUTS[operator]], 1)))
    hooks.append(RecordedQueries(outputs))
    return hooks


class RecordedQueries:
    """Records rotated queries, which are no output of a module of the policy, until `remove`."""

    def __init__(self, outputs: Outputs) -> None:
        self._attend, self._layer = exact._attend, 0
        self._outputs = outputs
        exact._attend = self  # pyrefly: ignore[bad-assignment]  (a plain function there)

    def __call__(self, query: Tensor, *arguments: Any) -> Tensor:
        self._outputs[self._layer, "self_attn.rotation"].append(rows_of(query))
        self._layer += 1
        return self._attend(query, *arguments)

    def remove(self) -> None:
        exact._attend = self._attend


def layer_and_operator(name: str) -> tuple[int, str] | None:
    _, found, rest = name.partition("layers.")
    number, _, operator = rest.partition(".")
    return (int(number), operator) if found and number.isdigit() else None


def keep_decoded(kept: list[Tensor], _module: nn.Module, _inputs: object, output: Any) -> None:
    output = output[0] if isinstance(output, tuple) else output
    kept.append(output.flatten(1).clone())  # [rows, features] or [rows, heads, size], also of one row


def keep_output(kept: list[Tensor], _module: nn.Module, _inputs: object, output: Any) -> None:
    kept.append(rows_of(output))


def keep_inputs(kept: list[Tensor], count: int, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    kept.append(torch.cat([rows_of(tensor) for tensor in inputs[:count]], dim=-1))


def rows_of(output: Tensor) -> Tensor:
    """Return a copy as [rows, features] of [rows, features], [rows, heads, size] or [1, rows, features]."""
    output = output.detach()
    if output.dim() == 3:
        output = output[0] if len(output) == 1 and output.shape[1] > 1 else output.flatten(1)
    return output.clone()


def compare_logprobs(engine: RolloutEngine, policy: Policy, options: argparse.Namespace) -> list[JsonObject]:
    rng = random.Random(1)
    asked = prompts(policy, [rng.randint(4, options.prompt) for _ in range(options.sequences)])
    rows = []
    for temperature in (1.0, 0.7):
        completions = generate(engine, asked, options.sampled, temperature)
        rows.append({"temperature": temperature, **difference(policy, asked, completions, temperature)})
    return rows


def difference(
    policy: Policy, asked: Sequence[list[int]], completions: Sequence[Completion], temperature: float
) -> JsonObject:
    """Compare sampling log-probabilities with those of the policy, for all sequences in one batch."""
    sequences = []
    for prompt, completion in zip(asked, completions, strict=True):
        logprobs = np.array(completion.sampling_logprobs, dtype=np.float32)
        tokens = np.array([*prompt, *completion.token_ids])
        sequences.append(
            TrainSequence(
                token_ids=tokens,
                scored=np.arange(len(prompt), len(tokens)),
                sampling_logprobs=logprobs,
                advantages=np.zeros_like(logprobs),
                temperature=temperature,
                trained=True,
            )
        )
    micro_batch = build_micro_batch(sequences)
    expected = micro_batch.loss_inputs.sampling_logprobs_N
    assert expected is not None
    distance = (policy.score(micro_batch).cpu() - expected.cpu()).abs()
    return {
        "tokens": len(distance),
        "differing": int((distance != 0).sum()),
        "mean": float(distance.mean()),
        "largest": float(distance.max()),
    }


def prompts(policy: Policy, lengths: Sequence[int]) -> list[list[int]]:
    rng, vocabulary = random.Random(0), policy.model.lm.config.vocab_size
    return [[rng.randrange(vocabulary) for _ in range(length)] for length in lengths]


def generate(engine: RolloutEngine, asked: Sequence[list[int]], tokens: int, temperature: float) -> list[Completion]:
    sampling = Sampling(temperature=temperature, max_tokens=tokens)
    engine.submit(Request(key=i, token_ids=ids, seed=i, sampling=sampling) for i, ids in enumerate(asked))
    done: dict[Any, Completion] = {}
    while len(done) < len(asked):
        done.update(engine.step())
    return [done[index] for index in range(len(asked))]


def time_matmuls(hidden: int, intermediate: int, device: torch.device) -> list[JsonObject]:
    """Return TFLOP/s of the matrix product by tile and number of rows, beside cuBLAS. `chosen` is what a run uses.

    rows_equal: the first rows have the bits of 16 rows alone. tile_equal: all have the bits of the chosen tiles.
    """
    from colocated_grpo.runtime.row_kernels import FOR_FEW_ROWS, TILES, matmul

    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"chosen": matmul}
    ways |= {f"{tile.rows} x {tile.columns}": partial(matmul, tile=tile) for tile in (*TILES, FOR_FEW_ROWS)}
    ways["cuBLAS"] = torch.nn.functional.linear
    generator = torch.Generator(device).manual_seed(0)
    rows = []
    for columns, depth in ((2 * intermediate, hidden), (hidden, intermediate)):
        x, weight = (torch.randn(n, depth, device=device, generator=generator).bfloat16() for n in (max(ROWS), columns))
        plain = matmul(x, weight)
        for name, way in ways.items():
            few = way(x[: min(ROWS)], weight)
            row: JsonObject = {"columns": columns, "depth": depth, "tile": name}
            for count in ROWS:
                seconds = median_seconds(partial(way, x[:count], weight), device, repeats=10)
                row[f"{count} rows"] = round(2 * count * columns * depth / seconds / 1e12)
            outputs = [way(x[:count], weight) for count in ROWS]
            row["rows_equal"] = all(torch.equal(out[: len(few)], few) for out in outputs)
            row["tile_equal"] = all(torch.equal(out, plain[: len(out)]) for out in outputs)
            rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
