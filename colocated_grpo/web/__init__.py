"""HTTP that does not trust its peers: bodies with a limit, servers in a thread, a small JSON client."""
