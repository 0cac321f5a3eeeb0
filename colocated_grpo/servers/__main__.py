"""Entry point: `python -m colocated_grpo.servers MODEL --port 9001`."""

import sys

from colocated_grpo.servers.command import main

sys.exit(main())
