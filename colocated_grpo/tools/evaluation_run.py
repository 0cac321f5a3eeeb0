"""Engines and evaluation without a trainer, for `tools.evaluate`."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import ceil
from pathlib import Path

from colocated_grpo.assembly.data import build_collector, build_data, listen_to_agents
from colocated_grpo.assembly.engines import Site, engine_spec
from colocated_grpo.errors import ConfigError, RunError
from colocated_grpo.evaluation.evaluator import Evaluator
from colocated_grpo.policy.model_files import read_model_files
from colocated_grpo.rollout.collect import Stopped
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.rollout.vllm.vllm_engine import VLLMEngine
from colocated_grpo.runtime import distributed, joining
from colocated_grpo.servers.control_routes import check_adapter
from colocated_grpo.settings.schema import Config
from colocated_grpo.tracking import files, records
from colocated_grpo.types import JsonObject


def evaluate(evaluator: Evaluator) -> JsonObject:
    """Run all evaluations, and return the results by set. Collective."""
    results: JsonObject = {}
    for each in evaluator.due(0):
        metrics, groups = evaluator.evaluate(0, each)
        results[each.name] = {
            "prompts": len(groups),
            "samples": each.samples,
            "metrics": metrics,
            "completions": [
                records.rollout_row(files.EVALUATION, 0, group, sample, None)
                for group in groups
                for sample in range(len(group.rollouts))
            ],
        }
    return results


@contextmanager
def prepare_evaluation(config: Config, adapter: Path | None) -> Generator[tuple[Evaluator, VLLMEngine]]:
    """Read all prompts, and start the engine. Collective. Raises ConfigError or RunError. config: of `with_subject`."""
    joined = joining.join()
    world, stop = distributed.init_world(joined.store), joined.stop
    stop.listen()
    site = Site(world=world, stop=stop, note=print, resources=ExitStack())
    model = read_model_files(config.model, world)
    data = build_data(config, model, site, trains=False)
    if not any(each.prompts for each in data.sets):
        raise ConfigError("evaluation: there are no prompts; set held_out or eval_split, or add evaluation.sets")
    listen_to_agents(config, data, model, site)
    engines = world.size // config.engine.tensor_parallel_size
    # One engine's part of the completions of the largest set.
    sequences = max(ceil(len(each.prompts) / engines) * each.samples for each in data.sets)
    spec = engine_spec(config, model.folder, world.size, world.device, sequences)
    engine = VLLMEngine(replace(spec, reads_weights=True), world)
    if adapter is not None:
        try:
            check_adapter(model.folder, str(adapter))
            engine.adapters.load(adapter.name, str(adapter))
        except ValueError as error:
            raise RunError(str(error)) from None
    inbox = Inbox()
    collector = build_collector(config, Driver(engine, inbox), inbox, data, model, site)
    try:
        yield Evaluator(data.sets, collector, world), engine
    except Stopped:
        raise RunError("stopped by a signal") from None
    site.resources.close()
    joined.watchdog.close()
    world.barrier()
