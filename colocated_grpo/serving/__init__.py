"""The co-located engine over HTTP, for environments in other processes."""
