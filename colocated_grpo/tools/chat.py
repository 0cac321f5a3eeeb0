"""Chat with a model in the terminal: colocated-grpo chat RUN_OR_MODEL

RUN_OR_MODEL is a run folder, a model's or an adapter's folder, or a name on the Hub. If standard input is not a
terminal, each of its lines is a message, and only the replies are printed.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from colocated_grpo.errors import ConfigError, RunError, in_one_line, visible
from colocated_grpo.runtime import program
from colocated_grpo.runtime.verdict import run_program
from colocated_grpo.settings.config_file import build_config, parse_overrides
from colocated_grpo.settings.config_json import longest_sequence, read_config_json, text_part
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.tree import parse_value
from colocated_grpo.tools.evaluate import ModelSubject, read_settings, subject_of, with_subject

if TYPE_CHECKING:
    from colocated_grpo.environments.chat import Message

RESET, QUIT = "/reset", ("/quit", "/exit")
MAX_CONTEXT = 16_384
"""Default limit of a conversation in tokens: the KV cache for a model's full context may not fit."""


class Interrupts:
    """Handler of Ctrl-C. Ends the running reply. A second Ctrl-C, or one between replies, raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.replying = self.requested = False

    def __call__(self, _number: int, _frame: object) -> None:
        if not self.replying or self.requested:
            raise KeyboardInterrupt
        self.requested = True


class NoReply(ValueError):
    """A message cannot be answered. The text is one line for the user."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Chat until the end of the input. Returns exit code 0, 2 for wrong settings, 1 if the model cannot be loaded."""
    options, overrides = program.parse_rank_arguments(_parser(), arguments)
    program.exit_on_stop_signals(lambda: "stopped")
    program.prepare_libraries("WARNING")
    try:
        session = _open(options, overrides)
        interrupts = Interrupts()
        signal.signal(signal.SIGINT, interrupts)
        converse(session, _lines(), interrupts)
    except (ConfigError, RunError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of the replies has exited
            return 0
        return program.exit_code(error)
    except KeyboardInterrupt:
        print()
    return 0


def converse(session: Chat, lines: Iterator[str], interrupts: Interrupts) -> None:
    """Answer each line, and print the reply while it is sampled."""
    for line in lines:
        if line in QUIT:
            return
        if line == RESET:
            session.reset()
            continue
        interrupts.requested, interrupts.replying = False, True
        try:
            for text in session.reply(line, interrupts):
                print(visible(text), end="", flush=True)
        except NoReply as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            continue
        finally:
            interrupts.replying = False
        print(flush=True)  # when the reply has ended: a Ctrl-C after this line ends the chat


def _open(options: argparse.Namespace, overrides: Sequence[str]) -> Chat:
    subject = subject_of(options.model)
    if not 0 <= options.temperature <= 2:
        raise ConfigError(f"--temperature={options.temperature:g}: must be from 0 (greedy) to 2")
    for name in ("max_tokens", "context"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}={getattr(options, name)}: must be at least 1")
    config = _settings(subject, overrides)
    positions = longest_sequence(text_part(read_config_json(config.model)))
    options.context = min(options.context, positions or options.context)
    with program.frozen_imports():
        from colocated_grpo.policy.model_files import read_tokenizer

    has_template = bool(read_tokenizer(config.model).chat_template)
    if options.system is not None and not has_template:
        raise ConfigError("--system: this model has no chat template; set one with --model.chat_template FILE")
    print(f"loading {subject.adapter or subject.model}", file=sys.stderr, flush=True)
    session = Chat(subject, config, options)
    if not has_template:
        print("this model has no chat template: it continues each line by itself", file=sys.stderr, flush=True)
    return session


def _settings(subject: ModelSubject, overrides: Sequence[str]) -> Config:
    """Return the settings of the run, or without a run, the settings of the command line. Raises ConfigError."""
    if subject.run_config is not None:
        return read_settings(subject, subject.run_config, overrides)
    given = {key: parse_value(text) for key, text in parse_overrides(overrides)}
    return with_subject(build_config(None, {("model", "name"): subject.model, **given}).config, subject)


class Chat:
    """One conversation with a model, in an engine of this process that decodes one sequence."""

    def __init__(self, subject: ModelSubject, config: Config, options: argparse.Namespace) -> None:
        """options: the parsed command line. Raises ConfigError or RunError."""
        from colocated_grpo.assembly.engines import engine_spec
        from colocated_grpo.policy.model_files import read_model_files
        from colocated_grpo.runtime.distributed import init_world
        from colocated_grpo.tools.evaluation_run import subject_engine

        world = init_world()
        model = read_model_files(config.model, world)
        spec = engine_spec(config, model.folder, world.size, world.device)
        sizes = {"max_model_len": options.context, "max_num_seqs": 1, "tensor_parallel_size": 1}
        self._engine = subject_engine(replace(spec, **sizes, sleep=False), subject.adapter, world)
        self._tokenizer, self._stop_token_ids = model.tokenizer, model.stop_token_ids
        self._seed, self._variables = config.seed, config.model.chat_template_kwargs
        self._options = options
        self._turn = 0
        self._messages: list[Message] = []
        self.reset()

    def reset(self) -> None:
        system = self._options.system
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def reply(self, text: str, interrupts: Interrupts) -> Iterator[str]:
        """Yield the reply to a message of the user in parts, as they are sampled. An interrupted reply is kept.

        Without a chat template the model continues this text only, without earlier messages. Raises NoReply.
        """
        messages: list[Message] = [*self._messages, {"role": "user", "content": text}]
        parts = []
        for part in self._sample(self._tokens(messages), interrupts):
            parts.append(part)
            yield part
        self._messages = [*messages, {"role": "assistant", "content": "".join(parts)}]

    def _tokens(self, messages: list[Message]) -> list[int]:
        from colocated_grpo.environments.chat import render_tokens

        if not self._tokenizer.chat_template:
            return self._tokenizer.encode(messages[-1]["content"])
        try:
            return render_tokens(self._tokenizer, messages, self._variables)
        except Exception as error:  # a template is a program, which may raise any error
            raise NoReply(f"the chat template rejects these messages: {in_one_line(error)}") from None

    def _sample(self, token_ids: list[int], interrupts: Interrupts) -> Iterator[str]:
        from colocated_grpo.rollout.engine import Request, Sampling
        from colocated_grpo.runtime.distributed import derive_seed
        from colocated_grpo.servers.text import Detokenizer

        length, context = len(token_ids), self._options.context
        if length >= context:
            raise NoReply(f"the conversation has {length} of {context} tokens; /reset begins a new one")
        self._turn += 1
        sampling = Sampling(
            temperature=self._options.temperature,
            max_tokens=min(self._options.max_tokens, context - length),
            stop_token_ids=self._stop_token_ids,
        )
        seed = derive_seed(self._seed, "chat", self._turn)
        request = Request(key=self._turn, token_ids=token_ids, seed=seed, sampling=sampling, stream=True)
        self._engine.submit([request])
        detokenizer = Detokenizer(self._decode, ())
        while not interrupts.requested:
            for _, completion in self._engine.step():
                yield self._decode(completion.token_ids)[detokenizer.emitted :]
                return
            for _, delta in self._engine.deltas():
                yield detokenizer.add(delta.token_ids)
        self._engine.abort()

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        assert isinstance(text, str), "one sequence decodes to one text"
        return text


def _lines() -> Iterator[str]:
    """Yield the user's lines, except empty lines."""
    if not sys.stdin.isatty():
        yield from filter(None, map(str.strip, iter(sys.stdin.readline, "")))
        return
    import readline  # noqa: F401  # lets input() edit lines and recall earlier ones

    print(f"{RESET} begins again, Ctrl-C ends a reply, Ctrl-D the chat", file=sys.stderr, flush=True)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        if line:
            yield line


def _parser() -> argparse.ArgumentParser:
    parser = program.OneLineParser(
        prog="colocated-grpo chat",
        description="Chat with a model, or with the best or newest one of a run. Settings override the run's own.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="RUN_OR_MODEL", help="folder of a run, a model or an adapter, or a Hub name")
    parser.add_argument("--system", metavar="TEXT", help="system message of every conversation")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=1024, help="longest reply in tokens (default: %(default)s)")
    longest = "longest conversation in tokens, at most the model's positions (default: %(default)s)"
    parser.add_argument("--context", type=int, default=MAX_CONTEXT, help=longest)
    return parser


if __name__ == "__main__":
    run_program(main)
