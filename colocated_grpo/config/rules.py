"""Rules between settings. Each is a function that yields one line for each way in which it is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from colocated_grpo.config.errors import ConfigError
from colocated_grpo.config.schema import MIN_TEMPERATURE, Config, EngineConfig
from colocated_grpo.config.sources import EpisodeSourceConfig
from colocated_grpo.config.turns import FROZEN, TurnsSourceConfig

Lines = Iterator[str]

LONGEST_NAME = 255  # of file systems in use
_SEQUENCE = "rollout.max_prompt_tokens + rollout.max_completion_tokens"


def check(config: Config) -> None:
    """Raise ConfigError when settings contradict each other. Needs no file, network or device."""
    _raise_on([line for rule in RULES for line in rule(config)])


def check_world(config: Config, world_size: int) -> None:
    """Raise ConfigError when the settings do not fit this number of ranks."""
    _raise_on([line for rule in WORLD_RULES for line in rule(config, world_size)])


def remarks(config: Config) -> list[str]:
    """What is allowed and yet deserves a word."""
    return [line for remark in REMARKS for line in remark(config)]


def _raise_on(lines: list[str]) -> None:
    if lines:
        raise ConfigError(*lines)


def _run_folder_has_a_possible_name(config: Config) -> Lines:
    for key, value in (("output_dir", config.output_dir), ("run_name", config.run_name or "")):
        longest = max(value.split("/"), key=len)
        # Surrogates stand for bytes that are no UTF-8: a model is exported by libraries that do not know them.
        impossible = any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in value)
        if impossible or len(longest.encode()) > LONGEST_NAME:
            yield (
                f"{key}={value[:40]!r}{'...' * (len(value) > 40)}: a folder's name has at most {LONGEST_NAME} bytes "
                "of UTF-8 and no NUL"
            )
    name = config.run_name or ""
    if name.startswith("/") or ".." in name.split("/"):
        below = f"names a folder below output_dir={config.output_dir!r}"
        yield f"run_name={name!r}: {below}, so no '/' at its start and no '..'"


def _completion_fits_micro_batch(config: Config) -> Lines:
    size = config.batch.max_tokens_per_micro_batch
    if size != "auto" and size < config.max_sequence_tokens:
        yield (
            f"batch.max_tokens_per_micro_batch={size} is smaller than {_SEQUENCE}={config.max_sequence_tokens}: "
            "one completion could never be packed"
        )


def _evaluation_is_sampled_as_asked(config: Config) -> Lines:
    temperature = config.evaluation.temperature
    if 0 < temperature < MIN_TEMPERATURE:
        yield f"evaluation.temperature={temperature:g}: must be 0 (greedy) or at least {MIN_TEMPERATURE:g}"


def _sequence_fits_engine(config: Config) -> Lines:
    length = config.engine.max_model_len
    if length is not None and length < config.max_sequence_tokens:
        yield (
            f"engine.max_model_len={length} is smaller than {_SEQUENCE}={config.max_sequence_tokens}: "
            "the engine would cut completions short"
        )


def _minibatches_divide_batch(config: Config) -> Lines:
    count = config.batch.minibatches
    if config.rollout.prompts_per_step % count:
        yield (
            f"batch.minibatches={count} does not divide rollout.prompts_per_step={config.rollout.prompts_per_step}: "
            "minibatches of whole groups would differ in size"
        )


def _min_lr_below_lr(config: Config) -> Lines:
    policy = config.policy
    if policy.min_lr > policy.lr:
        yield f"policy.min_lr={policy.min_lr:g} is larger than policy.lr={policy.lr:g}: a schedule ends below its peak"


def _warmup_ends(config: Config) -> Lines:
    if config.policy.warmup_steps > config.optimizer_steps:
        yield (
            f"policy.warmup_steps={config.policy.warmup_steps} is larger than the run's {config.optimizer_steps} "
            "optimizer steps: the learning rate would never reach policy.lr"
        )


def _resumable_at_a_sync(config: Config) -> Lines:
    every, sync = config.checkpoint.every, config.sync_frequency
    if config.deterministic and every % sync:
        yield (
            f"checkpoint.every={every} is not a multiple of sync_frequency={sync}: a resumed run syncs at once, so "
            "deterministic: true needs checkpoints that fall on a sync"
        )


def _engine_fields_are_not_arguments(config: Config) -> Lines:
    for name in config.engine.args:
        if name in EngineConfig.model_fields:
            yield f"engine.args.{name}: is a setting of its own; write engine.{name}"


def _shared_weights_are_plain(config: Config) -> Lines:
    if config.weights != "shared":
        return
    policy, engine = config.policy, config.engine
    if config.sync_frequency > 1:
        yield (
            f"sync_frequency={config.sync_frequency} does not go with weights=shared: the engine has each optimizer "
            "step's weights at once"
        )
    if policy.cpu_offload:
        yield "policy.cpu_offload=true does not go with weights=shared: the engine's weights are on the device"
    if engine.dtype not in ("auto", policy.compute_dtype):
        yield (
            f"engine.dtype={engine.dtype} with policy.compute_dtype={policy.compute_dtype} does not go with "
            "weights=shared: engine and policy compute with the same numbers; leave engine.dtype=auto"
        )
    quantization = engine.args.get("quantization")
    if quantization is not None:
        yield f"engine.args.quantization={quantization} does not go with weights=shared: gradients need plain weights"


def _one_atropos_entry(config: Config) -> Lines:
    count = sum(source.type == "atropos" for source in config.environments)
    if count > 1:
        yield f"environments: {count} atropos entries; connect every such environment to the one API server instead"


def _atropos_shares_prompts(config: Config) -> Lines:
    if config.atropos is None or len(config.environments) == 1:
        return
    share, prompts = config.atropos_share, config.rollout.prompts_per_step
    if abs(share - round(share)) > 1e-6 or not 1 <= round(share) < prompts:
        yield (
            f"environments: by its weight={config.atropos.weight:g} the atropos entry has {share:.4g} of "
            f"rollout.prompts_per_step={prompts}; it and the others need a whole number of prompts each, at least 1"
        )


def _atropos_needs_whole_engines(config: Config) -> Lines:
    if config.atropos is None:
        return
    if config.engine.tensor_parallel_size > 1:
        yield (
            f"engine.tensor_parallel_size={config.engine.tensor_parallel_size}: an atropos environment needs 1, since "
            "requests come to each engine at times of their own"
        )
    if config.rollout.generation == "replicated":
        yield "rollout.generation=replicated: an atropos environment samples what it asks for, once"
    if config.deterministic:
        yield "deterministic: an atropos environment decides what is sampled and when; no run repeats another"


def _served_ports_differ(config: Config) -> Lines:
    if config.atropos is None:
        return
    ports = [config.atropos.server.port, *config.atropos.server.more_ports]
    if len(set(ports)) < len(ports):
        yield f"environments: atropos: server: port and more_ports name a port twice: {', '.join(map(str, ports))}"


def _episodes_have_the_engine_to_themselves(config: Config) -> Lines:
    size = config.engine.tensor_parallel_size
    for index, source in enumerate(config.environments):
        if size > 1 and isinstance(source, EpisodeSourceConfig):
            yield (
                f"environments.{index}.type=episode needs engine.tensor_parallel_size=1, not {size}: the ranks of one "
                "engine would have to get every turn at the same step"
            )


def _grammar_needs_weights(config: Config) -> Lines:
    if config.structured and config.loss.old_logprobs == "sampling":
        yield (
            "loss.old_logprobs=sampling: with structured: true the sampling log-probabilities are over the tokens that "
            "the grammar allows, so the ratio would not be one of policies"
        )


def _one_opponent(config: Config) -> Lines:
    for index, source in enumerate(config.environments):
        if not isinstance(source, TurnsSourceConfig):
            continue
        if source.opponent is not None and config.atropos is not None:
            yield f"environments.{index}.opponent: beside an atropos entry it would answer requests from outside too"
        if source.opponent is not None and source.opponent != config.opponent:
            yield f"environments.{index}.opponent: differs from another entry's; a run has one frozen model"
        players = source.args.get("players")
        if source.opponent is None and isinstance(players, list) and FROZEN in players:
            yield (
                f"environments.{index}.args.players: {FROZEN!r} seats need a model that plays them: "
                f"environments.{index}.opponent: {{name: initial}}"
            )


def _tensor_parallel_divides_world(config: Config, world_size: int) -> Lines:
    size = config.engine.tensor_parallel_size
    if world_size % size:
        yield f"engine.tensor_parallel_size={size} does not divide the {world_size} ranks: each engine spans so many"


def _every_engine_has_prompts(config: Config, world_size: int) -> Lines:
    if config.rollout.generation == "replicated":
        return
    prompts, engines = config.rollout.prompts_per_step, world_size // config.engine.tensor_parallel_size
    if prompts < engines:
        yield f"rollout.prompts_per_step={prompts} is smaller than the number of engines={engines}: some would idle"
    elif config.deterministic and prompts % engines:
        yield (
            f"rollout.prompts_per_step={prompts} is not a multiple of the number of engines={engines}: "
            "deterministic: true gives every engine the same share"
        )


def _shared_weights_are_whole(config: Config, world_size: int) -> Lines:
    if config.weights == "shared" and world_size > 1:
        yield f"weights=shared does not go with {world_size} ranks: an engine cannot compute with shards"


def _renormalised_sampling(config: Config) -> Lines:
    rollout = config.rollout
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    values = {name: getattr(rollout, name) for name in neutral}
    changed = [f"rollout.{name}={value:g}" for name, value in values.items() if value != neutral[name]]
    if changed:
        yield (
            f"{', '.join(changed)}: the engine's log-probabilities are renormalised over the tokens it keeps, "
            "the trainer's are not; expect a larger sampler/trainer KL"
        )


def _masked_sampling(config: Config) -> Lines:
    if config.structured:
        yield (
            "environments: structured: true: the engine's log-probabilities are over what the grammar allows, "
            "the trainer's over all tokens; loss.correction weighs each token with the difference, mismatch/* shows it"
        )


def _both_memory_sizes(config: Config) -> Lines:
    if config.engine.kv_cache_memory_bytes is not None and config.engine.gpu_memory_utilization is not None:
        yield "engine.gpu_memory_utilization is not used: engine.kv_cache_memory_bytes goes first"


def _stopped_between_syncs(config: Config) -> Lines:
    if config.deterministic and config.sync_frequency > 1:
        yield (
            f"deterministic: true with sync_frequency={config.sync_frequency}: a run that a signal stops between two "
            "syncs resumes with a sync, and does not repeat the uninterrupted one"
        )


def _turns_by_the_clock(config: Config) -> Lines:
    if config.deterministic and any(isinstance(source, EpisodeSourceConfig) for source in config.environments):
        yield (
            "deterministic: true with type: episode: which turns decode together follows from how long tools take, and "
            "rounding from that; a resumed run may differ in the last bits of a log-probability"
        )


RULES: tuple[Callable[[Config], Lines], ...] = (
    _run_folder_has_a_possible_name,
    _completion_fits_micro_batch,
    _evaluation_is_sampled_as_asked,
    _sequence_fits_engine,
    _minibatches_divide_batch,
    _min_lr_below_lr,
    _warmup_ends,
    _resumable_at_a_sync,
    _engine_fields_are_not_arguments,
    _shared_weights_are_plain,
    _one_atropos_entry,
    _atropos_shares_prompts,
    _atropos_needs_whole_engines,
    _served_ports_differ,
    _episodes_have_the_engine_to_themselves,
    _grammar_needs_weights,
    _one_opponent,
)
WORLD_RULES: tuple[Callable[[Config, int], Lines], ...] = (
    _tensor_parallel_divides_world,
    _every_engine_has_prompts,
    _shared_weights_are_whole,
)
REMARKS: tuple[Callable[[Config], Lines], ...] = (
    _renormalised_sampling,
    _masked_sampling,
    _both_memory_sizes,
    _stopped_between_syncs,
    _turns_by_the_clock,
)
