"""HTTP building blocks for untrusted peers: bounded request bodies, a server thread, a JSON client."""
