import os

from colocated_grpo.launch.cli import BRIEF_SPINS

os.environ.update({**BRIEF_SPINS, **os.environ})  # before torch is imported
