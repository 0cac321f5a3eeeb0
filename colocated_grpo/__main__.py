"""Entry point of one rank: `python -m colocated_grpo --config FILE`."""

import traceback

from colocated_grpo.launch.cli import main
from colocated_grpo.runtime.verdict import RUN_ERROR, end_process

try:
    code = main()
except SystemExit:  # raised by argparse for --help and for invalid arguments
    raise
except BaseException:  # torch's CheckpointException does not derive from Exception
    traceback.print_exc()
    code = RUN_ERROR
end_process(code)
