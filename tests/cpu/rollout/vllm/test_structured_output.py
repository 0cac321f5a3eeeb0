"""Replies sampled within a grammar, beside free ones in the same engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from colocated_grpo.environments.build import build_environments
from colocated_grpo.environments.town.environment import TownEnvironment, TownSettings
from colocated_grpo.environments.town.state import Rules
from colocated_grpo.runtime.distributed import World
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.rules import check, remarks
from colocated_grpo.settings.schema import Config
from colocated_grpo.tools.make_model import build_char_tokenizer
from tests.support.engines import Pair, request_of
from tests.support.ranks import run_on_ranks
from tests.support.training_runs import tiny_model

TOKENIZER = build_char_tokenizer()
STOP = TOKENIZER.eos_token_id
TOWN = {"type": "turns", "name": "town", "structured": True, "args": {"rules": {"tool_calls": 0, "max_speech": 20}}}


def first_turns() -> list[Any]:
    rules = Rules(tool_calls=0, max_speech=20)
    environment = TownEnvironment(TownSettings(games=1, seed=3, prompts="brief", rules=rules))
    turns = []
    while len({turn.phase for turn in turns}) < 4:
        turn = environment.next_batch()[0]
        turns.append(turn)
        environment.play_on(turn)
    return turns


def sampled(world: World, folder: Path) -> dict[str, Any]:
    """Replies to turns within their patterns and free replies, together and apart."""
    pair = Pair(world, folder, environments=[TOWN], rollout={"max_prompt_tokens": 64, "max_completion_tokens": 512})
    pair.write()
    bound = [
        request_of(number, 50 + number, pattern=turn.pattern(), max_tokens=512, stop_token_ids=(STOP,))
        for number, turn in enumerate(first_turns())
    ]
    free = [request_of(100 + number, number, max_tokens=40, stop_token_ids=(STOP,)) for number in range(6)]
    together = pair.generate([*bound, *free])
    return {
        "bound": [TOKENIZER.decode(each.token_ids, skip_special_tokens=True) for each in together[: len(bound)]],
        "finished": [each.finish_reason for each in together[: len(bound)]],
        "logprobs": [each.sampling_logprobs for each in together[: len(bound)]],
        "free": [each.token_ids for each in together[len(bound) :]],
        "alone": [each.token_ids for each in pair.generate(free)],
    }


@pytest.fixture(scope="module")
def replies():
    [result] = run_on_ranks(sampled, 1, tiny_model(), timeout=300.0)
    return result


def test_a_random_model_gives_legal_replies_within_the_grammar(replies):
    environment = TownEnvironment(TownSettings())
    ended = 0
    for turn, text, finished in zip(first_turns(), replies["bound"], replies["finished"], strict=True):
        if finished == "stop":
            assert re.fullmatch(turn.pattern(), text)
            assert environment.score(turn, [text])[0].parts["legal_rate"] == 1.0
            ended += 1
    assert ended > len(replies["bound"]) / 2


def test_log_probabilities_are_over_what_the_grammar_allows(replies):
    """The first characters are fixed: nothing else could be sampled."""
    for logprobs in replies["logprobs"]:
        assert logprobs[: len("<think>")] == pytest.approx([0.0] * len("<think>"), abs=1e-6)
        assert min(logprobs) < -1


def test_free_completions_beside_structured_ones_are_unchanged(replies):
    assert replies["free"] == replies["alone"]


def test_a_turn_has_a_pattern_only_with_structured_true():
    for structured in (True, False):
        config = Config(model={"name": "none"}, environments=[{**TOWN, "structured": structured}])
        [prompt] = build_environments(config, TOKENIZER).open_source().next(1)
        assert (prompt.pattern is not None) == structured
        assert bool(remarks(config)) == structured


def test_a_ratio_between_different_sets_of_tokens_is_refused():
    config = Config(model={"name": "none"}, environments=[TOWN], loss={"type": "dapo", "old_logprobs": "sampling"})
    with pytest.raises(ConfigError, match="cover only the tokens that the grammar allows"):
        check(config)
