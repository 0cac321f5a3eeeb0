"""Agents that sample over HTTP from a fake engine, in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from colocated_grpo.environments.agents.programs import Agent, AgentEpisode, OpenEpisodes
from colocated_grpo.environments.base import AgentLimits
from colocated_grpo.environments.chat import ChatCodec
from colocated_grpo.rollout.collect import Collector
from colocated_grpo.rollout.engine import Request, Sampling
from colocated_grpo.rollout.episodes import EpisodeRunner
from colocated_grpo.rollout.inbox import Driver, Inbox
from colocated_grpo.rollout.prompt_queue import Job, dynamic_dispatch
from colocated_grpo.servers.agent_app import listen_for_agents
from colocated_grpo.servers.text import Limits, TextCodec
from colocated_grpo.tools.make_model import build_char_tokenizer
from colocated_grpo.types import Completion, Group, Prompt
from tests.support.fakes import FakeEngine
from tests.support.ranks import single_rank_world

TOKENIZER = build_char_tokenizer()
END = TOKENIZER.eos_token_id
SOURCE = "agent"


def says(*texts: str) -> Callable[[Request, int], Completion]:
    """Return a function that answers an episode's requests with these texts in order; the last one is repeated."""
    return says_tokens(*([*TOKENIZER.encode(text, add_special_tokens=False), END] for text in texts))


def says_tokens(*answers: Sequence[int]) -> Callable[[Request, int], Completion]:
    def complete(request: Request, policy_version: int) -> Completion:
        turn = request.key[3]
        tokens = list(answers[min(turn, len(answers) - 1)])
        cut = tokens[: request.sampling.max_tokens]
        # A different number for each token of the run, so that a misaligned one is seen.
        logprobs = [-(1 + request.key[1] + 0.1 * turn + 0.001 * place) for place in range(len(cut))]
        reason = "stop" if len(cut) == len(tokens) else "length"
        return Completion(
            token_ids=cut, sampling_logprobs=logprobs, finish_reason=reason, policy_version=policy_version
        )

    return complete


class AgentRun:
    """The episodes of one agent over a fake engine, with the real server and collector."""

    def __init__(
        self,
        agent: Agent,
        complete: Callable[[Request, int], Completion],
        *,
        tokenizer: PreTrainedTokenizerFast = TOKENIZER,
        tool_timeout: float = 120.0,
        max_tokens: int = 256,
        max_requests: int = 16,
        max_running: int = 8,
        decode_steps: Callable[[Request], int] | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.engine = FakeEngine(complete=complete, decode_steps=decode_steps)
        self.endpoint = OpenEpisodes()
        limits = Limits(
            max_tokens=max_tokens, longest_token=13, vocab_size=len(tokenizer), stop_token_ids=(END,), seed=0
        )
        codec = TextCodec(copy.deepcopy(tokenizer), limits, {})
        self.server = listen_for_agents(self.endpoint, codec, "policy")
        inbox, world = Inbox(), single_rank_world()
        runner = EpisodeRunner(
            {SOURCE: AgentEpisode(agent, self.endpoint)},
            ChatCodec(tokenizer),
            inbox,
            seed=0,
            tool_timeout=tool_timeout,
            agents={SOURCE: AgentLimits(max_tokens=max_tokens, max_requests=max_requests, max_running=max_running)},
        )
        self.collector = Collector(
            Driver(self.engine, inbox),
            runner,
            {},
            str,
            world,
            dynamic_dispatch(world.store, world.size),
            seed=0,
            reward_workers=1,
            reward_timeout=120.0,
            stop_requested=stop_requested,
        )

    def collect(self, prompts: int = 1, group_size: int = 1) -> list[Group]:
        items = [{"prompt": f"p{index}", "number": index, "answer": f"p{index}!"} for index in range(prompts)]
        return self.collect_items(items, group_size)

    def collect_items(self, items: Sequence[Mapping[str, Any]], group_size: int = 1) -> list[Group]:
        sampling = Sampling(temperature=0.7, max_tokens=128)
        job = Job(name="train/0", prompts=[prompt_of(item) for item in items], group_size=group_size, sampling=sampling)
        return self.collector.collect(job)

    def close(self) -> None:
        self.collector.close()
        self.server.close()

    def __enter__(self) -> AgentRun:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def prompt_of(item: Mapping[str, Any]) -> Prompt:
    """Return the prompt of an item whose "prompt" is text or one message."""
    prompt = item["prompt"]
    text = f"<|user|>{prompt if isinstance(prompt, str) else prompt[0]['content']}<|end|><|assistant|>"
    token_ids = TOKENIZER.encode(text)
    return Prompt(index=item["number"], token_ids=token_ids, text=text, item=dict(item), source=SOURCE)
