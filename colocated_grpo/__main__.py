"""Entry point of one rank: `python -m colocated_grpo --config FILE`."""

import os
import sys
import traceback
from contextlib import suppress

from colocated_grpo.launch.cli import main
from colocated_grpo.runtime.verdict import RUN_ERROR

try:
    code = main()
except SystemExit:  # raised by argparse for --help and for invalid arguments
    raise
except BaseException:  # torch's CheckpointException does not derive from Exception
    traceback.print_exc()
    code = RUN_ERROR
# sys.exit would join the threads of rewards that never return. On a failing rank, tearing down the process group could
# also abort the process and hide its exit code.
for stream in (sys.stdout, sys.stderr):
    # The terminal may be closed, the stream None, or closed by user code.
    with suppress(OSError, AttributeError, ValueError):
        stream.flush()
os._exit(code)
