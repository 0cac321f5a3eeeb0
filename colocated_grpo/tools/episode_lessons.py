"""Whole conversations as lessons: a teacher plays the episodes, the student reads and learns the teacher's turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from random import Random
from typing import Any, Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from colocated_grpo.environments.base import Episode, Split
from colocated_grpo.environments.chat import ChatCodec, Message, plain_text
from colocated_grpo.environments.conversation import ContextExhausted, Conversation
from colocated_grpo.environments.rewards.scoring import as_score
from colocated_grpo.tools.warm_start import IGNORED, Lesson, WarmStart, encoded_prompts, probes, sample
from colocated_grpo.types import Completion, Prompt, Score

NO_SCORE = Score(reward=None)


class TaughtEpisode(Episode, Protocol):
    def teach(self, item: dict[str, Any], observations: Sequence[str]) -> str:
        """The right next turn after these observations."""


class EpisodeLessons:
    """`Lessons` of an episode that has a teacher. The teacher's calls are right; slips are in the labels alone.

    A wrong call would be answered by the tools, and the student would learn how conversations go wrong.
    """

    def __init__(self, episode: TaughtEpisode, tokenizer: PreTrainedTokenizerFast, settings: WarmStart) -> None:
        self._episode = episode
        self._tokenizer = tokenizer
        self._settings = settings
        self._codec = ChatCodec(tokenizer)
        self._prompts = encoded_prompts(episode, tokenizer, settings.seed, "train")
        self._slips = Random(settings.seed)

    def take(self, count: int) -> list[Lesson]:
        return asyncio.run(self._taught(list(islice(self._prompts, count))))

    async def _taught(self, prompts: Sequence[Prompt]) -> list[Lesson]:
        return [await self._lesson(prompt) for prompt in prompts]

    async def _lesson(self, prompt: Prompt) -> Lesson:
        conversation = _Taught(self._episode, prompt, self._codec, self._tokenizer, self._settings)
        await self._episode.run(prompt.item, conversation)
        rollout = conversation.rollout(NO_SCORE, temperature=1.0)
        labels = [
            self._label(token) if sampled else IGNORED
            for token, sampled in zip(rollout.token_ids, rollout.loss_mask, strict=True)
        ]
        return rollout.token_ids, labels

    def _label(self, token: int) -> int:
        slip = token != self._tokenizer.eos_token_id and self._slips.random() < self._settings.slips
        return self._slips.choice(self._tokenizer.encode("0123456789")) if slip else token

    def sampled_reward(self, model: PreTrainedModel, split: Split, count: int) -> float:
        prompts = probes(self._episode, self._tokenizer, self._settings.seed, split, count)
        scores = asyncio.run(self._played(model, prompts))
        return sum(score.reward or 0.0 for score in scores) / len(scores)

    async def _played(self, model: PreTrainedModel, prompts: Sequence[Prompt]) -> list[Score]:
        together = _Together(len(prompts), partial(sample, model, self._tokenizer))
        return await asyncio.gather(*(self._play(prompt, together) for prompt in prompts))

    async def _play(self, prompt: Prompt, together: _Together) -> Score:
        conversation = Conversation(prompt, self._codec, self._settings.max_completion_tokens, together.sample)
        try:
            return as_score(await self._episode.run(prompt.item, conversation))
        except ContextExhausted:
            return NO_SCORE
        finally:
            together.leave()


class _Taught(Conversation):
    """A conversation in which the teacher speaks for the policy."""

    def __init__(
        self,
        episode: TaughtEpisode,
        prompt: Prompt,
        codec: ChatCodec,
        tokenizer: PreTrainedTokenizerFast,
        settings: WarmStart,
    ) -> None:
        super().__init__(prompt, codec, settings.max_completion_tokens, self._speak)
        self._episode = episode
        self._item = prompt.item
        self._tokenizer = tokenizer
        self._observations: list[str] = []

    def observe(self, messages: str | Sequence[Message]) -> None:
        super().observe(messages)
        self._observations.append(plain_text(messages))

    async def _speak(self, _token_ids: list[int], _max_tokens: int) -> Completion:
        said = self._tokenizer.encode(self._episode.teach(self._item, self._observations))
        said.append(self._tokenizer.eos_token_id)
        return _completion(said, "stop")


class _Together:
    """Turns of many conversations, sampled in one batch as soon as all of them wait for one."""

    def __init__(self, playing: int, sample: Callable[[Sequence[list[int]], int], list[list[int]]]) -> None:
        self._playing = playing
        self._sample = sample
        self._waiting: list[tuple[list[int], int, asyncio.Future[Completion]]] = []

    async def sample(self, token_ids: list[int], max_tokens: int) -> Completion:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((token_ids, max_tokens, turn))
        self._sample_if_complete()
        return await turn

    def leave(self) -> None:
        self._playing -= 1
        self._sample_if_complete()

    def _sample_if_complete(self) -> None:
        if not self._waiting or len(self._waiting) < self._playing:
            return
        waiting, self._waiting = self._waiting, []
        said = self._sample([token_ids for token_ids, _, _ in waiting], max(most for _, most, _ in waiting))
        for (_, most, turn), token_ids in zip(waiting, said, strict=True):
            turn.set_result(_completion(token_ids[:most], "stop" if len(token_ids) <= most else "length"))


def _completion(token_ids: list[int], finish_reason: str) -> Completion:
    unknown = [0.0] * len(token_ids)
    return Completion(token_ids=token_ids, sampling_logprobs=unknown, finish_reason=finish_reason, policy_version=0)
