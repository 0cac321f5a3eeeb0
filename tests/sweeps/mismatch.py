"""Sampler-trainer mismatch, healthy and with injected faults: `python -m tests.sweeps.mismatch --model DIR`.

The engine samples completions, the policy scores them in packed forward passes, and the tokens are divided into batches
of `--batch` completions. Each batch gives the statistics from which the limits of `freshness.py` were chosen. Faults
are injected into the engine's kernels, cache, weights and sampler; they need --engine.enforce_eager true.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers import AutoTokenizer

from benchmarks.harness import (
    config_of,
    main_in_ranks,
    model_folder,
    model_name,
    rank_parser,
    wake_with_weights,
)
from colocated_grpo.batching.micro_batch import TrainSequence, build_micro_batch
from colocated_grpo.launch.launcher import child_environment
from colocated_grpo.policy.model import read_model_config
from colocated_grpo.policy.policy import Policy
from colocated_grpo.rollout.engine import Request, Sampling
from colocated_grpo.runtime.distributed import World
from colocated_grpo.runtime.processes import run_command
from colocated_grpo.runtime.program import rank_environment
from colocated_grpo.types import Completion, JsonObject

if TYPE_CHECKING:
    from colocated_grpo.rollout.vllm.vllm_engine import VLLMEngine

SUBJECTS = "rain trade bread chess glass steel light music salt winter rivers copper bees maps paper clocks".split()  # noqa: SIM905
OPENINGS = (
    "Explain in simple words how {0} and {1} are related.",
    "Write a short story about {0} and {1}.",
    "List three facts about {0}.",
    "Why do people care about {0}? Answer in two sentences.",
    "Write a Python function that sorts a list of {0} by their {1}.",
    "What is {2} plus {3}? Reply with the number only.",
    "What is {2} times {3}? Think step by step.",
    "Translate into French: the {0} of the {1} was {2} years old.",
)
TOKENS_PER_FORWARD = 16384


def main() -> int:
    if "RANK" in os.environ:
        return main_in_ranks("mismatch", parser(), measure, None)
    environment = child_environment(os.environ, min(1, torch.cuda.device_count()), 1, "INFO")
    command = [sys.executable, "-m", "tests.sweeps.mismatch", *sys.argv[1:]]
    environment |= rank_environment(environment)
    return run_command(command, [environment], None, lambda number: (b"\nstopping\n", None)).code


def parser() -> argparse.ArgumentParser:
    parser = rank_parser(__doc__)
    parser.add_argument("--faults", nargs="+", choices=["none", *FAULTS], default=["none"])
    parser.add_argument("--seconds", type=float, default=0.0, help="repeat the rounds of each fault for so long")
    parser.add_argument("--completions", type=int, default=1024, help="completions of one round")
    parser.add_argument("--batch", type=int, default=64, help="completions of one batch")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--raw", help="NumPy file for the differences of single tokens")
    return parser


def measure(world: World, options: argparse.Namespace) -> JsonObject:
    from colocated_grpo.assembly.engines import build_engine, engine_spec

    engine_settings = {"max_num_seqs": 256}
    with model_folder(options, world) as folder:
        rollout = {"max_prompt_tokens": 256, "max_completion_tokens": options.max_tokens}
        config = config_of(folder, options, rollout=rollout, engine=engine_settings)
        policy = Policy(config, read_model_config(config.model, folder), folder, world)
        engine = build_engine(engine_spec(config, folder, world.size, world.device), policy, world)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        stop = policy.model.lm.generation_config.eos_token_id or tokenizer.eos_token_id
    wake_with_weights(config, engine, policy, world)
    stops = tuple(stop) if isinstance(stop, list) else (stop,)
    rows, raw = [], {}
    for fault in options.faults:
        batches, tokens = [], []
        until, number = time.monotonic() + options.seconds, 0
        while number == 0 or time.monotonic() < until:
            for part in sample_round(engine, policy, tokenizer, stops, options, fault, number):
                batches.append(statistics(*part))
                tokens.append(part)
            number += 1
            engine.weights_changed(0)  # drops cached prefixes, which a fault may have damaged
        rows.append({"model": model_name(options), "fault": fault, **summary(batches), "batches": batches})
        raw[fault] = np.concatenate([np.stack([*part]).astype(np.float32) for part in tokens], axis=1)
    if options.raw:
        np.savez_compressed(options.raw, **raw)
    engine.close()
    return {"rows": rows}


def sample_round(
    engine: VLLMEngine,
    policy: Policy,
    tokenizer: Any,
    stops: tuple[int, ...],
    options: argparse.Namespace,
    fault: str,
    number: int,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield differences, sampling log-probabilities and completion indices of each batch's tokens."""
    rng = random.Random(f"{number}")
    prompts = [prompt_of(rng, tokenizer) for _ in range(options.completions)]
    temperature = TEMPERATURES.get(fault, 1.0)
    sampling = Sampling(temperature=temperature, max_tokens=options.max_tokens, stop_token_ids=stops)
    engine.submit(
        Request(key=index, token_ids=prompt, seed=rng.getrandbits(31), sampling=sampling)
        for index, prompt in enumerate(prompts)
    )
    done: dict[Any, Completion] = {}
    with FAULTS[fault](engine) if fault in FAULTS else nullcontext(lambda: None) as after_step:
        while len(done) < len(prompts):
            done.update(engine.step())
            after_step()
    for first in range(0, len(prompts), options.batch):
        chosen = range(first, min(first + options.batch, len(prompts)))
        yield differences(policy, [(prompts[index], done[index]) for index in chosen])


def prompt_of(rng: random.Random, tokenizer: Any) -> list[int]:
    text = rng.choice(OPENINGS).format(*rng.sample(SUBJECTS, 2), rng.randint(10, 999), rng.randint(10, 999))
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def differences(
    policy: Policy, sampled: Sequence[tuple[list[int], Completion]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return trainer - sampler, the sampler's log-probabilities and completion indices, by token."""
    found, sampler, owner = [], [], []
    first = 0
    while first < len(sampled):
        last, size = first, 0
        while last < len(sampled) and (last == first or size < TOKENS_PER_FORWARD):
            size += len(sampled[last][0]) + len(sampled[last][1].token_ids)
            last += 1
        micro_batch = build_micro_batch([sequence_of(*pair) for pair in sampled[first:last]])
        found.append(policy.score(micro_batch).float().cpu().numpy())
        sampler.append(micro_batch.loss_inputs.sampling_logprobs_N.numpy())
        owner.append(micro_batch.loss_inputs.sequence_N.numpy() + first)
        first = last
    sampling_N = np.concatenate(sampler)
    return np.concatenate(found) - sampling_N, sampling_N, np.concatenate(owner)


def sequence_of(prompt: list[int], completion: Completion) -> TrainSequence:
    tokens = np.array([*prompt, *completion.token_ids])
    return TrainSequence(
        token_ids=tokens,
        scored=np.arange(len(prompt), len(tokens)),
        sampling_logprobs=np.array(completion.sampling_logprobs, np.float32),
        advantages=np.zeros(len(completion.token_ids), np.float32),
        temperature=1.0,
        trained=True,
    )


def statistics(difference_N: np.ndarray, sampling_N: np.ndarray, owner_N: np.ndarray) -> dict[str, float]:
    """Return candidate statistics of one batch. difference: trainer - sampler."""
    d = difference_N.astype(np.float64)
    ratio = np.exp(np.minimum(d, 20.0))
    lost_N = np.maximum(0.0, 1.0 - ratio)
    slope = np.polyfit(sampling_N.astype(np.float64), d, 1)[0] if np.ptp(sampling_N) > 0 else 0.0
    counts = np.bincount(owner_N)
    counts_S = counts[counts > 0]
    by_completion = lambda values: np.bincount(owner_N, values)[counts > 0]  # noqa: E731
    lost_S, abs_S = by_completion(lost_N), by_completion(np.abs(d))
    return {
        "tokens": float(len(d)),
        "abs": float(np.abs(d).mean()),
        "k3": float((np.expm1(np.minimum(d, 20.0)) - d).mean()),
        "tv": float(lost_N.mean()),
        "signed": float(d.mean()),
        "chi": float(np.minimum(ratio, 10.0).mean() - 1.0),
        "max": float(np.abs(d).max()),
        "outside": float((np.abs(d) > np.log(2)).mean()),
        "slope": float(slope),
        "worst_mean_tv": float((lost_S / counts_S).max()),
        "worst_mean_tv16": float((lost_S / np.maximum(counts_S, 16)).max()),
        "worst_mean_abs16": float((abs_S / np.maximum(counts_S, 16)).max()),
        "worst_root_tv": float((lost_S / np.sqrt(counts_S)).max()),
    }


def summary(batches: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the largest, smallest and median value of each statistic over the batches."""
    found: dict[str, float] = {"num_batches": len(batches)}
    for name in batches[0]:
        values = np.array([batch[name] for batch in batches])
        found |= {f"{name}/min": values.min(), f"{name}/median": np.median(values), f"{name}/max": values.max()}
    return {name: float(f"{value:.5g}") for name, value in found.items()}


# Faults. Each is a context that yields a function to call after every step of the engine.

AfterStep = Callable[[], None]


def blocks(engine: VLLMEngine) -> Sequence[nn.Module]:
    [layers] = [m for n, m in engine.model.named_modules() if n.endswith("layers") and isinstance(m, nn.ModuleList)]
    return layers


@contextmanager
def changed(tensor: torch.Tensor, values: torch.Tensor) -> Generator[AfterStep]:
    former = tensor.clone()
    tensor.copy_(values)
    try:
        yield lambda: None
    finally:
        tensor.copy_(former)


def noised_layer(engine: VLLMEngine, relative: float = 0.01) -> AbstractContextManager[AfterStep]:
    layers = blocks(engine)
    weight = next(p for n, p in layers[len(layers) // 2].named_parameters() if "down_proj" in n).data
    return changed(weight, weight + relative * weight.float().std().to(weight.dtype) * torch.randn_like(weight))


def rotary_base(engine: VLLMEngine) -> AbstractContextManager[AfterStep]:
    """Rotate as with another base, in all layers that share the first one's."""
    caches = {b.data_ptr(): b for n, b in engine.model.named_buffers() if n.endswith("cos_sin_cache")}
    cache = next(iter(caches.values()))  # models with two bases: that of the first layers
    half = cache.shape[1] // 2
    angles = torch.atan2(cache[1, half:].float(), cache[1, :half].float())  # of position 1: the frequencies
    exponents = torch.arange(half, device=cache.device) / half
    wrong = angles * 10.0**exponents
    table = torch.arange(len(cache), device=cache.device)[:, None] * wrong
    return changed(cache, torch.cat([table.cos(), table.sin()], dim=1).to(cache.dtype))


def attention_layers(engine: VLLMEngine) -> list[nn.Module]:
    return [m for m in engine.model.modules() if type(m).__name__ == "Attention"]


def decodes_only() -> bool:
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    if not metadata:
        return False
    return next(iter(metadata.values())).max_query_len == 1


@contextmanager
def hooked(layers: Sequence[nn.Module], change: Callable[[torch.Tensor], torch.Tensor]) -> Generator[AfterStep]:
    hooks = [
        layer.register_forward_hook(lambda module, inputs, output: change(output) if decodes_only() else output)
        for layer in layers
    ]
    try:
        yield lambda: None
    finally:
        for hook in hooks:
            hook.remove()


def decode_kernel(engine: VLLMEngine, factor: float = 1.05) -> AbstractContextManager[AfterStep]:
    """Scale the output of decode attention in all layers."""
    return hooked(attention_layers(engine), lambda output: output * factor)


def decode_layer(engine: VLLMEngine) -> AbstractContextManager[AfterStep]:
    """Scale the output of decode attention in one layer by 1.01."""
    layers = attention_layers(engine)
    return hooked(layers[len(layers) // 2 : len(layers) // 2 + 1], lambda output: output * 1.01)


def decode_head(engine: VLLMEngine) -> AbstractContextManager[AfterStep]:
    """Zero one head of decode attention in one layer."""
    layers = attention_layers(engine)
    layer: Any = layers[len(layers) // 2]

    def without_head(output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[..., : layer.head_size] = 0
        return output

    return hooked([layer], without_head)


@contextmanager
def kv_block(engine: VLLMEngine) -> Generator[AfterStep]:
    """Overwrite the last full block of one request in 64 with that of another request, in all layers, once."""
    core: Any = engine._engine.engine_core.engine_core
    manager, caches = core.scheduler.kv_cache_manager, engine._worker.model_runner.kv_caches
    damaged: set[str] = set()

    def after_step() -> None:
        running = [request.request_id for request in core.scheduler.running]
        for position, name in enumerate(running[:-1]):
            if int(name.split("-")[0]) % 64 or name in damaged:
                continue
            own, other = (manager.get_block_ids(one)[0] for one in (name, running[position + 1]))
            if len(own) < 3 or len(other) < 3:
                continue
            damaged.add(name)
            for cache in caches:
                by_block = cache.transpose(0, 1) if cache.shape[0] == 2 else cache
                by_block[own[-2]] = by_block[other[-2]]

    yield after_step


TEMPERATURES = {"temperature_0.9": 0.9, "temperature_0.97": 0.97, "temperature_1.1": 1.1}
"""Temperature of sampling, where the policy computes with 1."""

FAULTS: dict[str, Callable[[VLLMEngine], AbstractContextManager[AfterStep]]] = {
    **{name: lambda engine: nullcontext(lambda: None) for name in TEMPERATURES},
    "kv_block": kv_block,
    "rotary_base": rotary_base,
    "decode_kernel": decode_kernel,
    "decode_layer": decode_layer,
    "decode_head": decode_head,
    "noised_layer": noised_layer,
    "noised_layer_10": lambda engine: noised_layer(engine, 0.1),
}

if __name__ == "__main__":
    sys.exit(main())
