#!/usr/bin/env python3
"""Start a co-located GRPO run on this machine. `--help` lists the flags."""

import sys

from colocated_grpo.launch.launcher import main

if __name__ == "__main__":
    sys.exit(main())
