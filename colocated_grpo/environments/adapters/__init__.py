"""Adapters for environments of other libraries, which are imported when a config names them."""
