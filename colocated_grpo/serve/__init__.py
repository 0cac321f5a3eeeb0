"""An engine in a process of its own, over HTTP: `python -m colocated_grpo.serve MODEL`."""
