"""The limit on open files and connections of this process. Standard library only: ranks and servers import it first."""

import resource

DESCRIPTORS = 65_536
"""Requested soft limit: more than all connections and files of one run."""


def raise_descriptor_limit() -> None:
    """Raise the soft limit to `DESCRIPTORS`, or to the hard limit where that is lower.

    Most systems start a process with 1,024. Episodes and rewards that call services can use all of them, and then no
    checkpoint can be written.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_client_connections() -> int:
    """Return how many connections a server may accept: three quarters of the limit. The rest is for the run."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (DESCRIPTORS if soft == resource.RLIM_INFINITY else soft) * 3 // 4
