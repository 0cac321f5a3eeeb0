"""Warm start on multi-turn episodes: a scripted teacher plays them, and the model learns the teacher's turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from random import Random
from typing import Protocol, runtime_checkable

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from colocated_grpo.environments.base import Episode, Split
from colocated_grpo.environments.chat import ChatCodec, ContextExhausted, Conversation, Message, plain_text
from colocated_grpo.environments.rewards.scoring import as_score
from colocated_grpo.tools.warm_start import IGNORE_INDEX, Example, WarmStart, encoded_prompts, eval_prompts, sample
from colocated_grpo.types import Completion, FinishReason, JsonObject, Prompt, Score

NO_SCORE = Score(reward=None)


@runtime_checkable
class TeachableEpisode(Episode, Protocol):
    """An episode that can also produce the policy's turns."""

    def teach(self, item: JsonObject, observations: Sequence[str]) -> str:
        """Return the correct next turn after these observations."""
        ...


class EpisodeTeacher:
    """`Teacher` that plays an episode correctly and puts slips (random errors) into the training labels only.

    Tools would respond to a wrong call, and the model would then learn from a derailed conversation.
    """

    def __init__(self, episode: TeachableEpisode, tokenizer: PreTrainedTokenizerFast, settings: WarmStart) -> None:
        self._episode = episode
        self._tokenizer = tokenizer
        self._settings = settings
        self._codec = ChatCodec(tokenizer)
        self._prompts = encoded_prompts(episode, tokenizer, settings.seed, "train")
        self._rng = Random(settings.seed)

    def examples(self, count: int) -> list[Example]:
        return asyncio.run(self._examples(list(islice(self._prompts, count))))

    async def _examples(self, prompts: Sequence[Prompt]) -> list[Example]:
        return [await self._example(prompt) for prompt in prompts]

    async def _example(self, prompt: Prompt) -> Example:
        conversation = _TeacherConversation(self._episode, prompt, self._codec, self._tokenizer, self._settings)
        await self._episode.run(prompt.item, conversation)
        rollout = conversation.rollout(NO_SCORE, temperature=1.0)
        labels = [
            self._label(token) if sampled else IGNORE_INDEX
            for token, sampled in zip(rollout.token_ids, rollout.loss_mask, strict=True)
        ]
        return rollout.token_ids, labels

    def _label(self, token: int) -> int:
        slip = token != self._tokenizer.eos_token_id and self._rng.random() < self._settings.slips
        return self._rng.choice(self._tokenizer.encode("0123456789")) if slip else token

    def sampled_reward(self, model: PreTrainedModel, split: Split, count: int) -> float:
        prompts = eval_prompts(self._episode, self._tokenizer, self._settings.seed, split, count)
        scores = asyncio.run(self._play_all(model, prompts))
        return sum(score.reward or 0.0 for score in scores) / len(scores)

    async def _play_all(self, model: PreTrainedModel, prompts: Sequence[Prompt]) -> list[Score]:
        sampler = _BatchSampler(len(prompts), partial(sample, model, self._tokenizer))
        return await asyncio.gather(*(self._play(prompt, sampler) for prompt in prompts))

    async def _play(self, prompt: Prompt, sampler: _BatchSampler) -> Score:
        conversation = Conversation(prompt, self._codec, self._settings.max_completion_tokens, sampler.sample)
        try:
            return as_score(await self._episode.run(prompt.item, conversation))
        except ContextExhausted:
            return NO_SCORE
        finally:
            sampler.remove_conversation()


class _TeacherConversation(Conversation):
    """A conversation whose turns come from the teacher instead of a model."""

    def __init__(
        self,
        episode: TeachableEpisode,
        prompt: Prompt,
        codec: ChatCodec,
        tokenizer: PreTrainedTokenizerFast,
        settings: WarmStart,
    ) -> None:
        super().__init__(prompt, codec, settings.max_completion_tokens, self._teach)
        self._episode = episode
        self._item = prompt.item
        self._tokenizer = tokenizer
        self._observations: list[str] = []

    def observe(self, messages: str | Sequence[Message]) -> None:
        super().observe(messages)
        self._observations.append(plain_text(messages))

    async def _teach(self, _token_ids: list[int], _max_tokens: int) -> Completion:
        turn = self._tokenizer.encode(self._episode.teach(self._item, self._observations))
        return _completion([*turn, self._tokenizer.eos_token_id], "stop")


class _BatchSampler:
    """Sample the turns of many conversations in one batch, once every unfinished conversation has requested one."""

    def __init__(self, conversations: int, sample: Callable[[Sequence[list[int]], int], list[list[int]]]) -> None:
        self._unfinished = conversations
        self._sample = sample
        self._pending: list[tuple[list[int], int, asyncio.Future[Completion]]] = []

    async def sample(self, token_ids: list[int], max_tokens: int) -> Completion:
        turn = asyncio.get_running_loop().create_future()
        self._pending.append((token_ids, max_tokens, turn))
        self._sample_if_complete()
        return await turn

    def remove_conversation(self) -> None:
        self._unfinished -= 1
        self._sample_if_complete()

    def _sample_if_complete(self) -> None:
        if not self._pending or len(self._pending) < self._unfinished:
            return
        pending, self._pending = self._pending, []
        turns = self._sample([token_ids for token_ids, _, _ in pending], max(limit for _, limit, _ in pending))
        for (_, limit, turn), token_ids in zip(pending, turns, strict=True):
            turn.set_result(_completion(token_ids[:limit], "stop" if len(token_ids) <= limit else "length"))


def _completion(token_ids: list[int], finish_reason: FinishReason) -> Completion:
    unused = [0.0] * len(token_ids)
    return Completion(token_ids=token_ids, sampling_logprobs=unused, finish_reason=finish_reason, policy_version=0)
