#!/usr/bin/env python3
"""Start a co-located GRPO run on this machine. `--help` lists the flags."""

import sys

from colocated_grpo import require_installation

if __name__ == "__main__":
    require_installation()
    from colocated_grpo.launch.launcher import main

    sys.exit(main())
