import os
import sys
import traceback
from contextlib import suppress

from colocated_grpo.launch.cli import RUN_ERROR, main

try:
    code = main()
except SystemExit:  # of the parser of arguments
    raise
except BaseException:  # torch's CheckpointException is no Exception
    traceback.print_exc()
    code = RUN_ERROR
# Not sys.exit: a reward that never returns has a thread that Python would wait for, and the process group of a rank
# that gives up would abort while it is torn down and hide the exit code.
for stream in (sys.stdout, sys.stderr):
    # Its terminal is gone, there never was one, or user code has closed it.
    with suppress(OSError, AttributeError, ValueError):
        stream.flush()
os._exit(code)
