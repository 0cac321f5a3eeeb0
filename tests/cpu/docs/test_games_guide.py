"""The examples of the games guide work unchanged, and its numbers are right."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import yaml

from colocated_grpo.environments.base import BatchResult
from colocated_grpo.environments.build import build_environments
from colocated_grpo.environments.town.environment import TownEnvironment, TownSettings
from colocated_grpo.environments.town.state import Rules
from colocated_grpo.errors import RunError
from colocated_grpo.settings.schema import Config
from colocated_grpo.tools.make_model import build_char_tokenizer
from colocated_grpo.types import Completion, Group
from tests.support.paths import ROOT
from tests.support.small_policy import rollout_of

GUIDE = (ROOT / "docs/guides/games.md").read_text()
TOKENIZER = build_char_tokenizer()
TEXTS = ["2", "1", "3", "four"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


@pytest.fixture
def entry(tmp_path):
    """The config entry of the guide's own game, whose code is written to a file."""
    [code] = blocks("python")
    (tmp_path / "my_game.py").write_text(code)
    [text] = [block for block in blocks("yaml") if "my_game.py" in block]
    [entry] = yaml.safe_load(text)["environments"]
    return {**entry, "name": entry["name"].replace("my_game.py", str(tmp_path / "my_game.py"))}


def play(made, source, steps: int) -> list[BatchResult]:
    """Score the same four completions of every turn, and return how the source settled each step."""
    completion = Completion(token_ids=[5], sampling_logprobs=[-1.0], finish_reason="stop", policy_version=0)
    results = []
    for _ in range(steps):
        groups = []
        for prompt in source.next(3):
            scores = made.scorers[prompt.source].score(prompt, [completion] * len(TEXTS), TEXTS)
            rollouts = [replace(rollout_of([1], [2]), text=t, score=s) for t, s in zip(TEXTS, scores, strict=True)]
            groups.append(Group(prompt=prompt, rollouts=rollouts))
        results.append(source.record(groups))
    return results


def test_the_example_game_trains_and_resumes(entry):
    made = build_environments(Config(model={"name": "none"}, environments=[entry]), TOKENIZER)
    source = made.open_source()
    play(made, source, 4)
    state = json.loads(json.dumps(source.state_dict()))
    expected = play(made, source, 12)
    games = [game for result in expected for game in result.games]
    assert games
    assert all("takes" in game["transcript"] for game in games)
    rewards = [r.score.reward for result in expected for group in result.released for r in group.rollouts]
    assert {0.0, 1.0, 2.0} <= set(rewards), "the winner's two sticks, legal ones, and four"
    resumed = made.open_source()
    resumed.load_state_dict(state)
    assert play(made, resumed, 12) == expected
    assert made.held_out(5)


def test_the_example_game_has_no_grammar_and_one_line_says_so(entry):
    config = Config(model={"name": "none"}, environments=[entry | {"structured": True}])
    made = build_environments(config, TOKENIZER)
    with pytest.raises(RunError, match=r"Sticks': pattern\(\) failed: AttributeError: .* no attribute 'pattern'$"):
        made.open_source().next(1)
    with pytest.raises(RunError, match=r"next_batch\(\), pattern\(\) or play_on\(\) failed: AttributeError: "):
        made.held_out(1)


def test_prompt_lengths_of_town_are_as_documented():
    [row] = [line for line in GUIDE.splitlines() if line.startswith("| `prompts`")]
    documented = [[int(n.replace(",", "")) for n in pair] for pair in re.findall(r"([\d,]+) to ([\d,]+)", row)]
    without_look_ups = Rules(tool_calls=0)
    brief = {"prompts": "brief", "rules": without_look_ups}
    variants = [{}, brief | {"memory": 4}, brief | {"memory": 1}]
    for (shortest, longest), variant in zip(documented, variants, strict=True):
        lengths = prompt_lengths(TownEnvironment(TownSettings(seed=1, **variant)), 1500)
        assert shortest <= min(lengths) < 1.1 * shortest
        assert 0.85 * longest < max(lengths) <= longest


def prompt_lengths(town: TownEnvironment, turns: int) -> list[int]:
    """Return the characters of each prompt, when every seat replies as the script does."""
    lengths = []
    for _ in range(turns):
        turn = town.next_batch()[0]
        lengths.append(sum(len(message["content"]) for message in turn.messages))
        town.commit(turn, town.advice(turn))
    return lengths


@pytest.mark.parametrize(
    "text", [block for block in blocks("yaml") if "my_game" not in block and "tossim" not in block]
)
def test_configs_of_the_guide_are_valid(text):
    config = Config.model_validate(yaml.safe_load(text))
    source = build_environments(config, TOKENIZER).open_source()
    assert sum(not prompt.by_opponent for prompt in source.next(4)) == 4


def test_the_tossim_entry_of_the_guide_is_valid():
    [text] = [block for block in blocks("yaml") if "tossim" in block]
    config = Config.model_validate(yaml.safe_load(text))
    assert config.environments[0].name == "tossim"
