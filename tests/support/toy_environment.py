"""An Atropos environment as users write them: a BaseEnv subclass without any reference to this trainer.

python toy_environment.py serve --env.rollout_server_url http://... --openai.base_url http://.../v1 ...
"""

from __future__ import annotations

import itertools

from atroposlib.envs.base import BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.envs.server_handling.server_manager import APIServerConfig

TEMPERATURE = 0.8
MAX_TOKENS = 8


class ToyEnv(BaseEnv):
    """Rewards even tokens. With the name half-silent, every other group comes without inference_logprobs."""

    name = "toy"

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(), [APIServerConfig(base_url="http://localhost:1/v1", api_key="x", server_type="vllm")]

    async def setup(self):
        self.numbers, self.groups = itertools.count(), itertools.count()

    async def get_next_item(self):
        return f"sort {next(self.numbers) % 90 + 10}"

    async def evaluate(self, *args, **kwargs):
        pass

    async def collect_trajectories(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.completion(
                prompt=item, n=self.config.group_size, max_tokens=MAX_TOKENS, temperature=TEMPERATURE
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for node in nodes:
            sampled = [token for token in node.masked_tokens if token != -100]
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(sum(token % 2 == 0 for token in sampled) / len(sampled))
        if self.config.wandb_name == "half-silent" and next(self.groups) % 2:
            del group["inference_logprobs"]
        return group, []


if __name__ == "__main__":
    ToyEnv.cli()
