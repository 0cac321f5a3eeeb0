"""Atropos: training on groups that environments in other processes sample from this run's engines and score."""
