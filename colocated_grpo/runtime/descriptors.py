"""How many files and connections this process may have open."""

import resource

DESCRIPTORS = 65_536
"""More than connections and files of a run together."""


def allow_descriptors() -> None:
    """As many as the system lets this process have: held connections would leave none for a checkpoint.

    Most systems start a process with 1,024, which episodes and rewards that call services can hold at a time.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections() -> int:
    """Clients may hold so many; the rest is left for files and for what the run itself connects to."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (DESCRIPTORS if soft == resource.RLIM_INFINITY else soft) * 3 // 4
