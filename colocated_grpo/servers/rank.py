"""Entry point of an engine process: `python -m colocated_grpo.servers.rank MODEL`. Started by `servers.__main__`."""

from __future__ import annotations

import sys

from colocated_grpo.runtime.program import frozen_imports, prepare_libraries, prepare_streams
from colocated_grpo.runtime.verdict import RUN_ERROR, USAGE_ERROR, run_program
from colocated_grpo.servers.options import parse, resumed, within_model


def main() -> int:
    """Serve until SIGTERM, SIGINT or a restart. Returns the exit code."""
    prepare_streams()
    options = resumed(parse(None))
    prepare_libraries(options.log_level)
    from colocated_grpo.errors import RunError
    from colocated_grpo.settings.errors import ConfigError

    try:
        options = within_model(options)
        with frozen_imports():
            from colocated_grpo.servers.server import serve

        return serve(options)
    except (ConfigError, RunError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, ConfigError) else RUN_ERROR


if __name__ == "__main__":
    run_program(main)
