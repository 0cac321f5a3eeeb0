"""Rules between sections of settings. Each rule yields a line per violation.

Rules within one section are in the section's method `problems`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from colocated_grpo.settings import errors, evaluation, generation
from colocated_grpo.settings import sources as source_types
from colocated_grpo.settings.atropos import AtroposSourceConfig, is_loopback
from colocated_grpo.settings.schema import Config, EngineConfig, PolicyConfig, RolloutConfig

Lines = Iterator[str]

MAX_NAME_BYTES = 255  # the limit of the usual file systems
_SEQUENCE = "rollout.max_prompt_tokens + rollout.max_completion_tokens"


def check(config: Config) -> None:
    """Raise ConfigError if settings contradict each other. Needs no file, network or device."""
    from colocated_grpo.settings.exact import problems as exact_problems  # the loop does not need it

    setting, policy, exact = config.shares_weights, config.policy, config.numerics == "exact"
    errors.raise_on(
        *_run_folder(config.output_dir, config.run_name or ""),
        *_sizes(config),
        *(_shared_weights(setting, policy, config.engine, config.sync_frequency) if setting is not None else ()),
        *_environments(config),
        *_engines(config),
        *(exact_problems(policy, config.engine, config.rollout, config.structured) if exact else ()),
        *policy.problems(),
        *config.engine.problems(),
        *config.rollout.problems(),
        *config.evaluation.problems(),
    )


def check_world(config: Config, ranks: int, ranks_per_node: int | None = None) -> None:
    """Raise ConfigError if the settings do not fit this number of ranks. ranks_per_node: None if unknown."""
    per_engine, prompts, replicate = config.ranks_per_engine, config.rollout.prompts_per_step, config.policy.replicate
    engines, sharded = ranks // per_engine, config.rollout.generation == "sharded"
    lines: list[str] = []
    if ranks % (size := config.policy.context_parallel):
        lines.append(f"policy.context_parallel={size}: must divide the number of ranks, {ranks}")
    if ranks % per_engine:
        lines.append(f"engine.tensor_parallel_size={per_engine}: must divide the number of ranks, {ranks}")
    if sharded and prompts < engines:
        lines.append(f"rollout.prompts_per_step={prompts}: must be at least the number of engines, {engines}")
    elif sharded and config.deterministic and prompts % engines:
        rule = f"must be a multiple of the number of engines, {engines}, with deterministic: true"
        lines.append(f"rollout.prompts_per_step={prompts}: {rule}")
    if ranks > 1 and (shared := config.shares_weights) is not None:
        lines.append(f"{shared}=shared: needs one rank, not {ranks}; an engine cannot compute with sharded weights")
    if ranks > 1 and config.deterministic and config.engine.placement == "server":
        why = "requests of several ranks reach a server in an order that varies, and with it the rounding"
        lines.append(f"deterministic=true: needs a single rank with engine.placement: server, not {ranks}: {why}")
    if replicate is not None and ranks_per_node is not None and ranks <= ranks_per_node:
        lines.append(f"policy.replicate={replicate}: needs several nodes, and this run has one; leave it out")
    elif replicate is not None and ranks_per_node is not None and ranks % ranks_per_node:
        rule = f"every node needs the same number of ranks, but {ranks} is not a multiple of {ranks_per_node}"
        lines.append(f"policy.replicate={replicate}: {rule}")
    errors.raise_on(*lines)


def remarks(config: Config) -> list[str]:
    """Return notes about settings that are valid but have side effects."""
    engine, rollout, notes = config.engine, config.rollout, []
    defaults = {key: getattr(RolloutConfig(), key) for key in generation.RESHAPING}
    if changed := [f"rollout.{key}={own:g}" for key, old in defaults.items() if (own := getattr(rollout, key)) != old]:
        why = "the engine's log-probabilities alone are renormalised over the tokens it keeps"
        notes.append(f"{', '.join(changed)}: {why}; expect a larger sampler-trainer KL")
    if config.structured:
        why = "the engine's log-probabilities cover the tokens that the grammar allows, the trainer's all tokens"
        notes.append(f"environments: structured: true: {why}; loss.correction weights each token by the ratio")
    if (quantization := engine.args.get("quantization")) is not None:
        notes.append(f"engine.args.quantization={quantization}: the engine's weights differ from the policy's")
    if engine.kv_cache_memory_bytes is not None and engine.gpu_memory_utilization is not None:
        notes.append("engine.gpu_memory_utilization: ignored, because engine.kv_cache_memory_bytes is set")
    if config.policy.min_lr and config.policy.schedule == "constant":
        notes.append(f"policy.min_lr={config.policy.min_lr:g}: no effect, because policy.schedule is constant")
    tracking = config.tracking
    if tracking.wandb == "off" and tracking.wandb_project != type(tracking).model_fields["wandb_project"].default:
        notes.append(f"tracking.wandb_project={tracking.wandb_project}: no effect, because tracking.wandb is off")
    if config.deterministic and config.sync_frequency > 1:
        what = f"deterministic: true with sync_frequency={config.sync_frequency}"
        notes.append(f"{what}: a run that a signal stops between two syncs does not repeat the uninterrupted run")
    played = {source.type for source in config.environments} & {"agent", "episode"}
    if config.deterministic and played:
        why = "which turns are decoded together, and so the last bits, depend on how long tools take"
        notes.append(f"deterministic: true with type: {min(played)}: a resumed run may differ, because {why}")
    return [*notes, *config.evaluation.remarks(config.environments)]


def exposures(sources: Sequence[source_types.EnvironmentConfig]) -> Lines:
    """Yield a line for each server of a run that is reachable from other machines without a key."""
    for index, source in enumerate(sources):
        server = source.server if isinstance(source, AtroposSourceConfig) else None
        if server is not None and server.api_key_variable is None and not is_loopback(server.host):
            key = f"environments.{index}.server"
            rule = f"every machine that reaches port {server.port} can use the engines; set {key}.api_key_variable"
            yield f"{key}.host={server.host}: {rule}"


def _run_folder(output_dir: str, run_name: str) -> Lines:
    for key, value in (("output_dir", output_dir), ("run_name", run_name)):
        longest = max(value.split("/"), key=len)
        # Surrogates stand for bytes that are not UTF-8. The libraries that export a model cannot write such paths.
        invalid = any(character == "\0" or "\ud800" <= character <= "\udfff" for character in value)
        if invalid or len(longest.encode()) > MAX_NAME_BYTES:
            rule = f"each part of the path must be at most {MAX_NAME_BYTES} bytes of UTF-8, without NUL"
            yield f"{key}={value[:40]!r}{'...' * (len(value) > 40)}: {rule}"
    if run_name.startswith("/") or ".." in run_name.split("/"):
        yield f"run_name={run_name!r}: must be below output_dir={output_dir!r}, so no leading '/' and no '..'"


def _sizes(config: Config) -> Lines:
    """Yield a line for each length or number of steps that contradicts another setting."""
    policy, batch, checkpoint, hub = config.policy, config.batch, config.checkpoint, config.hub
    longest, ranks, size = config.max_sequence_tokens, policy.context_parallel, batch.max_tokens_per_micro_batch
    if size != "auto" and size * ranks < longest:
        whole = f"{_SEQUENCE}={longest}, the longest sequence"
        split = f"{-(-longest // ranks)}: {whole}, is split over policy.context_parallel={ranks} ranks"
        yield f"batch.max_tokens_per_micro_batch={size}: must be at least {whole if ranks == 1 else split}"
    if (limit := config.engine.max_model_len) is not None and limit < longest:
        rule = f"must be at least {_SEQUENCE}={longest}, or the engine would truncate completions"
        yield f"engine.max_model_len={limit}: {rule}"
    if (prompts := config.rollout.prompts_per_step) % batch.minibatches:
        rule = f"must divide rollout.prompts_per_step={prompts}, as a minibatch consists of whole groups"
        yield f"batch.minibatches={batch.minibatches}: {rule}"
    if policy.warmup_steps > (steps := config.optimizer_steps):
        rule = f"must be at most the run's {steps} optimizer steps, or the learning rate would never reach policy.lr"
        yield f"policy.warmup_steps={policy.warmup_steps}: {rule}"
    if config.deterministic and checkpoint.every % (sync := config.sync_frequency):
        rule = f"must be a multiple of sync_frequency={sync} with deterministic: true"
        yield f"checkpoint.every={checkpoint.every}: {rule}, because a resumed run begins with a weight sync"
    if checkpoint.export_merged and policy.lora is None:
        rule = "must be false without policy.lora, as final_model/ and step_N/ are whole models then"
        yield f"checkpoint.export_merged=true: {rule}"
    if hub is not None and not hub.every and not checkpoint.final:
        rule = "nothing would be pushed; set hub.every above 0, or checkpoint.final: true, whose final export is pushed"
        yield f"hub.repo={hub.repo}: {rule}"


def _shared_weights(setting: str, policy: PolicyConfig, engine: EngineConfig, sync: int) -> Lines:
    """setting: the setting that makes policy and engine share tensors."""
    if sync > 1:
        yield f"sync_frequency={sync}: must be 1 with {setting}: shared, where the engine has every update immediately"
    if policy.cpu_offload:
        yield f"policy.cpu_offload=true: must be false with {setting}: shared, whose weights stay on the device"
    if policy.has_4_bit_base:
        yield f"policy.lora.base_dtype=nf4: must be auto with {setting}: shared, whose weights have the engine's type"
    if engine.dtype not in ("auto", policy.compute_dtype):
        why = f"as engine and policy (policy.compute_dtype={policy.compute_dtype}) use the same tensors"
        yield f"engine.dtype={engine.dtype}: must be auto with {setting}: shared, {why}"
    if (quantization := engine.args.get("quantization")) is not None:
        yield f"engine.args.quantization={quantization}: not supported with {setting}: shared: its weights are trained"


def _engines(config: Config) -> Lines:
    """Yield a line for each setting that the place of the engines, or what they sample, excludes."""
    policy, opponent, stale = config.policy, config.opponent_model, config.rollout.max_staleness
    served, has_atropos = config.engine.placement == "server", config.atropos is not None
    if config.structured and config.loss.old_logprobs == "sampling":
        why = "where the engine's log-probabilities cover only the tokens that the grammar allows"
        yield f"loss.old_logprobs=sampling: must be trainer with structured: true, {why}"
    partly_frozen = policy.lora is not None or policy.train_layers is not None
    if config.weights == "shared" and partly_frozen and opponent not in (None, config.model):
        rule = "must be copied with an opponent of another model beside policy.lora or policy.train_layers"
        yield f"weights=shared: {rule}, because its frozen weights would stay in the engine"
    if served:
        yield from _servers(config.engine, config.weights, stale, policy)
    elif config.engine.urls:
        yield f"engine.urls={', '.join(config.engine.urls)}: must be empty unless engine.placement is server"
    if policy.routing_replay and served:
        yield "policy.routing_replay=true: needs engine.placement: colocated; a server does not send its routes"
    if policy.routing_replay and has_atropos:
        rule = "not possible with an atropos environment, whose rollouts come without the experts that the engine chose"
        yield f"policy.routing_replay=true: {rule}"
    if stale and not served:
        rule = "needs engine.placement: server; an engine inside a rank cannot generate while the rank trains"
        yield f"rollout.max_staleness={stale}: {rule}"
    if stale and config.deterministic:
        yield "deterministic=true: not possible with rollout.max_staleness=1: a resumed run begins with a fresh batch"
    if stale and has_atropos:
        yield "rollout.max_staleness=1: must be 0 with an atropos environment, which samples on its own time"
    types = {source.type for source in config.environments}
    excluded = {
        "engine.placement: server": served,
        "policy.routing_replay": policy.routing_replay,
        "sync_frequency above 1": config.sync_frequency > 1,
        "loss.correction.mode: off": config.loss.correction.mode == "off" and config.loss.old_logprobs == "trainer",
        "games and atropos environments": bool(types & {"turns", "atropos"}),
        "deterministic: true and conversations": config.deterministic and bool(types & {"episode", "agent"}),
    }
    if config.rollout.partial is not None:
        yield from (f"rollout.partial: not possible with {name}" for name, found in excluded.items() if found)
    if stale and (sync := config.sync_frequency) > 1:
        yield f"rollout.max_staleness=1: must be 0 with sync_frequency={sync}, whose rollouts are older than one step"


def _servers(engine: EngineConfig, weights: str, max_staleness: int, policy: PolicyConfig) -> Lines:
    if weights == "shared":
        yield "weights=shared: must be copied with engine.placement: server; there, engine.bridge: shared is the same"
    if engine.bridge == "adapter" and (policy.lora is None or policy.has_4_bit_base):
        yield "engine.bridge=adapter: needs policy.lora with base_dtype: auto; otherwise use broadcast or restart"
    if engine.bridge == "shared" and (len(engine.urls) > 1 or engine.tensor_parallel_size > 1):
        found = f"{max(len(engine.urls), 1)} of {engine.tensor_parallel_size}"
        why = "FSDP2 shards every layer by rows, tensor parallelism some by columns"
        yield f"engine.bridge=shared: needs one server of one GPU, not {found}: {why}"
    if engine.bridge == "shared" and max_staleness:
        yield "rollout.max_staleness=1: must be 0 with engine.bridge: shared, where an update changes both at once"


def _environments(config: Config) -> Lines:
    """Yield a line for each contradiction among environments, or between them and other settings."""
    sources, rollout, per_engine = config.environments, config.rollout, config.ranks_per_engine
    found = [source for source in sources if isinstance(source, AtroposSourceConfig)]
    if len(found) > 1:
        yield f"environments: {len(found)} entries of type atropos; connect all environments to the server of one"
    if found:
        yield from _atropos(found[0], rollout, per_engine, config.deterministic)
    share, prompts = config.atropos_share, rollout.prompts_per_step
    is_whole = abs(share - round(share)) <= 1e-6 and 1 <= round(share) < prompts
    if found and len(sources) > 1 and not is_whole:
        gets = f"gives it {share:.4g} of rollout.prompts_per_step={prompts}"
        rule = "it and the other entries need a whole number of prompts, at least 1"
        yield f"environments: weight={found[0].weight:g} of the atropos entry {gets}; {rule}"
    entries = {f"environments.{index}": source for index, source in enumerate(sources)}
    entries |= {f"evaluation.sets.{i}.source": entry.source for i, entry in enumerate(config.evaluation.sets)}
    for key, source in entries.items():
        if not source_types.is_rewarded(source) and not config.loss.kl.coef:
            yield f"{key}.rewards: no reward counts, and loss.kl.coef=0, so nothing would be trained; name a reward"
        if per_engine > 1 and isinstance(source, source_types.EpisodeSourceConfig | source_types.AgentSourceConfig):
            why = "because the ranks of an engine would have to submit every turn at the same step"
            yield f"{key}.type={source.type}: needs engine.tensor_parallel_size=1, not {per_engine}, {why}"
    own, kl = config.model, config.loss.kl
    is_own = kl.model is None or (Path(kl.model) == Path(own.name) and own.revision is None)
    if kl.coef and is_own and not config.is_rewarded:
        rule = "is the trained model, and no reward counts, so nothing would change; name a teacher"
        yield f"loss.kl.model={kl.model or 'null'}: {rule}"
    if (kept := config.evaluation.keep_best) == evaluation.HELD_OUT and not config.is_rewarded:
        yield f"evaluation.keep_best={kept}: no environment has a reward that counts; name a metric of a set"
    yield from _opponents(sources, bool(found), config.engine.placement == "server")
    yield from _dynamic_sampling(sources, rollout)


def _atropos(source: AtroposSourceConfig, rollout: RolloutConfig, ranks_per_engine: int, deterministic: bool) -> Lines:
    if ranks_per_engine > 1:
        rule = "must be 1 with an atropos environment, whose requests arrive at each engine at different times"
        yield f"engine.tensor_parallel_size={ranks_per_engine}: {rule}"
    if rollout.generation == "replicated":
        yield "rollout.generation=replicated: must be sharded with an atropos environment; each request is sampled once"
    if deterministic:
        yield "deterministic=true: not possible with an atropos environment, which decides what is sampled and when"
    ports = [source.server.port, *source.server.more_ports]
    if len(set(ports)) < len(ports):
        yield f"environments: atropos: server: port and more_ports repeat a port: {', '.join(map(str, ports))}"


def _opponents(sources: Sequence[source_types.EnvironmentConfig], has_atropos: bool, served: bool) -> Lines:
    games = {i: source for i, source in enumerate(sources) if isinstance(source, source_types.TurnsSourceConfig)}
    first = next((game.opponent for game in games.values() if game.opponent is not None), None)
    for index, game in games.items():
        if game.opponent is not None and has_atropos:
            yield f"environments.{index}.opponent: not possible beside an atropos entry, whose requests it would answer"
        if game.opponent is not None and game.opponent != first:
            yield f"environments.{index}.opponent: must equal the opponent of the other entries; a run has only one"
        players = game.args.get("players")
        if game.opponent is None and isinstance(players, list) and source_types.FROZEN in players:
            rule = f"{source_types.FROZEN!r} needs a model; set environments.{index}.opponent: {{name: initial}}"
            yield f"environments.{index}.args.players: {rule}"
    if served and first is not None:
        yield "environments: opponent: needs engine.placement: colocated, whose engine holds a second set of weights"


def _dynamic_sampling(sources: Sequence[source_types.EnvironmentConfig], rollout: RolloutConfig) -> Lines:
    """Yield a line for each source whose prompts the run cannot replace or skip: the source draws its own prompts."""
    for index, source in enumerate(sources):
        if not isinstance(source, AtroposSourceConfig | source_types.TurnsSourceConfig):
            continue
        entry, why = f"environments.{index} of type {source.type}", "where each turn continues a game;"
        if isinstance(source, AtroposSourceConfig):
            why = "whose environments decide what is sampled; filter there, or"
        if rollout.resample is not None:
            yield f"rollout.resample: not possible with {entry}, {why} set rollout.resample: null"
        if rollout.skip_solved is not None:
            rule = "whose prompts are not drawn from a list; set rollout.skip_solved: null"
            yield f"rollout.skip_solved: not possible with {entry}, {rule}"
