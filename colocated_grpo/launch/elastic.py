"""torchrun as the launcher starts it: its flags, its agent, and no word where a rank has told what was wrong.

Otherwise an error of one line would stand below forty about the process that met it.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.run import parse_args, run

from colocated_grpo.launch.cli import RUN_ERROR, USAGE_ERROR, VERDICT_VARIABLE

AGENT = "torch.distributed.elastic.multiprocessing.api"
"""The logger that says how each process ended."""


@record
def main() -> None:
    logging.getLogger(AGENT).addFilter(lambda _: not told())
    arguments = parse_args(sys.argv[1:])
    try:
        run(arguments)
    except ChildFailedError:
        if told():
            sys.exit(RUN_ERROR)
        raise
    except SignalException as stopped:  # it has passed the signal on to the ranks and waited for them
        sys.exit(128 + stopped.sigval)
    except DistNetworkError as error:
        taken = "EADDRINUSE" in str(error)
        reason = "already in use" if taken else str(error).partition("\n")[0]
        place = f"--master-port={arguments.master_port} on --master-addr={arguments.master_addr}"
        print(f"error: {place}: {reason}", file=sys.stderr)
        sys.exit(USAGE_ERROR if taken else RUN_ERROR)


def told() -> bool:
    """Whether a rank of this node has left its words for the launcher."""
    return VERDICT_VARIABLE in os.environ and Path(os.environ[VERDICT_VARIABLE]).exists()


if __name__ == "__main__":
    main()
