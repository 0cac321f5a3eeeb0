"""Writes a config for a data file, a model and a number of GPUs, with a comment that explains each choice."""
