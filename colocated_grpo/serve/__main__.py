"""Entry point: `python -m colocated_grpo.serve MODEL --port 9001`."""

import os
import sys
import traceback
from contextlib import suppress

from colocated_grpo.launch.cli import RUN_ERROR
from colocated_grpo.serve.command import main

try:
    code = main()
except SystemExit:  # raised by argparse for --help and for invalid arguments
    raise
except Exception:
    traceback.print_exc()
    code = RUN_ERROR
for stream in (sys.stdout, sys.stderr):
    with suppress(OSError, AttributeError, ValueError):
        stream.flush()
os._exit(code)  # the teardown of torch and vLLM could abort the process and hide its exit code
