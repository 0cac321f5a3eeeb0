"""Chat with a model in the terminal: python -m colocated_grpo.tools.chat RUN_OR_MODEL

RUN_OR_MODEL is a run folder, a model's or an adapter's folder, or a name on the Hub. Where standard input is no
terminal, each of its lines is a message, and only the replies are printed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from colocated_grpo.runtime.program import (
    OneLineParser,
    environment_problem,
    error_text,
    frozen_imports,
    library_environment,
    prepare_streams,
    rank_environment,
    set_up_logging,
)
from colocated_grpo.runtime.signals import exit_on_stop_signals
from colocated_grpo.runtime.verdict import RUN_ERROR, USAGE_ERROR, run_program

if TYPE_CHECKING:
    from colocated_grpo.tools.chat_session import Session

RESET, QUIT = "/reset", ("/quit", "/exit")
MAX_CONTEXT = 16_384
"""Default limit of a conversation in tokens: the KV cache of a model's longest one may not fit."""


class Interrupts:
    """Ctrl-C: ends the running reply; without one, or pressed again, raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.replying = self.requested = False

    def __call__(self, _number: int, _frame: object) -> None:
        if not self.replying or self.requested:
            raise KeyboardInterrupt
        self.requested = True


def main(arguments: Sequence[str] | None = None) -> int:
    """Chat until the end of the input. Returns exit code 0, 2 for wrong settings, 1 if the model cannot be loaded."""
    prepare_streams()
    parser = _parser()
    options, overrides = parser.parse_known_args(arguments)
    os.environ.update(rank_environment(os.environ))
    if problem := environment_problem(os.environ):
        parser.error(problem)
    if int(os.environ["WORLD_SIZE"]) > 1:
        parser.error(f"WORLD_SIZE={os.environ['WORLD_SIZE']}: must be 1; a chat runs in one process")
    exit_on_stop_signals(lambda: "stopped")
    for name, value in library_environment("INFO").items():
        os.environ.setdefault(name, value)
    set_up_logging("WARNING")
    from colocated_grpo.errors import RunError
    from colocated_grpo.settings.errors import ConfigError

    try:
        session = _open(options, overrides)
        interrupts = Interrupts()
        signal.signal(signal.SIGINT, interrupts)
        converse(session, _lines(), interrupts)
    except (ConfigError, RunError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of the replies has gone
            return 0
        print(*error_text(str(error).splitlines()), sep="\n", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, ConfigError) else RUN_ERROR
    except KeyboardInterrupt:
        print()
    return 0


def converse(session: Session, lines: Iterator[str], interrupts: Interrupts) -> None:
    """Answer each line, and print the reply while it is sampled."""
    from colocated_grpo.tools.chat_session import NoReply
    from colocated_grpo.tracking.text import visible

    for line in lines:
        if line in QUIT:
            return
        if line == RESET:
            session.reset()
            continue
        interrupts.requested, interrupts.replying = False, True
        try:
            for text in session.reply(line, lambda: interrupts.requested):
                print(visible(text), end="", flush=True)
        except NoReply as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            continue
        finally:
            interrupts.replying = False
        print(flush=True)


def _open(options: argparse.Namespace, overrides: Sequence[str]) -> Session:
    """Load the model. Raises ConfigError or RunError."""
    from colocated_grpo.settings.errors import ConfigError
    from colocated_grpo.tools.subject import subject_of

    subject = subject_of(options.model)
    if not 0 <= options.temperature <= 2:
        raise ConfigError(f"--temperature={options.temperature:g}: must be from 0 (greedy) to 2")
    for name in ("max_tokens", "context"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}={getattr(options, name)}: must be at least 1")
    with frozen_imports():
        from colocated_grpo.policy.model_files import read_tokenizer
        from colocated_grpo.tools.chat_session import Session, chat_config

    config = chat_config(subject, options.context, overrides)
    if options.system is not None and not read_tokenizer(config.model).chat_template:
        raise ConfigError("--system: this model has no chat template; set one with --model.chat_template FILE")
    print(f"loading {subject.folder}", file=sys.stderr, flush=True)
    session = Session(
        config,
        subject.adapter,
        system=options.system,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
    )
    if not session.has_template:
        print("this model has no chat template: it continues each line by itself", file=sys.stderr, flush=True)
    return session


def _lines() -> Iterator[str]:
    """Yield the lines of the user that are not empty."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  # lets input() edit lines and recall earlier ones

        print(f"{RESET} begins again, Ctrl-C ends a reply, Ctrl-D the chat", file=sys.stderr, flush=True)
    read: Callable[[], str] = _typed if sys.stdin.isatty() else sys.stdin.readline
    while line := read():
        if line.strip():
            yield line.strip()
    if sys.stdin.isatty():
        print()


def _typed() -> str:
    """Return a line with its newline; the empty string at the end of the input."""
    try:
        return input("> ") + "\n"
    except EOFError:
        return ""


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m colocated_grpo.tools.chat",
        description="Chat with a model, or with the best or newest one of a run. Settings override the run's own.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="RUN_OR_MODEL", help="folder of a run, a model or an adapter, or a Hub name")
    parser.add_argument("--system", metavar="TEXT", help="system message of every conversation")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=1024, help="longest reply in tokens (default: %(default)s)")
    parser.add_argument(
        "--context",
        type=int,
        default=MAX_CONTEXT,
        help="longest conversation in tokens, at most the model's positions (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    run_program(main)
