"""No client's groups keep those of others from the trainer."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colocated_grpo.atropos.exchange import (
    MAX_ENVIRONMENTS,
    MAX_PARTS,
    PATIENCE,
    EnvRegistration,
    Exchange,
    InvalidGroup,
    QueueFull,
    ScoredGroup,
    UnknownEnvironment,
    choose_batch,
)
from colocated_grpo.atropos.reader import Registration


def trainer(batch_size: int) -> Registration:
    return Registration(
        wandb_group="",
        wandb_project="",
        batch_size=batch_size,
        max_token_len=64,
        checkpoint_dir="",
        save_checkpoint_interval=1,
        starting_step=0,
        num_steps=1,
    )


def started(batch_size: int = 64, *, sequences: int = 1 << 20, num_bytes: int = 1 << 30) -> Exchange:
    """Return an exchange whose trainer has registered and asked for a batch."""
    exchange = Exchange(sequences, num_bytes)
    exchange.register(trainer(batch_size))
    assert exchange.batch() is None
    return exchange


def group(size: int, env_id: int | None = None, mark: str = "") -> ScoredGroup:
    return ScoredGroup(size, env_id, (mark.encode(),))


def add_env(exchange: Exchange, group_size: int, **changes: Any) -> int:
    settings = EnvRegistration(max_token_length=64, desired_name="toy", weight=1.0, group_size=group_size, **changes)
    return exchange.register_env(settings)["env_id"]


def num_batches(exchange: Exchange) -> int:
    count = 0
    while exchange.batch() is not None:
        count += 1
    return count


def test_a_group_larger_than_a_batch_is_refused_and_the_others_are_served():
    exchange = started(64)
    with pytest.raises(
        InvalidGroup, match=r"a group of 65 sequences can never be served: .* use a group size that div"
    ):
        exchange.post([group(65)])
    for _ in range(200):
        exchange.post([group(8)])
    assert num_batches(exchange) == 25


@pytest.mark.parametrize("size", [3, 48, 63])
def test_a_group_whose_size_does_not_divide_the_batch_is_refused(size):
    with pytest.raises(InvalidGroup, match="can never be served"):
        started(64).post([group(size)])


def test_a_group_posted_before_the_batch_size_was_known_blocks_no_others():
    exchange = Exchange(1 << 20, 1 << 30)
    for size in (65, 8, 3):
        exchange.post([group(size)])
    exchange.register(trainer(64))
    assert exchange.status()["queue_size"] == 1
    for _ in range(7):
        exchange.post([group(8)])
    assert num_batches(exchange) == 1


def test_an_environment_whose_groups_fit_no_batch_cannot_register():
    with pytest.raises(InvalidGroup, match="a group of 65 sequences"):
        add_env(started(64), 65)


def test_a_group_larger_than_its_environment_has_registered_is_refused():
    exchange = started(64)
    env = add_env(exchange, 4)
    with pytest.raises(InvalidGroup, match=r"a group of 8 sequences .* has registered a group size of 4"):
        exchange.post([group(8, env)])


def test_one_group_of_a_larger_size_does_not_hold_back_smaller_ones():
    """In atroposlib no pack of six consists of fours, so the six blocks them."""
    exchange = started(12)
    exchange.post([group(6)])
    for _ in range(3):
        exchange.post([group(4)])
    assert num_batches(exchange) == 1
    exchange.post([group(6)])
    assert num_batches(exchange) == 1


@given(
    sizes=st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]), max_size=60),
    batch_size=st.sampled_from([12, 24, 48]),
)
@settings(max_examples=300)
def test_whatever_waits_enough_groups_of_one_size_are_served(sizes, batch_size):
    waiting = [size for size in sizes if batch_size % size == 0]
    chosen = choose_batch(waiting, [None] * len(waiting), batch_size, {})
    total = sum(waiting[position] for position in chosen)
    assert total == batch_size if any(waiting.count(s) * s >= batch_size for s in waiting) else total in (0, batch_size)


def test_incomplete_groups_do_not_fill_the_queue_for_others():
    exchange = started(8, sequences=64)
    env = add_env(exchange, 8)
    for _ in range(12):
        exchange.post([group(5, env)])
    exchange.post([group(8, mark="whole")])
    assert num_batches(exchange) == 1
    for _ in range(8):
        exchange.post([group(8)])
    with pytest.raises(QueueFull, match="64 sequences are waiting"):
        exchange.post([group(8)])


@given(
    cuts=st.lists(st.sets(st.integers(1, 7)).map(sorted), min_size=8, max_size=24),
    allocation=st.sampled_from([None, 0.5]),
)
@settings(max_examples=100)
def test_parts_of_any_sizes_that_add_up_to_a_group_are_served_together(cuts, allocation):
    """Each group of 8 is posted in parts, which begin at its cuts."""
    exchange = started(64)
    env = add_env(exchange, 8, min_batch_allocation=allocation)
    for number, inner in enumerate(cuts):
        for begin, end in pairwise([0, *inner, 8]):
            exchange.post([group(end - begin, env, str(number))])
    batches = list(iter(exchange.batch, None))
    assert len(batches) == len(cuts) // 8
    for batch in batches:
        assert [group.size for group in batch] == [8] * 8
        assert all(len(set(group.texts)) == 1 for group in batch), "parts of the same group"
        assert len({group.texts[0] for group in batch}) == 8


def test_many_groups_in_parts_do_not_hold_back_others():
    """More than the part of the queue that is searched for a batch."""
    exchange = started(64)
    in_parts, whole = add_env(exchange, 8), add_env(exchange, 8)
    for _ in range(600):
        for size in (3, 5):
            exchange.post([group(size, in_parts)])
    assert num_batches(exchange) == 75
    for _ in range(8):
        exchange.post([group(8, whole)])
    assert num_batches(exchange) == 1


def test_an_environment_paces_itself_by_whole_groups():
    exchange = started(64)
    env, other = add_env(exchange, 8), add_env(exchange, 8)
    for size in (3, 5):
        exchange.post([group(size, env)])
    status = exchange.status_env(other)
    assert (status["queue_size"], status["max_group_size"]) == (1, 8)
    assert exchange.status_env(env)["self_queue_size"] == 1


def test_an_environment_keeps_the_newest_of_its_incomplete_groups():
    exchange = started(64)
    env = add_env(exchange, 64)
    for _ in range(MAX_PARTS):
        exchange.post([group(33, env)])
    assert exchange.post([group(33, env)])[0] == {"status": "buffered", "buffer_size": MAX_PARTS * 33}


def test_the_queue_is_bounded_in_bytes_too():
    exchange = started(64, num_bytes=100)
    exchange.post([group(8, mark="a" * 60)])
    with pytest.raises(QueueFull, match="60 bytes are waiting for the trainer; the limit is 100"):
        exchange.post([group(8, mark="a" * 60)])


def test_what_has_been_served_no_longer_counts():
    exchange = started(8, sequences=8)
    for _ in range(3):
        exchange.post([group(8)])
        assert num_batches(exchange) == 1


@pytest.mark.parametrize("num_groups", [0, 1])
def test_an_environment_without_new_groups_does_not_keep_its_reserved_part(num_groups):
    """It may have been killed, or never have had a group; asking for its status does not prolong the reservation."""
    exchange = started(8)
    reserved, other = add_env(exchange, 4, min_batch_allocation=1.0), add_env(exchange, 4)
    for _ in range(num_groups):
        exchange.post([group(4, reserved)])
    for _ in range(2):
        exchange.post([group(4, other)])
    requests = 0
    while exchange.batch() is None:
        exchange.status_env(reserved)
        requests += 1
    assert requests == 0, "a batch is made of any groups that wait"
    exchange.post([group(4, other)] * 2)
    while exchange.batch() is None:
        exchange.status_env(reserved)
        exchange.post([group(3, reserved)])  # parts that never add up to a group
        requests += 1
        assert requests <= PATIENCE * num_groups


def test_registrations_of_strangers_lock_no_environment_out():
    """Before, the server refused every registration after 16,384 until it was started again."""
    exchange = started(8)
    env = add_env(exchange, 8)
    exchange.post([group(3, env)])
    for _ in range(3 * MAX_ENVIRONMENTS):
        add_env(exchange, 4)
        exchange.status_env(env)  # as an environment asks ten times a second
    assert exchange.post([group(5, env)])[0]["buffer_size"] == 0, "it has kept its parts"
    assert num_batches(exchange) == 1
    newcomer = add_env(exchange, 8)
    exchange.post([group(8, newcomer)])
    assert num_batches(exchange) == 1
    with pytest.raises(UnknownEnvironment, match="register again"):
        exchange.status_env(env + 1)


def test_parts_of_a_forgotten_environment_leave_the_queue():
    exchange = started(8, sequences=8)
    exchange.post([group(5, add_env(exchange, 8))])
    for _ in range(MAX_ENVIRONMENTS):
        add_env(exchange, 4)
    exchange.post([group(8)])
    assert num_batches(exchange) == 1


def test_a_long_queue_is_served_in_time_linear_in_its_length():
    exchange = started(8)
    for _ in range(50_000):
        exchange.post([group(1)])
    start = time.process_time()
    assert num_batches(exchange) == 6250
    assert time.process_time() - start < 20, "quadratic time takes minutes"
