"""GRPO in one file: one process, one model, one vLLM engine, plain torch. Runs on two CPU cores or one GPU.

    python docs/examples/minimal_grpo.py

The first run makes a model of one million parameters that half knows how to sort digits (30 s). 90 steps of GRPO then
raise its held-out reward from 0.39 to 0.88. A step does what a step of `colocated_grpo` does, in the same order, minus
everything that the algorithm does not need. "Beyond:" says what the trainer adds at that place, and in which file.

Where this departs from the GRPO paper (DeepSeekMath, arXiv 2402.03300), and why:

1. No KL penalty and no reference model. The reward is a fixed rule, so there is no learned judge to exploit, and a
   second model would cost a forward pass for each batch.
2. One optimizer step for each batch. The ratio is then exactly 1 and the clip never acts. Both stay in: the gradient
   flows through the ratio, and a second step on the same batch would need the clip.
3. Every token of the batch weighs the same (DAPO, arXiv 2503.14476). The paper averages over each completion first,
   so that a token of a long wrong answer is punished less than one of a short wrong answer.
4. Sampler and trainer are two programs that compute the same model and round differently. A truncated importance
   weight corrects for that. In float32, as on CPU, it stays at 1; in bfloat16 it does not.

Shapes: P prompts, G completions of one (a group), B rows of a micro-batch, T tokens after the first, V vocabulary.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from hashlib import sha256
from itertools import islice
from pathlib import Path
from random import Random
from statistics import fmean
from typing import NamedTuple

# Libraries read these when they are imported.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process: weights are copied, not sent
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # vLLM would pin OpenMP threads to cores, the trainer's included
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# Let waiting OpenMP threads sleep soon. By default they spin: on a busy machine that made steps 20 x slower.
os.environ.update({"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000", **os.environ})

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.model_executor.layers import utils as linear_layers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# In float32 engine and policy agree to six digits; on a GPU both compute in bfloat16, for speed. The policy's weights
# are float32 either way: most AdamW updates at RL's learning rates are below half a bfloat16 step and would vanish.
ENGINE_DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
PROBE_TOLERANCE = 0.15 if DEVICE == "cuda" else 1e-3  # rounding stays well below this, damaged weights far above
MODEL = "runs/quickstart-model"
PROMPTS, GROUP_SIZE = 32, 8
MAX_PROMPT_TOKENS, MAX_COMPLETION_TOKENS, TEMPERATURE = 32, 16, 1.0
CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # asymmetric, as in DAPO: unlikely tokens that helped may grow faster
MAX_IMPORTANCE_WEIGHT = 2.0
MICRO_BATCH = 64  # rows of one forward pass; changes memory and speed, never the gradient


# ---- The task: sort digits. Endless questions, and a reward that needs no judge.
# Beyond: datasets, TRL's reward functions, episodes of several turns, games (environments/), Atropos (atropos/).
def questions(seed: int, *, held_out: bool) -> Iterator[str]:
    """Yield strings of 4 to 8 digits, endlessly. A question's hash decides its split, so the splits are disjoint.

    The rule is that of environments/tasks/procedural.py, so the model's warm start has not seen held-out questions.
    """
    rng = Random(seed)
    while True:
        digits = "".join(rng.choices("0123456789", k=rng.randint(4, 8)))
        if (int.from_bytes(sha256(digits.encode()).digest()[:8], "big") % 10 == 0) == held_out:
            yield digits


def score(question: str, answer: str) -> float:
    """Return 1 for the sorted digits, otherwise up to 0.5 for digits in the right place.

    Partial credit makes siblings differ from the first step on. With rewards of 0 and 1 alone most early groups would
    be all zeros, and GRPO learns only from differences within a group.
    """
    expected = "".join(sorted(question))
    if answer == expected:
        return 1.0
    hits = sum(given == wanted for given, wanted in zip(answer, expected, strict=False))
    return 0.5 * hits / max(len(answer), len(expected))


# ---- The engine: vLLM in this process.
def build_engine(model: str) -> LLM:
    """Return an engine with random weights; the first `sync` writes the policy's.

    Beyond: CUDA graphs, a KV cache sized from what a training step leaves free, and an engine that sleeps while the
    policy trains (rollout/vllm/vllm_engine.py, phases.py). Here engine and policy sit side by side in memory.
    """
    if DEVICE == "cpu":
        # The CPU backend repacks linear weights and drops the originals, so there is nothing left to write into.
        # Replacing a function of vLLM is a hack. Beyond: there are more, with their reasons (rollout/vllm/patches.py).
        def keep_weight(layer: nn.Module, remove_weight: bool) -> None:
            layer.cpu_linear = F.linear

        linear_layers.dispatch_cpu_unquantized_gemm = keep_weight
    return LLM(
        model,
        load_format="dummy",  # random weights, so that a sync that writes nothing is detected
        dtype=ENGINE_DTYPE,
        max_model_len=MAX_PROMPT_TOKENS + MAX_COMPLETION_TOKENS,
        max_num_seqs=PROMPTS * GROUP_SIZE,
        kv_cache_memory_bytes=256 << 20,
        enforce_eager=True,
        logprobs_mode="processed_logprobs",  # after temperature; the default, before it, biases every ratio
        generation_config="vllm",  # a model folder's own file may set a top-p, which the loss ignores
        skip_tokenizer_init=True,  # tokens in, tokens out
        enable_chunked_prefill=DEVICE == "cuda",  # the CPU backend cannot resume a seeded prompt that was cut in two
    )


class Completion(NamedTuple):
    """One sampled sequence; `sampling_logprobs` has one value for each of `token_ids`. Beyond: types.py."""

    prompt_ids: list[int]
    token_ids: list[int]
    sampling_logprobs: list[float]
    reward: float


def encode(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    message = {"role": "user", "content": f"sort {question}"}
    return tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)


def sample(engine: LLM, tokenizer: PreTrainedTokenizerBase, batch: list[str], size: int, seed: str) -> list[Completion]:
    """Return `size` scored completions of the first question, then those of the next.

    Beyond: completions are scored in threads while others still decode, and all ranks take prompts from one counter,
    so that a slow rank takes fewer instead of holding up the rest (rollout/collect.py).
    """
    asked = [question for question in batch for _ in range(size)]
    prompts = [encode(tokenizer, question) for question in asked]
    # Each completion has its own seed, derived from its place in the run. With one seed for all, siblings would be
    # equal and every advantage 0; with none, no run could be repeated.
    settings = [
        SamplingParams(
            temperature=TEMPERATURE,
            max_tokens=MAX_COMPLETION_TOKENS,
            stop_token_ids=[tokenizer.eos_token_id],
            logprobs=0,  # of the sampled token only
            seed=Random(f"{seed}/{index}").getrandbits(32),
        )
        for index in range(len(asked))
    ]
    outputs = engine.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], settings, use_tqdm=False)
    completions = []
    for question, ids, output in zip(asked, prompts, outputs, strict=True):
        token_ids, entries = list(output.outputs[0].token_ids), output.outputs[0].logprobs
        logprobs = [entry[token].logprob for token, entry in zip(token_ids, entries, strict=True)]
        # The text is for the reward alone. Training uses the sampled ids: encoding the text may give others.
        reward = score(question, tokenizer.decode(token_ids, skip_special_tokens=True))
        completions.append(Completion(ids, token_ids, logprobs, reward))
    return completions


# ---- Weights: from the policy into the engine.
def sync(policy: PreTrainedModel, engine: LLM) -> None:
    """Write the policy's weights into the engine's own parameters.

    vLLM's loader casts them and finds their rows in its fused matrices (q, k and v are one there).
    Beyond: those rows are found once, verified with this loader, and then written straight from FSDP2 shards: 9 ms
    for 1.7B parameters on two GPUs (weights/plan.py, weights/colocated.py).
    """
    engine.apply_model(lambda model: model.load_weights(policy.named_parameters()))
    engine.reset_prefix_cache()  # otherwise prompts cached under the old weights would silently be reused


@torch.no_grad()
def check_probe(policy: PreTrainedModel, engine: LLM, probe: list[int]) -> None:
    """Raise unless engine and policy give the same tokens the same log-probabilities.

    A sync that misses a parameter does not crash. It samples from a slightly different model, the reward stalls, and
    the learning rate takes the blame. Beyond: weights/transport.py compares all weights after every sync, bit for bit.
    """
    settings = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0)
    [output] = engine.generate([TokensPrompt(prompt_token_ids=probe)], settings, use_tqdm=False)
    sampled = [entry[token].logprob for token, entry in zip(probe[1:], output.prompt_logprobs[1:], strict=True)]
    trained = token_logprobs(policy, torch.tensor([probe], device=DEVICE), temperature=1.0)[0].tolist()
    difference = fmean(abs(a - b) for a, b in zip(sampled, trained, strict=True))
    assert difference <= PROBE_TOLERANCE, f"engine and policy disagree by {difference:.4g}: the sync went wrong"


# ---- The gradient.
def group_advantages(rewards_PG: Tensor) -> Tensor:
    """Return (reward - mean) / std within each group. Siblings are the baseline, so no value model is needed.

    A group of equal rewards gets zeros, and its forward pass is wasted. Beyond: it is left out of the forward pass but
    not of the denominator, so the gradient is the same (advantages.py, batching/pack.py).
    """
    return (rewards_PG - rewards_PG.mean(1, keepdim=True)) / (rewards_PG.std(1, keepdim=True) + 1e-4)


def token_logprobs(policy: PreTrainedModel, token_ids: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """Return the log-probability of each token but the first, given those before it: [B, T + 1] -> [B, T].

    Rows are padded on the right. Causal attention never looks right, so real tokens need no attention mask, and the
    loss masks the padding. Beyond: no padding at all (completions are packed end to end), a prompt is
    computed once for all siblings, and the [B, T, V] logits never exist at once (batching/pack.py, policy/logprobs.py).
    """
    with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
        logits_BTV = policy(input_ids=token_ids[:, :-1], use_cache=False).logits
    logprobs_BTV = F.log_softmax(logits_BTV.float() / temperature, dim=-1)  # float32, at the sampling temperature
    return logprobs_BTV.gather(-1, token_ids[:, 1:, None]).squeeze(-1)


def loss_sum(logprobs_BT: Tensor, old_BT: Tensor, sampling_BT: Tensor, advantages_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the clipped surrogate, summed over sampled tokens; the caller divides.

    logprobs: the policy now, with gradient. old: the policy before this batch's first update. sampling: the engine.
    Beyond: dr_grpo, bnpo, cispo, gspo, KL penalties and sequence-level corrections (losses/objectives.py).
    """
    ratio_BT = (logprobs_BT - old_BT).exp()
    clipped_BT = ratio_BT.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    surrogate_BT = torch.minimum(ratio_BT * advantages_B[:, None], clipped_BT * advantages_B[:, None])
    # A constant without gradient: tokens were drawn from the engine's distribution and are trained under the policy's.
    # Truncated, because a single token with weight 50 would drown the rest of the batch.
    weight_BT = (old_BT - sampling_BT).exp().clamp(max=MAX_IMPORTANCE_WEIGHT)
    return -(weight_BT * surrogate_BT * mask_BT).sum()


def backward(policy: PreTrainedModel, completions: list[Completion]) -> float:
    """Accumulate the batch's gradient; return the mean |policy - sampler| of its log-probabilities."""

    def pad(rows: list[list]) -> Tensor:
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(DEVICE)

    advantages = group_advantages(torch.tensor([c.reward for c in completions], device=DEVICE).view(-1, GROUP_SIZE))
    token_ids = pad([c.prompt_ids + c.token_ids for c in completions])
    # One value for each token but the first: 0 for the prompt's, then those of the sampled ones.
    sampling = pad([[0.0] * (len(c.prompt_ids) - 1) + c.sampling_logprobs for c in completions])
    mask = pad([[0.0] * (len(c.prompt_ids) - 1) + [1.0] * len(c.token_ids) for c in completions])
    # One denominator for the whole batch, known before the first micro-batch. If each micro-batch divided by its own
    # tokens, the gradient would depend on where the batch was cut. Beyond: summed over all ranks as well.
    num_tokens, distance = mask.sum(), torch.zeros((), device=DEVICE)
    micro_batches = zip(*(x.split(MICRO_BATCH) for x in (token_ids, sampling, advantages.view(-1), mask)), strict=True)
    for token_ids_B, sampling_BT, advantages_B, mask_BT in micro_batches:
        logprobs_BT = token_logprobs(policy, token_ids_B)
        old_BT = logprobs_BT.detach()  # departure 2: this is the batch's first update
        (loss_sum(logprobs_BT, old_BT, sampling_BT, advantages_B, mask_BT) / num_tokens).backward()
        distance += ((old_BT - sampling_BT).abs() * mask_BT).sum()
    return (distance / num_tokens).item()


# ---- The loop. Beyond: trainer.py is this loop on every rank, with FSDP2 (policy/model.py), checkpoints from which a
# killed run continues bit for bit (checkpoint/), and metrics (tracking/). It adds nothing to the algorithm.
def train(model: str, steps: int, lr: float, seed: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    engine = build_engine(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(DEVICE)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    training, held_out = questions(seed, held_out=False), list(islice(questions(seed, held_out=True), 128))

    def evaluate(when: str) -> None:
        sync(policy, engine)
        completions = sample(engine, tokenizer, held_out, 1, f"{seed}/held_out")
        print(f"held-out reward {when}: {fmean(c.reward for c in completions):.3f}", flush=True)

    evaluate("before")
    for step in range(steps):
        start = time.perf_counter()
        sync(policy, engine)
        check_probe(policy, engine, encode(tokenizer, held_out[0]))
        completions = sample(engine, tokenizer, list(islice(training, PROMPTS)), GROUP_SIZE, f"{seed}/{step}")
        mismatch = backward(policy, completions)
        norm = nn.utils.clip_grad_norm_(policy.parameters(), 1.0, error_if_nonfinite=True)  # raises before the update
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        reward, seconds = fmean(c.reward for c in completions), time.perf_counter() - start
        print(f"{step=:3d}  {reward=:.3f}  {norm=:.2f}  |policy - sampler|={mismatch:.1e}  {seconds=:.2f}", flush=True)
    evaluate("after")


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO in one file, on a task that a small model learns in minutes.")
    parser.add_argument("--model", default=MODEL, help=f"a folder or a name on the hub; {MODEL} is made where missing")
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--lr", type=float, default=4e-4, help="large, for a small model; billions want 1e-6")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.model == MODEL and not Path(MODEL).exists():
        from colocated_grpo.tools.make_model import main as make_model

        make_model([MODEL, "--task", "sorting"])
    train(**vars(options))


if __name__ == "__main__":
    main()
