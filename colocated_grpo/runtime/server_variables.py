"""Environment variables through which the launcher tells ranks of the engine servers that it has started."""

URLS_VARIABLE = "COLOCATED_GRPO_ENGINE_URLS"
"""Addresses of the servers, separated by spaces, for ranks whose config names none."""
KEY_VARIABLE = "COLOCATED_GRPO_ENGINE_API_KEY"
"""Their API key, new in each launch: other users of the machine can reach its ports."""
