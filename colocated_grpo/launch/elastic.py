"""torchrun with its usual flags and agent, but silent if a rank has reported its error.

Plain torchrun would print forty lines about the failed process below the rank's error line.
"""

from __future__ import annotations

import logging
import signal
import sys

from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.run import parse_args, run

from colocated_grpo.runtime.signals import stop_signals
from colocated_grpo.runtime.verdict import RUN_ERROR, USAGE_ERROR, verdict_written

AGENT_LOGGER = "torch.distributed.elastic.multiprocessing.api"
"""Name of the logger that reports how each process ended."""


@record
def main() -> None:
    logging.getLogger(AGENT_LOGGER).addFilter(lambda _: not verdict_written())
    arguments = parse_args(sys.argv[1:])
    try:
        run(arguments)
    except ChildFailedError:
        if verdict_written():
            sys.exit(RUN_ERROR)
        raise
    except SignalException as stopped:  # raised after the agent has forwarded the signal and the ranks have exited
        sys.exit(128 + stopped.sigval)
    except DistNetworkError as error:
        in_use = "EADDRINUSE" in str(error)
        reason = "already in use; choose another port" if in_use else str(error).partition("\n")[0]
        address = f"--master-port={arguments.master_port} on --master-addr={arguments.master_addr}"
        print(f"error: {address}: {reason}", file=sys.stderr)
        sys.exit(USAGE_ERROR if in_use else RUN_ERROR)
    finally:
        # The ranks have exited. torch's handlers would raise SignalException while the interpreter shuts down.
        for number in stop_signals():
            signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
