"""What a dry run shows: the first prompts as the model reads them, and the rewards of a right and a useless answer."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import psutil
import torch

from colocated_grpo.assembly import data, engines
from colocated_grpo.environments.base import Scorer
from colocated_grpo.environments.build import build_environments
from colocated_grpo.environments.rewards import scoring, workers
from colocated_grpo.errors import ConfigError, visible
from colocated_grpo.policy import checkpoint_files, model_files, model_loader
from colocated_grpo.policy.lora.weights import insert_adapters
from colocated_grpo.rollout.reward_calls import RewardCalls
from colocated_grpo.rollout.vllm.kv_budget import check_cache
from colocated_grpo.settings import config_json, model_sizes
from colocated_grpo.settings.exact import check_exact
from colocated_grpo.settings.run_sizes import FULL, Placement, RunSizes, disk_notes, fits, gib, memory_fix
from colocated_grpo.settings.schema import Config
from colocated_grpo.tracking.text import Note, without_middle
from colocated_grpo.types import Completion, Prompt, Score

USELESS = "I do not know."
MOST_PROMPTS = 1024
SHOWN_CHARACTERS = 600
"""Longer prompts are cut in the middle."""
ROLES = {"system", "developer", "user", "assistant", "model", "tool", "function"}
"""Roles of chat messages. Most templates render any role, and models know only those of their training."""
MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")  # JSON, or as str() writes them


def preview(config: Config, place: Placement, note: Note) -> list[str]:
    """Build the model without parameters and draw the first prompts as a run does. Return lines that show them.

    Imports the code of the environments, reads their data and computes rewards. place: the ranks that would run; the
    memory of their devices is read here. note: receives remarks. Raises ConfigError or RunError for the first problem.
    """
    folder, device = checkpoint_files.fetch_tokenizer(config.model), torch.device("cuda" if place.on_gpu else "cpu")
    model = model_loader.check_model(config.model, folder)
    if config.policy.lora is not None:
        insert_adapters(model.lm, config.policy.lora)
    if config.engine.placement == "colocated":
        spec = engines.engine_spec(config, folder, 1, device, sequences=1)  # the checks depend on neither number
        check_cache(spec)
        if config.numerics == "exact":  # a GPU of the run may be another than this machine's: assume that it is right
            gpu, float32 = place.on_gpu, spec.dtype == torch.float32
            check_exact(config_json.read_config_json(config.model), on_cpu=not gpu, on_hopper=gpu, float32=float32)
        if spec.args:
            # Imported here: vLLM takes many seconds to import.
            from colocated_grpo.rollout.vllm.vllm_arguments import check_arguments

            check_arguments(spec.args)
    tokenizer = model_files.load_tokenizer(config.model, folder)
    model_files.stop_token_ids(tokenizer, folder)  # raises if one lies outside the vocabulary
    if (reference := config.reference_model) is not None:
        fetched = checkpoint_files.fetch_tokenizer(reference)
        model_loader.check_model(reference, fetched)
        engines.check_same_vocabulary(reference.name, model_files.load_tokenizer(reference, fetched), tokenizer)
    model_config = config_json.read_config_json(config.model)
    environments = build_environments(config, tokenizer, config_json.text_part(model_config).get("vocab_size"))
    data.import_answers(config.evaluation)
    count = min(config.rollout.prompts_per_step, MOST_PROMPTS)
    prompts: list[Prompt] = []
    if environments.trained:
        source = data.open_source(environments, note)
        prompts = source.next(count)
        if dropped := source.num_dropped:
            rule = "empty, or longer than rollout.max_prompt_tokens"
            note(f"{dropped} of the first {dropped + len(prompts)} prompts are left out: {rule}")
    data.draw_evaluated(config.evaluation, environments, note)
    for line in [*unknown_roles(prompts), *messages_as_text(prompts)]:
        note(line)
    if empty := sum(prompt.answer is not None and not prompt.answer.strip() for prompt in prompts):
        note(f"{empty} of the first {len(prompts)} prompts have an empty answer")
    if len({prompt.text for prompt in prompts}) < 2 <= len({str(prompt.item["prompt"]) for prompt in prompts}):
        note("all prompts of the first step are rendered as the same text; does the chat template use the messages?")
    try:
        scorers = environments.scorers if config.is_rewarded else {}
        rewards = list(show_rewards(prompts, scorers, config.rollout.reward_timeout, note))
    finally:
        workers.end_idle_workers()
    lines = [*show_prompts(prompts, config.rollout.max_prompt_tokens), *rewards]
    if (sizes := model_sizes.sizes_of(model_config)) is not None:
        run = RunSizes(config, sizes, place)
        lines.append(show_needs(run, note))
        for line in disk_notes(run):
            note(line)
    return [*lines, "ok: settings, model, data, functions and the first prompts"]


def show_needs(run: RunSizes, note: Note) -> str:
    """Return memory and disk space by arithmetic. Note what this machine, which may be another, does not have."""
    place = run.place
    host = psutil.virtual_memory().total * place.nodes // place.ranks
    has_gpu = place.on_gpu and torch.cuda.is_available()
    memory = torch.cuda.get_device_properties(0).total_memory if has_gpu else host
    run = replace(run, place=replace(place, device_bytes=memory))
    need, space = run.footprint(), run.run_folder_bytes()
    each = f"{gib(need.training)} while training and {gib(need.generating)} while generating"
    if has_gpu == place.on_gpu and not fits(run, host, FULL):
        note(f"a rank needs at least {each}, and has {gib(memory)} here; use {memory_fix(run, host)}")
    return f"  by arithmetic, a rank needs at least {each}; checkpoints and exports take {gib(space)}"


def unknown_roles(prompts: Sequence[Prompt]) -> Iterator[str]:
    found = {
        (prompt.source, message["role"])
        for prompt in prompts
        for message in prompt.item["prompt"]
        if isinstance(message, dict)
    }
    for source, role in sorted(found):
        if role not in ROLES:
            yield f"environments {source!r}: messages have the role {role!r}; is it one of {', '.join(sorted(ROLES))}?"


def messages_as_text(prompts: Sequence[Prompt]) -> Iterator[str]:
    for source, prompt in sorted({prompt.source: prompt.item["prompt"] for prompt in prompts}.items()):
        # A system prompt makes text the last message.
        if MESSAGES_AS_TEXT.match(str(prompt if isinstance(prompt, str) else prompt[-1].get("content"))):
            rule = "prompts are text that looks like a list of messages, and the model reads them as that text"
            yield f"environments {source!r}: {rule}; for messages, write a list into the data, such as json.loads(text)"


def show_prompts(prompts: Sequence[Prompt], limit: int) -> Iterator[str]:
    """Yield lines: the number and lengths of the prompts of each source, then the first prompt."""
    for source, group in groupby(sorted(prompts, key=lambda prompt: prompt.source), key=lambda prompt: prompt.source):
        lengths = [len(prompt.token_ids) for prompt in group]
        found = f"{min(lengths)} to {max(lengths)} tokens (rollout.max_prompt_tokens={limit})"
        yield f"  {source}: {len(lengths)} prompts of the first step have {found}"
    for prompt in prompts[:1]:
        yield f"  the first prompt, {len(prompt.token_ids)} tokens:"
        yield from (f"    | {line}" for line in visible(without_middle(prompt.text, SHOWN_CHARACTERS)).splitlines())


def show_rewards(prompts: Sequence[Prompt], scorers: Mapping[str, Scorer], timeout: float, note: Note) -> Iterator[str]:
    """Yield a line for each source with a scorer: the reward of its first prompt's answer, and of a useless answer."""
    first = {prompt.source: prompt for prompt in reversed(prompts)}
    for source, prompt in sorted(first.items()):
        if source not in scorers:
            continue
        texts = [USELESS] if prompt.answer is None else [prompt.answer, USELESS]
        scores = scores_of(scorers[source], prompt, texts, timeout)
        shown = [f"{_reward(score)} for {text[:60]!r}" for text, score in zip(texts, scores, strict=True)]
        yield f"  {source}: the reward is {', '.join(shown)}"
        rewards = [score.reward for score in scores if score.reward is not None]
        if not rewards and scores[0].error is None:
            note(f"environments {source!r}: no reward for {texts[0]!r:.60}; return a number where the reward applies")
        elif not rewards and not any(scoring.NOT_RUN in str(score.error) for score in scores):
            raise ConfigError(f"environments {source!r}: the reward fails for every text tried: {scores[0].error}")
        elif len(rewards) == 2 and rewards[0] <= rewards[1]:
            is_text = isinstance(prompt.item["prompt"], str)
            form = "texts, not lists of messages" if is_text else "lists of messages, not texts"
            rule = f"the row's own answer gets no more reward than {USELESS!r}; does the reward expect another form?"
            note(f"environments {source!r}: {rule} Completions of these prompts are {form}")


def scores_of(scorer: Scorer, prompt: Prompt, texts: Sequence[str], timeout: float) -> list[Score]:
    """Score texts as completions of the prompt. A timeout becomes `Score.error`."""
    completion = Completion(token_ids=[], sampling_logprobs=[], finish_reason="stop", policy_version=0)
    calls = RewardCalls(
        lambda prompt, completions: (list(texts), scorer.score(prompt, completions, texts)), workers=1, timeout=timeout
    )
    try:
        call = calls.submit(prompt, [completion] * len(texts))
        calls.wait([call], 0.0)
        judged = call.judged()
    finally:
        calls.close()
    return [Score(reward=None, error=calls.timeout_error)] * len(texts) if judged is None else judged[1]


def _reward(score: Score) -> str:
    if score.reward is None:
        parts = [f"{name}: {value:.4g}" for name, value in score.parts.items() if score.error is not None]
        reasons = [*([score.error] if score.error else []), *parts]
        return f"none ({'; '.join(reasons)})" if reasons else "none"
    return f"{score.reward:.4g}"
