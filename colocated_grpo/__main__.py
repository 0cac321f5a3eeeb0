import sys

from colocated_grpo.cli import main

sys.exit(main())
