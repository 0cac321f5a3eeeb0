"""Adapters for environments of other libraries. A library is imported only if a config names its adapter."""
