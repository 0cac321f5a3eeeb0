"""An Atropos environment that rewards sorting digits. It works with any Atropos trainer."""

import random

from atroposlib.envs.base import BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.envs.server_handling.server_manager import APIServerConfig


class SortingEnv(BaseEnv):
    name = "sorting"

    @classmethod
    def config_init(cls):
        # A list, because with a bare APIServerConfig Atropos ignores --openai.base_url and uses ports 9004 to 9007.
        return BaseEnvConfig(), [APIServerConfig(server_type="vllm")]

    async def setup(self):
        self.random = random.Random(0)

    async def get_next_item(self):
        return "".join(self.random.choices("0123456789", k=self.random.randint(4, 8)))

    async def collect_trajectories(self, digits):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            chat = await managed.chat_completion(
                messages=[{"role": "user", "content": f"sort {digits}"}],
                n=self.config.group_size,
                max_tokens=16,
                temperature=1.0,
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for node, choice in zip(nodes, chat.choices, strict=True):
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(score(choice.message.content, "".join(sorted(digits))))
        return group, []

    async def evaluate(self, *args, **kwargs):
        pass


def score(answer: str, expected: str) -> float:
    """Return 1.0 for the sorted digits, else half the fraction of correct positions."""
    if answer == expected:
        return 1.0
    return 0.5 * sum(a == b for a, b in zip(answer, expected, strict=False)) / len(expected)


if __name__ == "__main__":
    SortingEnv.cli()
