"""Entry point of one rank: `python -m colocated_grpo --config FILE`."""

from colocated_grpo.launch.cli import main
from colocated_grpo.runtime.verdict import run_program

run_program(main)
