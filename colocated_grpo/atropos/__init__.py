"""Atropos: groups that environments in other processes have sampled and scored, handed over by an API server."""
