"""Entry point of an engine process: `python -m colocated_grpo.serve.rank MODEL`. Started by `serve.command`."""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from contextlib import suppress

from colocated_grpo.launch.cli import library_environment, prepare_streams
from colocated_grpo.runtime.verdict import RUN_ERROR, USAGE_ERROR
from colocated_grpo.serve.options import parse, settings
from colocated_grpo.serve.restarts import resumed


def main() -> int:
    """Serve until SIGTERM, SIGINT or a restart. Returns the exit code."""
    prepare_streams()
    options = resumed(parse(None))
    for name, value in library_environment(options.log_level).items():
        os.environ.setdefault(name, value)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    if options.log_level != "DEBUG":  # a user cannot act on the warnings that libraries log when they are imported
        logging.getLogger("vllm").setLevel(logging.ERROR)
        warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("colocated_grpo").setLevel(options.log_level)
    from colocated_grpo.config.errors import ConfigError
    from colocated_grpo.errors import RunError

    try:
        config = settings(options)
        from colocated_grpo.serve.server import serve

        return serve(config, options)
    except (ConfigError, RunError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, ConfigError) else RUN_ERROR


if __name__ == "__main__":
    try:
        code = main()
    except SystemExit:
        raise
    except Exception:
        traceback.print_exc()
        code = RUN_ERROR
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, AttributeError, ValueError):
            stream.flush()
    os._exit(code)  # the teardown of torch and vLLM could abort the process and hide its exit code
