import os
import sys

from colocated_grpo.cli import main

code = main()
if code:
    # A rank that gives up leaves its process group as it is; tearing that down would abort and hide the exit code.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
