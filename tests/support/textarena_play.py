"""Textarena in self-play: environments, and whole steps of a training source."""

from __future__ import annotations

import pickle
import random
import re
from dataclasses import replace

import pytest

from colocated_grpo.environments.adapters.textarena_turns import TextArenaTurns
from colocated_grpo.environments.build import build_environments
from colocated_grpo.settings import Config
from colocated_grpo.tools.char_tokenizer import build_char_tokenizer
from colocated_grpo.types import Completion, Group
from tests.support.small_policy import rollout_of

TOKENIZER = build_char_tokenizer()
TIC_TAC_TOE = {"game": "TicTacToe-v0", "games": 2}
MAFIA = {"game": "SecretMafia-v0", "games": 2, "seats": 6, "options": {"discussion_rounds": 1}}
POKER = {"game": "KuhnPoker-v0", "games": 2, "players": ["policy", "random"]}
GAMES = [TIC_TAC_TOE, MAFIA, POKER]
WIN_OF_FIRST = ["[0]", "[3]", "[1]", "[4]", "[2]"]
DRAW = ["[0]", "[4]", "[8]", "[1]", "[7]", "[6]", "[2]", "[5]", "[3]"]

per_game = pytest.mark.parametrize("args", GAMES, ids=lambda args: args["game"])


def arena(seed: int = 0, **args) -> TextArenaTurns:
    return TextArenaTurns(seed, **{**TIC_TAC_TOE, "games": 1, **args})


def built(args: dict, seed: int = 0, max_prompt_tokens: int = 9000, **entry):
    game = {"type": "turns", "name": f"textarena:{args['game']}", "commit": "random"}
    entry = {**game, "args": {key: value for key, value in args.items() if key != "game"}, **entry}
    rollout = {"max_prompt_tokens": max_prompt_tokens}
    config = Config(model={"name": "none"}, environments=[entry], seed=seed, rollout=rollout)
    return build_environments(config, TOKENIZER)


def replies_to(prompt) -> list[str]:
    """Return replies that depend on the prompt alone: moves that the game has shown, and an invalid one."""
    rng = random.Random(prompt.text)
    shown = re.findall(r"\[\w+\]", prompt.text.split("Available Moves:")[-1])
    return [*(rng.choice(shown or ["[0]"]) for _ in range(3)), rng.choice(["I know.", "", "<think>[0] or"])]


def judged(made, prompt) -> Group:
    """Return the scored group of a prompt, as another rank sends it back."""
    prompt, texts = pickle.loads(pickle.dumps(prompt)), replies_to(prompt)
    completion = Completion(token_ids=[5], sampling_logprobs=[-1.0], finish_reason="stop", policy_version=0)
    scores = made.scorers[prompt.source].score(prompt, [completion] * len(texts), texts)
    rollouts = [replace(rollout_of([1], [5, 6]), text=t, score=s) for t, s in zip(texts, scores, strict=True)]
    return Group(prompt=prompt, rollouts=rollouts)


def play(made, source, steps: int, n: int = 3) -> list[tuple]:
    """Run steps of `n` prompts; return (prompts, result) of each."""
    history = []
    for _ in range(steps):
        groups = [judged(made, prompt) for prompt in source.next(n)]
        history.append(([group.prompt for group in groups], source.record(groups)))
    return history


def commit_all(environment: TextArenaTurns, moves: list[str]) -> list[tuple[int, str, float]]:
    """Play moves in the environment's only game; return (seat, turn id, immediate reward) of each."""
    history = []
    for move in moves:
        [turn] = environment.next_batch()
        [outcome] = environment.score(turn, [move])
        environment.commit(turn, move)
        history.append((turn.seat, turn.id, outcome.reward))
    return history


def totals(environment: TextArenaTurns, moves: list[str]) -> list[tuple[int, float]]:
    """Play a whole game; return (seat, immediate reward plus return) of each move."""
    history = commit_all(environment, moves)
    returns = {each.turn_id: each.value for each in environment.drain_returns()}
    assert returns.keys() == {turn for _, turn, _ in history}
    return [(seat, reward + returns[turn]) for seat, turn, reward in history]
