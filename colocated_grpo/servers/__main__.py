"""Entry point: `python -m colocated_grpo.servers MODEL`. Checks the arguments, then runs the engine process.

It has the same command, and STATE_VARIABLE. It starts again after a crash, and when a trainer requests another model.
"""

import errno
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from colocated_grpo.errors import ConfigError, RunError
from colocated_grpo.runtime import processes, program, verdict
from colocated_grpo.servers import options as serving
from colocated_grpo.servers.options import RESTART, STATE_VARIABLE, ServeOptions, parse
from colocated_grpo.settings.atropos import is_loopback

MAX_CRASHES = 3
"""Number of consecutive crashes after which the server exits."""
STEADY_SECONDS = 60.0
"""A crash after this uptime counts as the first of a new series."""
STOPPING = b"\nstopping: running requests are aborted\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code: 2 for invalid arguments, 1 if serving fails."""
    program.prepare_streams()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(arguments)
    if (problem := _problem(options)) is not None:
        print(f"error: {problem}", file=sys.stderr)
        return verdict.USAGE_ERROR
    if options.api_key_variable is None and not is_loopback(options.host):
        warning = f"--host={options.host}: every machine that reaches port {options.port} can control the engine"
        print(f"warning: {warning}; set --api-key-variable", file=sys.stderr)
    with processes.scratch_folder() as folder:
        return _run([sys.executable, "-m", "colocated_grpo.servers", *arguments], folder / "state.json")


def _run(command: Sequence[str], state: Path) -> int:
    environment = {**os.environ, "PYTHONPATH": program.python_path(os.environ), STATE_VARIABLE: str(state)}
    stopped = {128 + number for number in program.stop_signals()}
    crashes = 0
    while True:
        started = time.monotonic()
        code = processes.run_command(command, [environment], None, lambda number: (STOPPING, None)).code
        if code in stopped:
            return 0
        if code == RESTART:
            crashes = 0
            continue
        crashes = 1 if time.monotonic() - started > STEADY_SECONDS else crashes + 1
        if code == 0 or not state.exists() or crashes > MAX_CRASHES:
            return code
        if (model := serving.save_requested(state, None)) is not None:
            print(f"note: {model} could not be served; the model before it is loaded again")
        print(f"note: the engine ended with exit code {code}; it is started again ({crashes} of {MAX_CRASHES})")
        sys.stdout.flush()


def _problem(options: ServeOptions) -> str | None:
    """Return one line for a problem that can be found without importing a slow library; None if there is none."""
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        advice = "start a server without torchrun, and with --tensor-parallel-size for several GPUs"
        return f"RANK, WORLD_SIZE: set; {advice}"
    if (variable := options.api_key_variable) is not None and not os.environ.get(variable):
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


def serve_engine() -> int:
    """Serve from this process until SIGTERM, SIGINT or a restart. Returns the exit code."""
    program.prepare_streams()
    state = Path(os.environ[STATE_VARIABLE])
    options = serving.resumed(parse(None), state)
    program.prepare_libraries(options.log_level)
    try:
        options = serving.with_model(options)
        with program.frozen_imports():
            from colocated_grpo.servers.server import serve

        return serve(options, state)
    except (ConfigError, RunError) as error:
        return program.exit_code(error)


if __name__ == "__main__":
    if STATE_VARIABLE in os.environ:
        verdict.run_program(serve_engine)
    sys.exit(main())
