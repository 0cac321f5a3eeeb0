"""The command `python -m colocated_grpo.serve`. Checks the arguments before slow imports, then serves."""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
import warnings
from collections.abc import Sequence

from colocated_grpo.launch.cli import (
    RUN_ERROR,
    USAGE_ERROR,
    environment_problem,
    library_environment,
    prepare_streams,
    rank_environment,
)
from colocated_grpo.serve.options import ServeOptions, parse, settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code: 2 for invalid arguments, 1 if serving fails."""
    prepare_streams()
    options = parse(arguments)
    for name, value in {**rank_environment(os.environ), **library_environment(options.log_level)}.items():
        os.environ.setdefault(name, value)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    if options.log_level != "DEBUG":  # a user cannot act on the warnings that libraries log when they are imported
        logging.getLogger("vllm").setLevel(logging.ERROR)
        warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("colocated_grpo").setLevel(options.log_level)
    from colocated_grpo.config.addresses import is_loopback
    from colocated_grpo.config.errors import ConfigError
    from colocated_grpo.errors import RunError

    try:
        problem = environment_problem(os.environ) or _problem(options)
        if problem is not None:
            raise ConfigError(problem)
        config = settings(options)
        if options.api_key_variable is None and not is_loopback(options.host):
            warning = f"--host={options.host}: every machine that reaches port {options.port} can control the engine"
            print(f"warning: {warning}; set --api-key-variable", file=sys.stderr)
        from colocated_grpo.serve.server import serve

        serve(config, options)
    except (ConfigError, RunError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, ConfigError) else RUN_ERROR
    return 0


def _problem(options: ServeOptions) -> str | None:
    """Return one line for what can be checked without importing a slow library; None if all is well."""
    if int(os.environ["WORLD_SIZE"]) > 1:
        return f"WORLD_SIZE={os.environ['WORLD_SIZE']}: a server is one process; start it without torchrun"
    variable = options.api_key_variable
    if variable is not None and not os.environ.get(variable):
        return f"--api-key-variable={variable}: this environment variable is not set; export it"
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((options.host, options.port))
    except OSError as error:
        taken = f"stop the process that does (lsof -i :{options.port}) or set another port"
        advice = taken if error.errno == errno.EADDRINUSE else "set another --host or --port"
        return f"--port={options.port}: cannot listen on {options.host} ({error.strerror}); {advice}"
    return None
