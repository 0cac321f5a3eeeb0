"""Rules between settings. Each rule is a function that yields one error line per violation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from colocated_grpo.settings.adapter_rules import ADAPTER_RULES
from colocated_grpo.settings.context_rules import context_divides_world, context_without_load_balancing
from colocated_grpo.settings.engine import EngineConfig
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.evaluation_rules import EVALUATION_RULES, evaluated_data_is_trained
from colocated_grpo.settings.hub import HUB_RULES
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.selection_rules import SELECTION_RULES
from colocated_grpo.settings.server_rules import SERVER_RULES, SERVER_WORLD_RULES
from colocated_grpo.settings.sources import AgentSourceConfig, EpisodeSourceConfig
from colocated_grpo.settings.turns import FROZEN, TurnsSourceConfig

Lines = Iterator[str]

MAX_NAME_BYTES = 255  # the limit of the usual file systems
_SEQUENCE = "rollout.max_prompt_tokens + rollout.max_completion_tokens"


def check(config: Config) -> None:
    """Raise ConfigError where settings contradict each other. Needs no file, network or device."""
    _raise_on([line for rule in RULES for line in rule(config)])


def check_world(config: Config, world_size: int) -> None:
    """Raise ConfigError where the settings do not fit this number of ranks."""
    _raise_on([line for rule in WORLD_RULES for line in rule(config, world_size)])


def remarks(config: Config) -> list[str]:
    """Return notes about settings that are valid but have side effects."""
    return [line for remark in REMARKS for line in remark(config)]


def _raise_on(lines: list[str]) -> None:
    if lines:
        raise ConfigError(*lines)


def _run_folder_has_a_valid_name(config: Config) -> Lines:
    for key, value in (("output_dir", config.output_dir), ("run_name", config.run_name or "")):
        longest = max(value.split("/"), key=len)
        # Surrogates stand for bytes that are not UTF-8. The libraries that export a model cannot write such paths.
        invalid = any(character == "\0" or "\ud800" <= character <= "\udfff" for character in value)
        if invalid or len(longest.encode()) > MAX_NAME_BYTES:
            yield (
                f"{key}={value[:40]!r}{'...' * (len(value) > 40)}: each part of the path must be at most "
                f"{MAX_NAME_BYTES} bytes of UTF-8, without NUL"
            )
    name = config.run_name or ""
    if name.startswith("/") or ".." in name.split("/"):
        yield f"run_name={name!r}: must be below output_dir={config.output_dir!r}, so no leading '/' and no '..'"


def _sequence_fits_micro_batch(config: Config) -> Lines:
    size, ranks = config.batch.max_tokens_per_micro_batch, config.policy.context_parallel
    if size != "auto" and size * ranks < config.max_sequence_tokens:
        whole = f"{_SEQUENCE}={config.max_sequence_tokens}, the longest sequence"
        least = -(-config.max_sequence_tokens // ranks)
        split = f"{least}: {whole}, is split over policy.context_parallel={ranks} ranks"
        yield f"batch.max_tokens_per_micro_batch={size}: must be at least {whole if ranks == 1 else split}"


def _sequence_fits_engine(config: Config) -> Lines:
    length = config.engine.max_model_len
    if length is not None and length < config.max_sequence_tokens:
        yield (
            f"engine.max_model_len={length}: must be at least {_SEQUENCE}={config.max_sequence_tokens}, or the engine "
            "would truncate completions"
        )


def _minibatches_divide_batch(config: Config) -> Lines:
    count = config.batch.minibatches
    if config.rollout.prompts_per_step % count:
        yield (
            f"batch.minibatches={count}: must divide rollout.prompts_per_step={config.rollout.prompts_per_step}, as a "
            "minibatch consists of whole groups"
        )


def _min_lr_below_lr(config: Config) -> Lines:
    policy = config.policy
    if policy.min_lr > policy.lr:
        yield f"policy.min_lr={policy.min_lr:g}: must be at most policy.lr={policy.lr:g}, the peak of the schedule"


def _warmup_ends(config: Config) -> Lines:
    if config.policy.warmup_steps > config.optimizer_steps:
        yield (
            f"policy.warmup_steps={config.policy.warmup_steps}: must be at most the run's {config.optimizer_steps} "
            "optimizer steps, or the learning rate would never reach policy.lr"
        )


def _checkpoints_fall_on_syncs(config: Config) -> Lines:
    every, sync = config.checkpoint.every, config.sync_frequency
    if config.deterministic and every % sync:
        yield (
            f"checkpoint.every={every}: must be a multiple of sync_frequency={sync} with deterministic: true, because "
            "a resumed run begins with a weight sync"
        )


def _engine_fields_are_not_arguments(config: Config) -> Lines:
    for name in config.engine.args:
        if name in EngineConfig.model_fields:
            yield f"engine.args.{name}: has a setting of its own; write engine.{name}"


def _shared_weights_are_plain(config: Config) -> Lines:
    setting = config.shares_weights
    if setting is None:
        return
    policy, engine = config.policy, config.engine
    if config.sync_frequency > 1:
        yield (
            f"sync_frequency={config.sync_frequency}: must be 1 with {setting}: shared, where the engine has every "
            "update immediately"
        )
    if policy.cpu_offload:
        yield f"policy.cpu_offload=true: must be false with {setting}: shared, whose weights stay on the device"
    if engine.dtype not in ("auto", policy.compute_dtype):
        yield (
            f"engine.dtype={engine.dtype}: must be auto with {setting}: shared, as engine and policy "
            f"(policy.compute_dtype={policy.compute_dtype}) use the same tensors"
        )
    quantization = engine.args.get("quantization")
    if quantization is not None:
        yield (
            f"engine.args.quantization={quantization}: not supported with {setting}: shared, whose weights are trained"
        )


def _one_atropos_entry(config: Config) -> Lines:
    count = sum(source.type == "atropos" for source in config.environments)
    if count > 1:
        yield f"environments: {count} entries of type atropos; keep one and connect all environments to its API server"


def _atropos_share_is_whole(config: Config) -> Lines:
    if config.atropos is None or len(config.environments) == 1:
        return
    share, prompts = config.atropos_share, config.rollout.prompts_per_step
    if abs(share - round(share)) > 1e-6 or not 1 <= round(share) < prompts:
        yield (
            f"environments: weight={config.atropos.weight:g} of the atropos entry gives it {share:.4g} of "
            f"rollout.prompts_per_step={prompts}; it and the other entries need a whole number of prompts, at least 1"
        )


def _atropos_engines_are_independent(config: Config) -> Lines:
    if config.atropos is None:
        return
    if config.ranks_per_engine > 1:
        yield (
            f"engine.tensor_parallel_size={config.ranks_per_engine}: must be 1 with an atropos "
            "environment, whose requests arrive at each engine at different times"
        )
    if config.rollout.generation == "replicated":
        yield "rollout.generation=replicated: must be sharded with an atropos environment; each request is sampled once"
    if config.deterministic:
        yield "deterministic=true: not possible with an atropos environment, which decides what is sampled and when"


def _served_ports_differ(config: Config) -> Lines:
    if config.atropos is None:
        return
    ports = [config.atropos.server.port, *config.atropos.server.more_ports]
    if len(set(ports)) < len(ports):
        yield f"environments: atropos: server: port and more_ports repeat a port: {', '.join(map(str, ports))}"


def _episodes_need_single_rank_engines(config: Config) -> Lines:
    size = config.ranks_per_engine
    for index, source in enumerate(config.environments):
        if size > 1 and isinstance(source, EpisodeSourceConfig | AgentSourceConfig):
            yield (
                f"environments.{index}.type={source.type}: needs engine.tensor_parallel_size=1, not {size}, because "
                "the ranks of an engine would have to submit every turn at the same step"
            )


def _structured_output_needs_trainer_logprobs(config: Config) -> Lines:
    if config.structured and config.loss.old_logprobs == "sampling":
        yield (
            "loss.old_logprobs=sampling: must be trainer with structured: true, where the engine's log-probabilities "
            "cover only the tokens that the grammar allows"
        )


def _one_opponent(config: Config) -> Lines:
    for index, source in enumerate(config.environments):
        if not isinstance(source, TurnsSourceConfig):
            continue
        if source.opponent is not None and config.atropos is not None:
            yield (
                f"environments.{index}.opponent: not supported beside an atropos entry, whose requests it would answer"
            )
        if source.opponent is not None and source.opponent != config.opponent:
            yield f"environments.{index}.opponent: must equal the opponent of the other entries; a run has only one"
        players = source.args.get("players")
        if source.opponent is None and isinstance(players, list) and FROZEN in players:
            yield (
                f"environments.{index}.args.players: {FROZEN!r} needs a model; set "
                f"environments.{index}.opponent: {{name: initial}}"
            )


def _shared_frozen_weights_survive_the_opponent(config: Config) -> Lines:
    partly_frozen = config.policy.lora is not None or config.policy.train_layers is not None
    if config.weights == "shared" and partly_frozen and config.opponent_model not in (None, config.model):
        yield (
            "weights=shared: must be copied with an opponent of another model beside policy.lora or "
            "policy.train_layers, because its frozen weights would stay in the engine"
        )


def _tensor_parallel_divides_world(config: Config, world_size: int) -> Lines:
    size = config.ranks_per_engine
    if world_size % size:
        yield f"engine.tensor_parallel_size={size}: must divide the number of ranks, {world_size}"


def _every_engine_has_prompts(config: Config, world_size: int) -> Lines:
    if config.rollout.generation == "replicated":
        return
    prompts, engines = config.rollout.prompts_per_step, world_size // config.ranks_per_engine
    if prompts < engines:
        yield f"rollout.prompts_per_step={prompts}: must be at least the number of engines, {engines}"
    elif config.deterministic and prompts % engines:
        yield (
            f"rollout.prompts_per_step={prompts}: must be a multiple of the number of engines, {engines}, with "
            "deterministic: true"
        )


def _shared_weights_need_one_rank(config: Config, world_size: int) -> Lines:
    setting = config.shares_weights
    if setting is not None and world_size > 1:
        yield f"{setting}=shared: needs a single rank, not {world_size}; an engine cannot compute with sharded weights"


def _renormalised_sampling(config: Config) -> Lines:
    rollout = config.rollout
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    changed = [f"rollout.{key}={value:g}" for key in neutral if (value := getattr(rollout, key)) != neutral[key]]
    if changed:
        yield (
            f"{', '.join(changed)}: the engine's log-probabilities are renormalised over the tokens it keeps, "
            "the trainer's are not; expect a larger sampler-trainer KL"
        )


def _structured_sampling(config: Config) -> Lines:
    if config.structured:
        yield (
            "environments: structured: true: the engine's log-probabilities cover the tokens that the grammar allows, "
            "the trainer's all tokens; loss.correction weights each token by the ratio, and mismatch/* reports it"
        )


def _two_cache_sizes(config: Config) -> Lines:
    if config.engine.kv_cache_memory_bytes is not None and config.engine.gpu_memory_utilization is not None:
        yield "engine.gpu_memory_utilization: ignored, because engine.kv_cache_memory_bytes is set"


def _stopped_between_syncs(config: Config) -> Lines:
    if config.deterministic and config.sync_frequency > 1:
        yield (
            f"deterministic: true with sync_frequency={config.sync_frequency}: a run stopped by a signal between two "
            "syncs resumes with a sync, so it does not repeat the uninterrupted run"
        )


def _episodes_depend_on_timing(config: Config) -> Lines:
    if config.deterministic and (played := {s.type for s in config.environments} & {"agent", "episode"}):
        yield (
            f"deterministic: true with type: {min(played)}: which turns are decoded together depends on how long tools "
            "take, and changes rounding; a resumed run may differ in the last bits of a log-probability"
        )


RULES: tuple[Callable[[Config], Lines], ...] = (
    _run_folder_has_a_valid_name,
    _sequence_fits_micro_batch,
    context_without_load_balancing,
    _sequence_fits_engine,
    _minibatches_divide_batch,
    _min_lr_below_lr,
    _warmup_ends,
    _checkpoints_fall_on_syncs,
    _engine_fields_are_not_arguments,
    _shared_weights_are_plain,
    _one_atropos_entry,
    _atropos_share_is_whole,
    _atropos_engines_are_independent,
    _served_ports_differ,
    _episodes_need_single_rank_engines,
    _structured_output_needs_trainer_logprobs,
    _one_opponent,
    _shared_frozen_weights_survive_the_opponent,
    *ADAPTER_RULES,
    *EVALUATION_RULES,
    *HUB_RULES,
    *SELECTION_RULES,
    *SERVER_RULES,
)
WORLD_RULES: tuple[Callable[[Config, int], Lines], ...] = (
    _tensor_parallel_divides_world,
    _every_engine_has_prompts,
    _shared_weights_need_one_rank,
    context_divides_world,
    *SERVER_WORLD_RULES,
)
REMARKS: tuple[Callable[[Config], Lines], ...] = (
    _renormalised_sampling,
    _structured_sampling,
    _two_cache_sizes,
    _stopped_between_syncs,
    _episodes_depend_on_timing,
    evaluated_data_is_trained,
)
