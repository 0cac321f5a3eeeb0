"""The address at which the agents of this rank sample."""

from __future__ import annotations

import copy

from transformers import PreTrainedTokenizerBase

from colocated_grpo.environments.agents.endpoint import Endpoint
from colocated_grpo.servers.agent_app import create_agent_app
from colocated_grpo.servers.text import Limits, TextCodec
from colocated_grpo.settings.schema import Config
from colocated_grpo.web.server import ServerThread

HOST = "127.0.0.1"


def listen_for_agents(
    endpoint: Endpoint, config: Config, tokenizer: PreTrainedTokenizerBase, limits: Limits
) -> ServerThread:
    """Start the server on a free port, and write its address into `endpoint`."""
    # A copy, because tokenizers are not thread-safe.
    codec = TextCodec(copy.deepcopy(tokenizer), limits, config.model.chat_template_kwargs)
    app = create_agent_app(endpoint, codec, config.model.name, limits.max_tokens, config.rollout.stop)
    server = ServerThread(app, HOST, [0])
    endpoint.url = f"http://{HOST}:{server.ports[0]}"
    return server
