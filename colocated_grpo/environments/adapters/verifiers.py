"""Tasksets of verifiers 0.4, whose tasks supply prompts and rewards.

The policy answers single-turn tasks directly, as in the rest of this project. Tasks with tools, and tasks whose hooks
or rewards need a runtime, are played by the library's own agent. This agent samples at the address of the episode, and
the library runs everything except sampling: tool servers, hooks, limits and rewards. An agent runs a program, called a
harness. The default harness here is a loop of chat requests and tool calls in this process. The library's own harnesses
prepare an environment for each program with `uv`, which needs network access.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import cache, wraps
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from pydantic import Field

from colocated_grpo.environments.adapters.verifiers_tasks import (
    KEY,
    VerifiersTasks,
    messages_of,
    result_of,
    validated,
)
from colocated_grpo.environments.agents.programs import Access, AgentFailed, AgentTasks
from colocated_grpo.environments.base import EnvironmentSetupError, Episode, Item, Split
from colocated_grpo.environments.chat import Conversation
from colocated_grpo.environments.user_code.event_loops import enter_for_loop
from colocated_grpo.environments.user_code.loading import import_optional
from colocated_grpo.settings.base import Section
from colocated_grpo.types import JsonObject

if TYPE_CHECKING:
    from verifiers.v1 import Agent, AgentConfig, Trace

MODEL = "policy"
LOCAL = {"type": "subprocess"}
"""Runtime without a sandbox. The library's default is a paid cloud runtime."""
SET_BY_THE_RUN = ("model", "client")


class VerifiersAgent:
    """Tasks that an agent plays. Raises EnvironmentSetupError if the agent's settings do not fit the tasks."""

    def __init__(self, tasks: VerifiersTasks, settings: Verifiers) -> None:
        self.max_requests, self.max_running = settings.max_requests, settings.max_running
        self._tasks = tasks
        self._config = _agent_config(tasks, settings.agent or {}, settings.max_turn_tokens)
        self._shared_tools = SharedTools(tasks, self._config.runtime)
        # The library warns about each request that does not fit the context. Such requests are expected here.
        logging.getLogger("verifiers.v1").setLevel(logging.ERROR)
        # Imported here, because an import during the first episode would block the event loop of all episodes for
        # seconds.
        import_optional("mcp.client.streamable_http", "mcp", KEY)
        _check_fit(self._config, tasks)
        tasks.make_importable_for_servers()

    def prompts(self, seed: int, split: Split) -> Iterator[Item]:
        return self._tasks.prompts(seed, split)

    async def play(self, item: Item, access: Access) -> dict[str, float]:
        """Run the agent on a task and return its score.

        Raises AgentFailed with the error that ended the agent.
        """
        from verifiers.v1 import EvalClientConfig

        # The key is sent as basic authentication, because the library reads bearer keys from an environment variable.
        url = urlsplit(access.base_url)
        address = url._replace(netloc=f"agent:{access.api_key}@{url.netloc}").geturl()
        agent = _agent(self._config, EvalClientConfig(base_url=address, api_key_var=""))
        trace = await agent.run(self._tasks.task_of(item), tools=await self._shared_tools.running())
        if not trace.ok:
            raise AgentFailed(f"{trace.last_error.type}: {trace.last_error.message}")
        return result_of(trace)


class SharedTools:
    """Tool servers of a taskset, used by all its episodes. The first episode starts the servers.

    The servers stop with the event loop of the episodes. The kernel also kills them when the thread of the loop ends.
    """

    def __init__(self, tasks: VerifiersTasks, runtime: object) -> None:
        """runtime: the library's settings of the agents' runtime. Tools are tunnelled to a remote runtime."""
        self._tasks = tasks
        self._runtime = runtime
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
        self._servers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, object]] = WeakKeyDictionary()

    async def running(self) -> dict[str, object]:
        """Return the servers by name, in the form that the library's agent expects."""
        from verifiers.v1.mcp import serve_shared
        from verifiers.v1.runtimes import runtime_is_local

        loop = asyncio.get_running_loop()
        async with self._locks.setdefault(loop, asyncio.Lock()):
            if loop not in self._servers:
                toolsets = self._tasks.taskset.toolsets(self._tasks.settings)
                self._servers[loop] = await enter_for_loop(serve_shared(toolsets, runtime_is_local(self._runtime)))
        return self._servers[loop]


def _agent_config(tasks: VerifiersTasks, settings: JsonObject, max_turn_tokens: int | None) -> AgentConfig:
    """Return the settings as the library's AgentConfig, with the defaults of this project."""
    from verifiers.v1 import AgentConfig
    from verifiers.v1.utils.loaders import default_harness_id

    for name in SET_BY_THE_RUN:
        if name in settings:
            raise EnvironmentSetupError(f"{KEY}: args.agent.{name}: the agent samples from the policy; remove it")
    if isinstance(settings.get("harness"), dict) and "id" not in settings["harness"]:
        # Without an id, the library would use its default harness, which gives the model a shell.
        raise EnvironmentSetupError(f'{KEY}: args.agent.harness.id: required, such as {{id: "null"}}')
    if max_turn_tokens is not None:
        sampling = settings.get("sampling") or {}
        if "max_tokens" in sampling:
            raise EnvironmentSetupError(f"{KEY}: args.agent.sampling.max_tokens: max_turn_tokens sets it; remove one")
        settings = {**settings, "sampling": {**sampling, "max_tokens": max_turn_tokens}}
    if default_harness_id(tasks.name) == tasks.name:
        settings = {"harness": {"id": tasks.name}, **settings}  # the taskset comes with a harness of its own
    config = validated(AgentConfig, {"runtime": LOCAL, **settings}, "args.agent", "the agent")
    return config.model_copy(update={"model": MODEL})


def _agent(config: AgentConfig, client: object = None) -> Agent:
    """Return the library's agent with its harness. client: used for sampling; None to inspect the harness only."""
    from verifiers.v1 import Agent, HarnessConfig

    agent = Agent(config.model_copy(update={"client": client}))
    if config.harness is None:
        agent.harness = _chat_harness()(HarnessConfig(id="chat"))
    return agent


def _check_fit(config: AgentConfig, tasks: VerifiersTasks) -> None:
    """Raise EnvironmentSetupError if harness, runtime and tasks do not fit each other."""
    from verifiers.v1.utils.compile import resolve_runtime_config, validate_pairing

    if config.harness is None and config.runtime.type != LOCAL["type"]:
        raise EnvironmentSetupError(
            f"{KEY}: args.agent.runtime.type={config.runtime.type}: the default harness runs in the rank; name one "
            'that runs there, such as args.agent.harness: {id: "null"}'
        )
    try:
        agent = _agent(config)
        runtime = resolve_runtime_config(config.runtime, tasks.first)
        toolsets = [*tasks.taskset.toolsets(tasks.settings), *tasks.first.toolsets(tasks.first.config)]
        validate_pairing(agent.harness, tasks.task_type, runtime, tools=toolsets)
    except (ValueError, ModuleNotFoundError) as error:
        raise EnvironmentSetupError(f"{KEY}: args.agent: {' '.join(str(error).split())}") from None


@cache
def _chat_harness() -> type:
    """Return the class of the default harness.

    The class is defined here, because its base class is in the library, which is imported on use.
    """
    from verifiers.v1 import Harness, HarnessConfig, ProgramResult

    class ChatHarness(Harness[HarnessConfig]):
        """Chat requests and tool calls until an answer has no tool call, as the library's harness `null`."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
        ) -> Any:
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            await _converse(endpoint, secret, ctx.model, servers, messages_of(data))
            return ProgramResult(exit_code=0, stdout="", stderr="")

    return ChatHarness


async def _converse(
    base_url: str, api_key: str, model: str, servers: dict[str, JsonObject], messages: list[Any]
) -> None:
    """Request completions and run their tool calls, until a completion has none or the context is exhausted.

    servers: tool servers by name. messages: the prompt, extended in place.
    """
    from openai import APIStatusError, AsyncOpenAI, omit
    from verifiers.v1.harnesses.utils.compaction import is_context_overflow
    from verifiers.v1.harnesses.utils.mcp import connect_mcp

    async with AsyncExitStack() as stack:
        # No timeout: completions wait for the engine, and rollout.tool_timeout limits everything else.
        client = await stack.enter_async_context(
            AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None, max_retries=0)
        )
        tools, names, connections = await connect_mcp({"mcpServers": servers}, stack)
        while True:
            try:
                response = await client.chat.completions.create(model=model, messages=messages, tools=tools or omit)
            except APIStatusError as error:
                if is_context_overflow(error):
                    return
                raise
            message = response.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return
            for call in message.tool_calls:
                messages.append(await _result_of_call(call, names, connections))


async def _result_of_call(call: Any, names: dict[str, object], connections: dict[str, object]) -> JsonObject:
    """Run a tool call and return the tool's message, or an error message if the tool does not exist."""
    from verifiers.v1.harnesses.utils.compaction import bound_tool_message
    from verifiers.v1.harnesses.utils.mcp import call_mcp

    name = call.function.name
    if name in names:
        content = await call_mcp(connections, names, name, json.loads(call.function.arguments))
    else:
        content = f"error: unknown tool {name!r}"
    return bound_tool_message({"role": "tool", "tool_call_id": call.id, "name": name, "content": content})


LIMITS = ("max_requests", "max_running")


class Verifiers(Section):
    """Reward: the weighted sum of the task's rewards. Each reward and metric of the task is a part of the score."""

    taskset: str
    """Id of the taskset: the name of its package, which is installed or in the working directory."""
    config: JsonObject = {}
    """Settings of the taskset."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Maximum tokens of an answer. null: as many as fit."""
    agent: JsonObject | None = None
    """Settings of verifiers' agent, as under `[env.agent]` in its own configs. If given, even as {}, the agent plays
    the tasks. null: the agent plays only tasks that need an agent, with its default settings."""
    max_requests: int = Field(64, ge=1)
    """Maximum completions of one agent."""
    max_running: int = Field(32, ge=1)
    """Maximum agents that run at the same time on one rank."""

    def episode(self) -> Episode | AgentTasks:
        """Load the taskset. Raises EnvironmentSetupError."""
        tasks = VerifiersTasks(self.taskset, self.config)
        if self.agent is not None or tasks.has_tools or tasks.needs_runtime:
            return VerifiersAgent(tasks, self)
        for name in LIMITS:
            if name in self.model_fields_set:
                raise EnvironmentSetupError(f"{KEY}: args.{name}: taskset {self.taskset!r} needs no agent; remove it")
        return SingleTurn(tasks, self.max_turn_tokens)


@wraps(Verifiers, updated=())  # settings are checked against the signature of Verifiers
def build_verifiers(**args: Any) -> Episode | AgentTasks:
    return Verifiers(**args).episode()


class SingleTurn:
    """Tasks that the policy answers directly."""

    def __init__(self, tasks: VerifiersTasks, max_turn_tokens: int | None) -> None:
        self._tasks = tasks
        self._max_turn_tokens = max_turn_tokens

    def prompts(self, seed: int, split: Split) -> Iterator[Item]:
        return self._tasks.prompts(seed, split)

    async def run(self, item: Item, model: Conversation) -> dict[str, float]:
        task = self._tasks.task_of(item)
        turn = await model.generate(self._max_turn_tokens)
        trace = _trace(task, item["prompt"], turn.text)
        await task.score(trace)
        return result_of(trace)


def _trace(task: Any, prompt: list[JsonObject], answer: str) -> Trace:
    """Return the conversation in the form that the library's rewards read."""
    from verifiers.v1 import AgentConfig, AgentInfo, MessageNode, Trace, TraceTask
    from verifiers.v1.dialects.chat import parse_message

    messages = [*prompt, {"role": "assistant", "content": answer}]
    nodes = [
        MessageNode(message=parse_message(message), parent=index - 1 if index else None, sampled=index == len(prompt))
        for index, message in enumerate(messages)
    ]
    trace_task = TraceTask(type=type(task).__name__, data=task.data, key=task.key)
    return Trace(task=trace_task, agent=AgentInfo(config=AgentConfig()), nodes=nodes, is_completed=True)
