"""`tools` and `environment_factory` of TRL's GRPOTrainer, as an episode of colocated_grpo.

episode = TRLEpisode(train_dataset=dataset, reward_funcs=[right], tools=[search])
Trainer(model, args=args, environments=[{"type": "episode", "name": episode}]).train()
"""

import asyncio
import inspect
import itertools
import random
import threading

from transformers.utils import get_json_schema

from colocated_grpo.environments import ContextExhausted
from colocated_grpo.environments.rewards.builtin import read_calls
from colocated_grpo.environments.rewards.scoring import sets_alarm

RESERVED = ("reset", "get_reward")


class TRLEpisode:
    def __init__(
        self,
        train_dataset=None,
        reward_funcs=(),
        tools=(),
        environment_factory=None,
        reward_weights=None,
        max_tool_calling_iterations=None,
        held_out=8,
    ):
        """Take what the script gives to GRPOTrainer and GRPOConfig. held_out: rows at the end that are evaluated."""
        if train_dataset is not None and held_out >= len(train_dataset):
            raise ValueError(f"held_out={held_out}: must be below the number of rows, {len(train_dataset)}")
        self.rows = train_dataset
        self.functions = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        self.weights = reward_weights or [1.0] * len(self.functions)
        self.tools = list(tools)
        self.factory = environment_factory
        self.most_calls = max_tool_calling_iterations
        self.held_out = held_out
        self.seeding = threading.Lock()

    def prompts(self, seed, split):
        """Yield the rows. The text that the environment's reset() returns is appended to the last message."""
        for number, row in enumerate(self._rows(split)):
            item = {"prompt": [{"role": "user", "content": ""}], **row, "seed": f"{seed}/{split}/{number}"}
            environment, item["text"] = self._begin(item, row)
            if item["text"] is not None:
                prompt = item["prompt"]
                *earlier, last = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
                item["prompt"] = [*earlier, {**last, "content": last["content"] + item["text"]}]
            item["tools"] = [get_json_schema(tool) for tool in self._tools(environment).values()]
            yield {**item, "row": row}

    async def run(self, item, model):
        environment, text = await asyncio.to_thread(self._begin, item, item["row"])
        if text != item["text"]:
            raise RuntimeError("reset() returned another text than for the prompt: it must depend on `random` alone")
        messages, token_ids = [], []
        try:
            for turn in itertools.count():
                message = await model.generate()
                token_ids += message.token_ids
                calls = read_calls(message.text) or []
                content = message.text.partition("<tool_call>")[0] if calls else message.text
                called = {"tool_calls": [{"type": "function", "function": call} for call in calls]} if calls else {}
                messages.append({"role": "assistant", "content": content, **called})
                if not calls or turn == self.most_calls:
                    break
                results = [await self._call(self._tools(environment), call) for call in calls]
                model.observe(results)
                messages += results
        except ContextExhausted:
            pass  # scored as it is
        return await self._score(item, messages, token_ids, environment)

    def _rows(self, split):
        if self.rows is None:
            return itertools.repeat({})
        first_held_out = len(self.rows) - self.held_out
        numbers = range(first_held_out) if split == "train" else range(first_held_out, len(self.rows))
        return (dict(self.rows[number]) for number in numbers)

    def _begin(self, item, row):
        """Return a new environment and what its reset() returns: the same for all completions of a prompt."""
        if self.factory is None:
            return None, None
        environment = self.factory()
        with self.seeding:
            state = random.getstate()
            random.seed(item["seed"])
            try:
                text = environment.reset(**row)
            finally:
                random.setstate(state)
        return environment, text

    def _tools(self, environment):
        methods = [] if environment is None else inspect.getmembers(environment, inspect.ismethod)
        own = {name: method for name, method in methods if not name.startswith("_") and name not in RESERVED}
        return {tool.__name__: tool for tool in self.tools} | own

    async def _call(self, tools, call):
        name, arguments = call["name"], call["arguments"]
        try:
            if name not in tools:
                raise ValueError(f"Tool {name} not found.")
            result = await _result(tools[name], **arguments)
        except Exception as error:
            if sets_alarm(error):  # a timeout that fails in a thread: no call can succeed
                raise
            result = {"error": str(error)}
        return {"role": "tool", "name": name, "content": str(result)}

    async def _score(self, item, messages, token_ids, environment):
        columns = {name: [value] for name, value in item["row"].items() if name != "prompt"}
        given = {"prompts": [item["prompt"]], "completions": [messages], "completion_ids": [token_ids], **columns}
        given |= {} if environment is None else {"environments": [environment]}
        parts, total = {}, 0.0
        for function, weight in zip(self.functions, self.weights, strict=True):
            [reward] = await _result(function, **given)
            if reward is not None:
                parts[function.__name__] = reward
                total += weight * reward
        if hasattr(environment, "get_reward"):
            parts["get_reward"] = environment.get_reward()
            total += parts["get_reward"]
        return {"reward": total, **parts} if parts else None


async def _result(function, **arguments):
    """Call an async function here, and any other in a thread: all episodes share this event loop."""
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await asyncio.to_thread(function, **arguments)
