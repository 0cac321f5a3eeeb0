"""A sync that has not brought the policy's bytes to the engine ends the run in the same step, whatever is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from colocated_grpo.errors import RunError
from colocated_grpo.metrics import Metrics
from colocated_grpo.runtime.distributed import World
from tests.support.engines import Pair
from tests.support.ranks import run_on_ranks
from tests.support.training_runs import tiny_model

TIMEOUT = 300.0
O_PROJ = "model.layers.1.self_attn.o_proj.weight"
LAYER = "model.layers.0."


def small_step(pair: Pair) -> None:
    """Take one step of AdamW at a learning rate at which most weights keep their 16-bit values."""
    torch.manual_seed(pair.policy.version)
    for parameter in pair.policy.parameters().values():
        parameter.grad = torch.randn_like(parameter)
    pair.policy.optimizer_step(Metrics(pair.world.device))


def engine_weights(pair: Pair) -> dict[str, torch.Tensor]:
    return {name: parameter.data for name, parameter in pair.engine.model.named_parameters()}


def with_former(pair: Pair, restore: Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], None]) -> None:
    """Let every later write be followed by `restore(weights, former weights)`."""
    from colocated_grpo.weights import colocated

    former = {name: weight.clone() for name, weight in engine_weights(pair).items()}
    write = colocated.buckets.write_planned

    def faulty(*arguments: Any) -> None:
        write(*arguments)
        restore(engine_weights(pair), former)

    colocated.buckets.write_planned = faulty


def stale_engine(pair: Pair) -> None:
    from colocated_grpo.weights import colocated

    colocated.buckets.write_planned = lambda gathered, plan, device: [None for _ in gathered]


def stale_layer(pair: Pair) -> None:
    def restore(weights: dict[str, torch.Tensor], former: dict[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            if name.startswith(LAYER):
                weight.copy_(former[name])

    with_former(pair, restore)


def stale_row(pair: Pair) -> None:
    """The last row that a small step changes in one matrix keeps its former values."""

    def restore(weights: dict[str, torch.Tensor], former: dict[str, torch.Tensor]) -> None:
        changed = (weights[O_PROJ] != former[O_PROJ]).any(dim=1).nonzero()
        weights[O_PROJ][changed[-1]] = former[O_PROJ][changed[-1]]

    with_former(pair, restore)


def stale_shard(pair: Pair) -> None:
    """The last rank contributes the rows of before."""
    from colocated_grpo.runtime.distributed import local_part
    from colocated_grpo.weights import colocated

    if pair.world.rank == pair.world.size - 1:
        former = {name: local_part(p).detach().clone() for name, p in pair.policy.weights.published().items()}
        gather = colocated.buckets.gather

        def faulty(bucket: Any, parameters: Any, *rest: Any) -> Any:
            current = {name: local_part(parameter).detach().clone() for name, parameter in parameters.items()}
            with torch.no_grad():
                for name, parameter in parameters.items():
                    local_part(parameter).copy_(former[name])
                gathered = gather(bucket, parameters, *rest)
                for name, parameter in parameters.items():
                    local_part(parameter).copy_(current[name])
            return gathered

        colocated.buckets.gather = faulty


def swapped_views(pair: Pair) -> None:
    """Keys are written where values belong."""
    from colocated_grpo.weights import colocated

    write = colocated.buckets.write_planned

    def faulty(gathered: Any, plan: Any, device: Any) -> None:
        write(gathered, plan, device)
        keys, values = (plan.targets[f"{LAYER}self_attn.{part}_proj.weight"].view for part in "kv")
        former = keys.clone()
        keys.copy_(values)
        values.copy_(former)

    colocated.buckets.write_planned = faulty


def replaced_parameter(pair: Pair) -> None:
    """vLLM computes with another tensor than the one that the plan writes."""
    for module in pair.engine.model.modules():
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.clone()
            return


FAULTS = {
    "stale engine": (stale_engine, ""),
    "stale layer": (stale_layer, LAYER),
    "stale row": (stale_row, O_PROJ),
    "stale shard": (stale_shard, ""),
    "swapped views": (swapped_views, f"{LAYER}self_attn.k_proj.weight"),
    "replaced parameter": (replaced_parameter, ""),
}


def errors_of(world: World, folder: Path, tensor_parallel: int) -> dict[str, str]:
    """Return the error of the first sync after each fault, by fault; of healthy syncs before, between and after too."""
    from colocated_grpo.weights import colocated

    healthy = colocated.buckets.write_planned, colocated.buckets.gather
    policy, engine = {"lr": 1e-6, "compute_dtype": "bfloat16"}, {"tensor_parallel_size": tensor_parallel}
    pair = Pair(world, folder, policy=policy, engine=engine)
    pair.write()
    assert pair.sync.plan is not None
    found: dict[str, str] = {}
    for fault, (inject, _) in FAULTS.items():
        if fault == "stale shard" and world.size == 1:
            continue
        inject(pair)
        small_step(pair)
        try:
            pair.write()
        except RunError as error:
            found[fault] = str(error)
        colocated.buckets.write_planned, colocated.buckets.gather = healthy
        if fault != "replaced parameter":  # the last one, which stays
            pair.write()
    pair.engine.close()
    return found


@pytest.mark.parametrize(("ranks", "tensor_parallel"), [(1, 1), (2, 1), (2, 2)])
def test_every_fault_of_a_planned_sync_ends_the_run_on_all_ranks(ranks, tensor_parallel):
    for errors in run_on_ranks(errors_of, ranks, tiny_model(), tensor_parallel, timeout=TIMEOUT):
        assert set(errors) == set(FAULTS) - ({"stale shard"} if ranks == 1 else set())
        for fault, line in errors.items():
            _, named = FAULTS[fault]
            assert line.startswith("weight sync: the engine does not hold the policy's bytes in "), line
            assert f"({named}" in line and "\n" not in line


def loaded(world: World, folder: Path) -> dict[str, Any]:
    """Faults of an engine that takes weights through its own loader."""
    pair = Pair(world, folder)
    pair.write()
    assert pair.sync.plan is None
    load, found = pair.engine.load_weights, {}

    def drops(chosen: Callable[[str], bool]) -> None:
        """Lose the chosen tensors of the next load of everything."""
        whole = [True]

        def faulty(weights: Any) -> None:
            tensors = list(weights)
            load(iter([pair for pair in tensors if not (whole[0] and chosen(pair[0]))] if whole[0] else tensors))
            whole[0] = False

        pair.engine.load_weights = faulty

    for fault, chosen in {"stale engine": lambda name: True, "stale block": lambda name: ".layers.1." in name}.items():
        pair.change_weights()
        drops(chosen)
        found[fault] = 0
        with pytest.raises(RunError, match=r"^weight sync: loading a block a second time changes \S+ in the engine of"):
            for _ in range(4):
                pair.write()
                found[fault] += 1
                drops(chosen)
        pair.engine.load_weights = load
        pair.write()
    pair.engine.close()
    return found


def test_an_engine_without_a_plan_reloads_one_block_after_each_sync():
    [found] = run_on_ranks(loaded, 1, tiny_model("qwen3_moe"), timeout=TIMEOUT)
    assert found["stale engine"] == 0, "found in the sync in which nothing arrived"
    assert found["stale block"] <= 2, "found when its turn comes, among two blocks and the rest"


def unpublished(world: World, folder: Path) -> str:
    """Change a master without casting it into the one copy of the weights that policy and engine use."""
    pair = Pair(world, folder, weights="shared")
    pair.write()
    with torch.no_grad():
        pair.policy.parameters()[O_PROJ][2, 3] += 0.01
    with pytest.raises(RunError) as caught:
        pair.write()
    pair.policy.weights.publish()
    pair.write()
    pair.engine.close()
    return str(caught.value)


def test_one_copy_of_the_weights_is_compared_with_the_masters():
    [line] = run_on_ranks(unpublished, 1, tiny_model(), timeout=TIMEOUT)
    assert f"bytes in 1 of 24 tensors ({O_PROJ})" in line


def checked(world: World, folder: Path, every: int) -> list[int]:
    from colocated_grpo.weights.transport import TransportCheck

    pair, calls, verify = Pair(world, folder, freshness={"every": every}), [], TransportCheck.verify
    for number in range(5):
        TransportCheck.verify = lambda self, number=number: (calls.append(number), verify(self))
        pair.write()
    pair.engine.close()
    return calls


@pytest.mark.parametrize(("every", "expected"), [(1, [0, 1, 2, 3, 4]), (3, [0, 3]), (0, [])])
def test_every_nth_sync_is_checked(every, expected):
    [calls] = run_on_ranks(checked, 1, tiny_model(), every, timeout=TIMEOUT)
    assert calls == expected
