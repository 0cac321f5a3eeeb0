"""Packing of groups and advantages into the micro-batches that each rank runs."""
