"""Atropos: training on groups from environments in other processes, which sample from this run's engines."""
