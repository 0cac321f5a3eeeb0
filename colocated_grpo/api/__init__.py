"""Training from a Python program: `from colocated_grpo import Trainer`. See docs/guides/python.md."""
