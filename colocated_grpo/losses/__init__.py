"""Policy-gradient objectives over packed tokens. Pure: no torch.distributed, no vllm, no transformers."""
