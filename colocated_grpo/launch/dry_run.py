"""The dry run: checks what a run would refuse before its first step, except memory, and starts no rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from colocated_grpo.errors import RunError
from colocated_grpo.runtime.program import error_text, library_environment, set_up_logging
from colocated_grpo.runtime.verdict import USAGE_ERROR
from colocated_grpo.settings.addresses import exposures
from colocated_grpo.settings.errors import ConfigError
from colocated_grpo.settings.schema import Config


def dry_run(config: Config, problems: Sequence[str], log_level: str) -> int:
    """Print warnings, `problems` and, if there are none, those of `problems_of`. Returns 2 if there are any, else 0.

    problems: lines about files and names, found by look-up alone.
    """
    for line in exposures(config):
        print(f"warning: {line}")
    if not problems:
        for name, value in library_environment(log_level).items():
            os.environ.setdefault(name, value)
        set_up_logging(log_level)
        problems = problems_of(config)
    for line in error_text(problems):
        print(line, file=sys.stderr)
    print("Dry run mode - command not executed")
    return USAGE_ERROR if problems else 0


def note(line: str) -> None:
    print(f"note: {line}")


def problems_of(config: Config) -> list[str]:
    """Build the model without parameters; and environments and evaluation sets as a run does: import their code, read
    their data, draw prompts.

    Prints how many rows are left out. Returns the error lines of the first problem.
    """
    from colocated_grpo.assembly.data import open_source
    from colocated_grpo.assembly.evaluation import draw_evaluated, import_answers
    from colocated_grpo.environments.build import build_environments
    from colocated_grpo.policy.checkpoint_files import fetch_tokenizer
    from colocated_grpo.policy.loading import check_model
    from colocated_grpo.policy.model_files import load_tokenizer

    try:
        folder = fetch_tokenizer(config.model)
        check_model(config.model, folder)
        tokenizer = load_tokenizer(config.model, folder)
        environments = build_environments(config, tokenizer)
        import_answers(config.evaluation)
        if environments.trained:
            open_source(environments, note).next(config.rollout.prompts_per_step)
        draw_evaluated(config.evaluation, environments, note)
    except (ConfigError, RunError) as error:
        return str(error).splitlines()
    return []
