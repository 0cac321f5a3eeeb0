"""Rules between sections of settings. Each rule yields a line per violation.

Rules within one section are in the section's method `problems`. Rules about environments are in `source_rules`.
"""

from collections.abc import Iterator, Sequence

from colocated_grpo.settings import source_rules
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.generation import EngineConfig, ModelConfig, RolloutConfig
from colocated_grpo.settings.schema import CheckpointConfig, Config
from colocated_grpo.settings.sources import EnvironmentConfig
from colocated_grpo.settings.training import BatchConfig, PolicyConfig

Lines = Iterator[str]

MAX_NAME_BYTES = 255  # the limit of the usual file systems
_SEQUENCE = "rollout.max_prompt_tokens + rollout.max_completion_tokens"


def check(config: Config) -> None:
    """Raise ConfigError if settings contradict each other. Needs no file, network or device."""
    policy, engine, rollout, sources = config.policy, config.engine, config.rollout, config.environments
    sync, served, has_atropos = config.sync_frequency, engine.placement == "server", config.atropos is not None
    _raise_on(
        *_run_folder(config.output_dir, config.run_name or ""),
        *_lengths(config.max_sequence_tokens, config.batch, policy.context_parallel, engine.max_model_len),
        *_optimizer(policy, config.batch, rollout.prompts_per_step, config.optimizer_steps),
        *_checkpoints(config.checkpoint, policy, sync if config.deterministic else 1),
        *_shared_weights(config.shares_weights, policy, engine, sync),
        *source_rules.problems(
            sources,
            rollout,
            atropos_share=config.atropos_share,
            ranks_per_engine=config.ranks_per_engine,
            served=served,
            deterministic=config.deterministic,
        ),
        *_structured(config.structured, config.loss.old_logprobs),
        *_opponent_of_shared_weights(config.weights, policy, config.opponent_model, config.model),
        *policy.problems(),
        *engine.problems(),
        *config.evaluation.problems(),
        *source_rules.single_rank_engines(
            {f"evaluation.sets.{i}.source": entry.source for i, entry in enumerate(config.evaluation.sets)},
            config.ranks_per_engine,
        ),
        *_pushes(None if config.hub is None or config.hub.every else config.hub.repo, config.checkpoint),
        *_servers(engine, config.weights, rollout.max_staleness, has_adapter=policy.lora is not None),
        *_routes(policy.routing_replay, served, has_atropos),
        *(_stale_batches(config.deterministic, has_atropos, sync) if rollout.max_staleness else ()),
    )


def check_world(config: Config, ranks: int, ranks_per_node: int | None = None) -> None:
    """Raise ConfigError if the settings do not fit this number of ranks. ranks_per_node: None if unknown."""
    policy, engine = config.policy, config.engine
    _raise_on(
        *_engines_fit(config.ranks_per_engine, config.rollout, ranks, config.deterministic),
        *context_divides_world(policy.context_parallel, ranks),
        *(_single_rank(config.shares_weights, engine.placement, config.deterministic, ranks) if ranks > 1 else ()),
        *(() if ranks_per_node is None else _replicas_fit(policy.replicate, ranks, ranks_per_node)),
    )


def remarks(config: Config) -> list[str]:
    """Return notes about settings that are valid but have side effects."""
    return [
        *_sampling_remarks(config.rollout, config.structured),
        *_engine_remarks(config.engine),
        *(_repetition_remarks(config.environments, config.sync_frequency) if config.deterministic else ()),
        *config.evaluation.remarks(config.environments),
    ]


def _raise_on(*lines: str) -> None:
    if lines:
        raise ConfigError(*lines)


def _run_folder(output_dir: str, run_name: str) -> Lines:
    for key, value in (("output_dir", output_dir), ("run_name", run_name)):
        longest = max(value.split("/"), key=len)
        # Surrogates stand for bytes that are not UTF-8. The libraries that export a model cannot write such paths.
        invalid = any(character == "\0" or "\ud800" <= character <= "\udfff" for character in value)
        if invalid or len(longest.encode()) > MAX_NAME_BYTES:
            yield (
                f"{key}={value[:40]!r}{'...' * (len(value) > 40)}: each part of the path must be at most "
                f"{MAX_NAME_BYTES} bytes of UTF-8, without NUL"
            )
    if run_name.startswith("/") or ".." in run_name.split("/"):
        yield f"run_name={run_name!r}: must be below output_dir={output_dir!r}, so no leading '/' and no '..'"


def _lengths(longest: int, batch: BatchConfig, ranks: int, engine_length: int | None) -> Lines:
    """Yield a line for each limit that is too low for a sequence of `longest` tokens.

    Such a sequence must fit into a micro-batch that is split over `ranks` ranks, and into the engine.
    """
    size = batch.max_tokens_per_micro_batch
    if size != "auto" and size * ranks < longest:
        whole = f"{_SEQUENCE}={longest}, the longest sequence"
        split = f"{-(-longest // ranks)}: {whole}, is split over policy.context_parallel={ranks} ranks"
        yield f"batch.max_tokens_per_micro_batch={size}: must be at least {whole if ranks == 1 else split}"
    if engine_length is not None and engine_length < longest:
        yield (
            f"engine.max_model_len={engine_length}: must be at least {_SEQUENCE}={longest}, or the engine "
            "would truncate completions"
        )


def _optimizer(policy: PolicyConfig, batch: BatchConfig, prompts: int, steps: int) -> Lines:
    if prompts % batch.minibatches:
        yield (
            f"batch.minibatches={batch.minibatches}: must divide rollout.prompts_per_step={prompts}, as a "
            "minibatch consists of whole groups"
        )
    if policy.warmup_steps > steps:
        yield (
            f"policy.warmup_steps={policy.warmup_steps}: must be at most the run's {steps} "
            "optimizer steps, or the learning rate would never reach policy.lr"
        )


def _checkpoints(checkpoint: CheckpointConfig, policy: PolicyConfig, sync: int) -> Lines:
    """sync: sync_frequency of a deterministic run; 1 for other runs. A resumed run begins with a sync."""
    if checkpoint.every % sync:
        yield (
            f"checkpoint.every={checkpoint.every}: must be a multiple of sync_frequency={sync} with deterministic: "
            "true, because a resumed run begins with a weight sync"
        )
    if checkpoint.export_merged and policy.lora is None:
        yield (
            "checkpoint.export_merged=true: must be false without policy.lora, as final_model/ and step_N/ are whole "
            "models then"
        )


def _pushes(repo: str | None, checkpoint: CheckpointConfig) -> Lines:
    """repo: the Hub repository if only the final export is pushed to it; else None."""
    if repo is not None and not checkpoint.final:
        yield (
            f"hub.repo={repo}: nothing would be pushed; set hub.every above 0, or checkpoint.final: true, "
            "whose final export is pushed"
        )


def _shared_weights(setting: str | None, policy: PolicyConfig, engine: EngineConfig, sync: int) -> Lines:
    """setting: the setting that makes policy and engine share tensors; None if none does."""
    if setting is None:
        return
    if sync > 1:
        yield f"sync_frequency={sync}: must be 1 with {setting}: shared, where the engine has every update immediately"
    if policy.cpu_offload:
        yield f"policy.cpu_offload=true: must be false with {setting}: shared, whose weights stay on the device"
    if engine.dtype not in ("auto", policy.compute_dtype):
        yield (
            f"engine.dtype={engine.dtype}: must be auto with {setting}: shared, as engine and policy "
            f"(policy.compute_dtype={policy.compute_dtype}) use the same tensors"
        )
    if (quantization := engine.args.get("quantization")) is not None:
        yield (
            f"engine.args.quantization={quantization}: not supported with {setting}: shared, whose weights are trained"
        )


def _structured(structured: bool, old_logprobs: str) -> Lines:
    if structured and old_logprobs == "sampling":
        yield (
            "loss.old_logprobs=sampling: must be trainer with structured: true, where the engine's log-probabilities "
            "cover only the tokens that the grammar allows"
        )


def _opponent_of_shared_weights(
    weights: str, policy: PolicyConfig, opponent: ModelConfig | None, model: ModelConfig
) -> Lines:
    partly_frozen = policy.lora is not None or policy.train_layers is not None
    if weights == "shared" and partly_frozen and opponent not in (None, model):
        yield (
            "weights=shared: must be copied with an opponent of another model beside policy.lora or "
            "policy.train_layers, because its frozen weights would stay in the engine"
        )


def _routes(replayed: bool, served: bool, has_atropos: bool) -> Lines:
    if replayed and served:
        yield "policy.routing_replay=true: needs engine.placement: colocated; a server does not send its routes"
    if replayed and has_atropos:
        yield (
            "policy.routing_replay=true: not possible with an atropos environment, whose rollouts come without the "
            "experts that the engine chose"
        )


def _stale_batches(deterministic: bool, has_atropos: bool, sync: int) -> Lines:
    if deterministic:
        yield "deterministic=true: not possible with rollout.max_staleness=1: a resumed run begins with a fresh batch"
    if has_atropos:
        yield (
            "rollout.max_staleness=1: must be 0 with an atropos environment, which samples on its own time; a limit "
            "on its staleness is not needed for the next batch to be ready"
        )
    if sync > 1:
        yield (f"rollout.max_staleness=1: must be 0 with sync_frequency={sync}, whose rollouts are older than one step")


def _engines_fit(per_engine: int, rollout: RolloutConfig, ranks: int, deterministic: bool) -> Lines:
    if ranks % per_engine:
        yield f"engine.tensor_parallel_size={per_engine}: must divide the number of ranks, {ranks}"
    if rollout.generation == "replicated":
        return
    prompts, engines = rollout.prompts_per_step, ranks // per_engine
    if prompts < engines:
        yield f"rollout.prompts_per_step={prompts}: must be at least the number of engines, {engines}"
    elif deterministic and prompts % engines:
        yield (
            f"rollout.prompts_per_step={prompts}: must be a multiple of the number of engines, {engines}, with "
            "deterministic: true"
        )


def _servers(engine: EngineConfig, weights: str, max_staleness: int, *, has_adapter: bool) -> Lines:
    urls = engine.urls
    if engine.placement != "server":
        if urls:
            yield f"engine.urls={', '.join(urls)}: must be empty unless engine.placement is server"
        if max_staleness:
            yield (
                f"rollout.max_staleness={max_staleness}: needs engine.placement: server; an engine inside a "
                "rank cannot generate while the rank trains"
            )
        return
    if weights == "shared":
        yield "weights=shared: must be copied with engine.placement: server; there, engine.bridge: shared is the same"
    if engine.bridge == "adapter" and not has_adapter:
        yield "engine.bridge=adapter: needs policy.lora; without an adapter use broadcast or restart"
    if engine.bridge == "shared" and (len(urls) > 1 or engine.tensor_parallel_size > 1):
        yield (
            f"engine.bridge=shared: needs one server of one GPU, not {max(len(urls), 1)} of "
            f"{engine.tensor_parallel_size}: FSDP2 shards every layer by rows, tensor parallelism some by columns"
        )
    if engine.bridge == "shared" and max_staleness:
        yield "rollout.max_staleness=1: must be 0 with engine.bridge: shared, where an update changes both at once"


def context_divides_world(size: int, ranks: int) -> Lines:
    if ranks % size:
        yield f"policy.context_parallel={size}: must divide the number of ranks, {ranks}"


def _single_rank(shared: str | None, placement: str, deterministic: bool, ranks: int) -> Lines:
    """Yield a line for each setting that needs a single rank. shared: as `setting` of `_shared_weights`."""
    if shared is not None:
        yield f"{shared}=shared: needs a single rank, not {ranks}; an engine cannot compute with sharded weights"
    if placement == "server" and deterministic:
        yield (
            f"deterministic=true: needs a single rank with engine.placement: server, not {ranks}: requests of "
            "several ranks reach a server in an order that varies, and with it the rounding"
        )


def _replicas_fit(replicate: str | None, ranks: int, ranks_per_node: int) -> Lines:
    setting = f"policy.replicate={replicate}"
    if replicate is None:
        return
    if ranks <= ranks_per_node:
        yield f"{setting}: needs several nodes, and this run has one; leave it out"
    elif ranks % ranks_per_node:
        yield (
            f"{setting}: every node needs the same number of ranks, but {ranks} is not a multiple of {ranks_per_node}"
        )


def _sampling_remarks(rollout: RolloutConfig, structured: bool) -> Lines:
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    changed = [f"rollout.{key}={value:g}" for key in neutral if (value := getattr(rollout, key)) != neutral[key]]
    if changed:
        yield (
            f"{', '.join(changed)}: the engine's log-probabilities are renormalised over the tokens it keeps, "
            "the trainer's are not; expect a larger sampler-trainer KL"
        )
    if structured:
        yield (
            "environments: structured: true: the engine's log-probabilities cover the tokens that the grammar allows, "
            "the trainer's all tokens; loss.correction weights each token by the ratio, and mismatch/* reports it"
        )


def _engine_remarks(engine: EngineConfig) -> Lines:
    if (quantization := engine.args.get("quantization")) is not None:
        yield f"engine.args.quantization={quantization}: the engine's weights differ from the policy's"
    if engine.kv_cache_memory_bytes is not None and engine.gpu_memory_utilization is not None:
        yield "engine.gpu_memory_utilization: ignored, because engine.kv_cache_memory_bytes is set"


def _repetition_remarks(sources: Sequence[EnvironmentConfig], sync: int) -> Lines:
    """Yield a note for each setting with which `deterministic: true` does not repeat a run exactly."""
    if sync > 1:
        yield (
            f"deterministic: true with sync_frequency={sync}: a run stopped by a signal between two "
            "syncs resumes with a sync, so it does not repeat the uninterrupted run"
        )
    if played := {source.type for source in sources} & {"agent", "episode"}:
        yield (
            f"deterministic: true with type: {min(played)}: which turns are decoded together depends on how long tools "
            "take, and changes rounding; a resumed run may differ in the last bits of a log-probability"
        )
