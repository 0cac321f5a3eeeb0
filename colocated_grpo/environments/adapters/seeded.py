"""Base classes of the adapters' episodes: items built from a seed, and environments stepped by actions."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from itertools import count
from random import Random

from pydantic import Field

from colocated_grpo.environments.base import Item, Split
from colocated_grpo.environments.chat import ContextExhausted, Conversation
from colocated_grpo.settings.base import Section

Step = Callable[[str], Awaitable[tuple[str, float, bool]]]
"""Plays a reply of the policy. Returns the next observation, the reward, and whether the episode is over. Raises
InvalidReply."""


class SeededEpisode(Section):
    """Episode with an endless stream of items. A resumed run can start at any position.

    Building an item may take a whole game or a request to a server, so earlier items are skipped rather than rebuilt.
    """

    def prompts(self, seed: int, split: Split) -> Iterator[Item]:
        return self.prompts_from(seed, split, 0)

    def prompts_from(self, seed: int, split: Split, start: int) -> Iterator[Item]:
        return (self._item(Random(f"{seed}/{split}/{number}"), split) for number in count(start))

    def _item(self, rng: Random, split: Split) -> Item:
        raise NotImplementedError


def draw_seed(rng: Random, split: Split) -> int:
    """Return an even seed for training and an odd seed for held-out items, so that no run trains on held-out items."""
    return 2 * rng.randrange(2**30) + (split == "held_out")


class InvalidReply(Exception):
    """The reply contains no valid action. The message is shown to the policy, which may try again."""


class SteppedEpisode(SeededEpisode):
    """Reward: the sum of the steps' rewards, plus `invalid_reward` for each reply without a valid action."""

    max_turns: int = Field(50, ge=1)
    """Maximum turns of the policy in an episode."""
    max_turn_tokens: int = Field(64, ge=1)
    """Maximum tokens of one turn of the policy."""
    invalid_reward: float = Field(-1.0, le=0)
    """Reward of a reply without a valid action. If every step has a cost, 0 would make an invalid reply better than a
    valid reply."""

    async def _play(self, model: Conversation, step: Step, *, over: bool = False) -> dict[str, float]:
        text, earned, invalid = "", 0.0, 0
        with suppress(ContextExhausted):
            while not over and model.turns < self.max_turns:
                if model.turns:
                    model.observe(text)
                reply = (await model.generate(self.max_turn_tokens)).text
                try:
                    text, reward, over = await step(reply)
                    earned += reward
                except InvalidReply as error:
                    invalid += 1
                    text = str(error)
        return {
            "reward": earned + self.invalid_reward * invalid,
            "return": earned,
            "invalid": invalid / max(model.turns, 1),
            "finished": float(over),
        }
