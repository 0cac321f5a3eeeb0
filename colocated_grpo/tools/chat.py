"""Chat with a model in the terminal: colocated-grpo chat RUN_OR_MODEL

If standard input is not a terminal, each of its lines is a message, and only the replies are printed.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated

from pydantic import Field

from colocated_grpo.errors import ConfigError, RunError, visible
from colocated_grpo.runtime import processes, program, verdict
from colocated_grpo.servers.engine_servers import EngineServers, local_servers, serve_command
from colocated_grpo.servers.options import checked, positive, subject_of
from colocated_grpo.settings import config_file, config_json, tree
from colocated_grpo.tools.evaluate import read_settings, with_subject
from colocated_grpo.types import JsonObject
from colocated_grpo.web.client import JsonClient, RequestRejected, Unavailable

RESET, QUIT = "/reset", ("/quit", "/exit")
SECONDS = 600.0
"""Timeout of loading an adapter, and of a reply's next token."""
POLL_SECONDS = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Chat until the end of the input. Returns exit code 0, 2 for wrong settings, 1 if the server fails."""
    program.prepare_streams()
    parser = program.OneLineParser(
        prog="colocated-grpo chat",
        description="Chat with a model, or with the best or newest one of a run. Settings override the run's own.",
    )
    named = "folder of a run, a model or an adapter, a Hub name, or http://... of a server"
    parser.add_argument("model", metavar="RUN_OR_MODEL", help=named)
    parser.add_argument("--system", metavar="TEXT", help="system message of every conversation")
    for name, kind, default, text in (
        ("--temperature", checked(Annotated[float, Field(ge=0, le=2)], "from 0 (greedy) to 2"), 0.7, "0 is greedy"),
        ("--max-tokens", positive, 1024, "longest reply in tokens"),
        # The KV cache for a model's full context may not fit.
        ("--context", positive, 16_384, "longest conversation in tokens, at most the model's positions"),
    ):
        parser.add_argument(name, type=kind, default=default, help=f"{text} (default: %(default)s)")
    options, overrides = parser.parse_known_args(arguments)
    try:
        with _server(options, overrides) as server:
            converse(server, options)
    except BrokenPipeError:  # the reader of the replies has exited
        return 0
    except (ConfigError, RunError, OSError) as error:
        return program.exit_code(error)
    except (Unavailable, RequestRejected) as error:
        return program.exit_code(RunError(f"{options.model}: the server does not answer: {error}"))
    except KeyboardInterrupt:
        print()
    return 0


def converse(server: JsonClient, options: argparse.Namespace) -> None:
    """Answer each line, and print the reply while it is sampled. Ctrl-C ends a reply, and between replies the chat."""
    info = server.get("/bridge/info")
    has_template = isinstance(info, dict) and info["chat_template"]
    if not has_template:
        if options.system is not None:
            raise ConfigError("--system: this model has no chat template; set one with --model.chat_template FILE")
        print("this model has no chat template: each line is continued alone", file=sys.stderr, flush=True)
    first = [] if options.system is None else [{"role": "system", "content": options.system}]
    body: JsonObject = {"temperature": options.temperature, "max_tokens": options.max_tokens, "stream": True}
    messages = first
    for line in _lines():
        if line in QUIT:
            return
        if line == RESET:
            messages = first
            continue
        asked, reply = [*messages, {"role": "user", "content": line}], []
        path, prompt = ("chat/completions", {"messages": asked}) if has_template else ("completions", {"prompt": line})
        try:
            for part in _parts(server.lines(f"/v1/{path}", SECONDS, body | prompt)):
                reply.append(part)
                print(visible(part), end="", flush=True)
        except RequestRejected as error:
            print(f"error: {error}; {RESET} begins a new conversation", file=sys.stderr, flush=True)
            continue
        except KeyboardInterrupt:  # closes the connection, and the server aborts the request
            pass
        print(flush=True)
        messages = [*asked, {"role": "assistant", "content": "".join(reply)}]


def _parts(events: Iterator[str]) -> Iterator[str]:
    """Yield the texts of a streamed reply of OpenAI's API. Raises Unavailable for an error within it."""
    for event in events:
        if event == "data: [DONE]":
            return
        chunk = json.loads(event.removeprefix("data: "))
        if "error" in chunk:
            raise Unavailable(chunk["error"]["message"])
        choice = chunk["choices"][0]
        yield choice["text"] if "text" in choice else choice["delta"].get("content", "")


@contextmanager
def _server(options: argparse.Namespace, overrides: Sequence[str]) -> Generator[JsonClient]:
    """Yield a client of the named server, or of one that serves the named model. Raises ConfigError or RunError."""
    if options.model.startswith(("http://", "https://")):
        if overrides:
            raise ConfigError(f"{overrides[0]}: a server is running with its settings; restart it")
        yield JsonClient(options.model, timeout=SECONDS, api_key=os.environ.get(program.KEY_VARIABLE))
        return
    subject = subject_of(options.model)
    if subject.run_config is not None:
        config = read_settings(subject, subject.run_config, overrides)
    else:
        given = {key: tree.parse_value(text) for key, text in config_file.parse_overrides(overrides)}
        loaded = config_file.build_config(None, {("model", "name"): subject.model, **given})
        config = with_subject(loaded.config, subject)
    config_json.read_config_json(config.model)  # raises ConfigError for a model that does not exist
    print(f"loading {subject.adapter or subject.model}", file=sys.stderr, flush=True)
    one = {"max_num_seqs": 1, "tensor_parallel_size": 1, "bridge": "broadcast"}  # which exports no weights
    engine = config.engine.model_copy(update=one)
    with processes.scratch_folder() as folder:
        plan = local_servers(serve_command(config.model, engine, config.policy, options.context), folder)
        with EngineServers(plan, os.environ) as running:
            key = running.rank_environment()[program.KEY_VARIABLE]
            server = JsonClient(plan.urls[0], timeout=SECONDS, api_key=key)
            while running.failure is None:
                with suppress(Unavailable):
                    server.get("/health")
                    break
                time.sleep(POLL_SECONDS)
            else:
                raise RunError(running.failure.removeprefix("error: ").replace("\n", "\n  "))
            if subject.adapter is not None:
                server.post("/lora/load", {"adapter_path": str(subject.adapter)})
            yield server


def _lines() -> Iterator[str]:
    """Yield the user's lines, except empty lines."""
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        import readline  # noqa: F401  # lets input() edit lines and recall earlier ones

        print(f"{RESET} begins a new conversation, Ctrl-C ends a reply, Ctrl-D the chat", file=sys.stderr, flush=True)
    with suppress(EOFError):
        while True:
            if line := input(prompt).strip():
                yield line


if __name__ == "__main__":
    verdict.run_program(main)
