"""torchrun as the launcher starts it: its flags, its agent, and no word where a rank has told what was wrong.

Otherwise an error of one line would stand below forty about the process that met it.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.run import parse_args, run

from colocated_grpo.cli import RUN_ERROR, VERDICT_VARIABLE

AGENT = "torch.distributed.elastic.multiprocessing.api"
"""The logger that says how each process ended."""


@record
def main() -> None:
    logging.getLogger(AGENT).addFilter(lambda _: not told())
    try:
        run(parse_args(sys.argv[1:]))
    except ChildFailedError:
        if told():
            sys.exit(RUN_ERROR)
        raise


def told() -> bool:
    """Whether a rank of this node has left its words for the launcher."""
    return VERDICT_VARIABLE in os.environ and Path(os.environ[VERDICT_VARIABLE]).exists()


if __name__ == "__main__":
    main()
