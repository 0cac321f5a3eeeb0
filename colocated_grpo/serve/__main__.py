"""Entry point: `python -m colocated_grpo.serve MODEL --port 9001`."""

import sys

from colocated_grpo.serve.command import main

sys.exit(main())
