"""GRPO and its relatives with an in-process vLLM engine beside every FSDP2 shard."""

__version__ = "0.1.0"
