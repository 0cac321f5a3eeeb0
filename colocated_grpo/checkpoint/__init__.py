"""Atomic checkpoints with checksums. Reading them runs no code."""
