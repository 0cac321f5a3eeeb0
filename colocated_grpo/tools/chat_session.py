"""A conversation with a model in an engine of this process, for `tools.chat`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from colocated_grpo.environments.chat import Message, render_tokens
from colocated_grpo.errors import in_one_line
from colocated_grpo.policy.model_files import read_model_files
from colocated_grpo.rollout.engine import Request, Sampling
from colocated_grpo.runtime.distributed import derive_seed, init_world
from colocated_grpo.servers.text import Detokenizer
from colocated_grpo.settings.config_json import longest_sequence, read_config_json
from colocated_grpo.settings.loading import build_config, parse_overrides
from colocated_grpo.settings.schema import Config
from colocated_grpo.settings.text_parts import text_part
from colocated_grpo.settings.yaml_text import parse_value
from colocated_grpo.tools.subject import Subject, read_settings, with_subject
from colocated_grpo.tools.subject_engine import subject_engine


class NoReply(ValueError):
    """A message cannot be answered. The text is one line for the user."""


def chat_config(subject: Subject, context: int, overrides: Sequence[str]) -> Config:
    """Return settings for one engine that decodes one sequence. Of a run, its model and engine settings are used.

    context: longest conversation in tokens, lowered to the model's positions. Raises ConfigError.
    """
    if subject.run_config is not None:
        config = read_settings(subject, subject.run_config, overrides)
    else:
        given = {key: parse_value(text) for key, text in parse_overrides(overrides)}
        config = with_subject(build_config(None, {("model", "name"): subject.model, **given}).config, subject)
    positions = longest_sequence(text_part(read_config_json(config.model)))
    engine = {
        "max_model_len": min(context, positions or context),
        "max_num_seqs": 1,
        "tensor_parallel_size": 1,
        "sleep": False,
    }
    return config.model_copy(update={"engine": config.engine.model_copy(update=engine)})


class Session:
    """A model in an engine, and one conversation with it."""

    def __init__(
        self, config: Config, adapter: Path | None, *, system: str | None, temperature: float, max_tokens: int
    ) -> None:
        """config: of `chat_config`. Raises ConfigError or RunError."""
        world = init_world()
        self._model = read_model_files(config.model, world)
        self._engine = subject_engine(config, self._model, adapter, world)
        assert config.engine.max_model_len is not None  # chat_config has set it
        self._context = config.engine.max_model_len
        self._seed = config.seed
        self._variables = config.model.chat_template_kwargs
        self._system = system
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._turns = itertools.count()
        self._messages: list[Message] = []
        self.reset()

    @property
    def has_template(self) -> bool:
        return bool(self._model.tokenizer.chat_template)

    def reset(self) -> None:
        """Begin a new conversation."""
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def reply(self, text: str, stopped: Callable[[], bool]) -> Iterator[str]:
        """Yield the reply to a message of the user in parts, as they are sampled. What `stopped` ends is kept.

        Without a chat template the model continues the text alone. Raises NoReply.
        """
        messages: list[Message] = [*self._messages, {"role": "user", "content": text}]
        parts = []
        for part in self._sample(self._tokens(messages), stopped):
            parts.append(part)
            yield part
        self._messages = [*messages, {"role": "assistant", "content": "".join(parts)}]

    def _tokens(self, messages: list[Message]) -> list[int]:
        if not self.has_template:
            return self._model.tokenizer.encode(messages[-1]["content"])
        try:
            return render_tokens(self._model.tokenizer, messages, self._variables)
        except Exception as error:  # a template is a program: it may raise anything
            raise NoReply(f"the chat template rejects these messages: {in_one_line(error)}") from None

    def _sample(self, token_ids: list[int], stopped: Callable[[], bool]) -> Iterator[str]:
        room = self._context - len(token_ids)
        if room < 1:
            raise NoReply(f"the conversation has {len(token_ids)} of {self._context} tokens; /reset begins a new one")
        turn = next(self._turns)
        sampling = Sampling(
            temperature=self._temperature,
            max_tokens=min(self._max_tokens, room),
            stop_token_ids=self._model.stop_token_ids,
        )
        seed = derive_seed(self._seed, "chat", turn)
        self._engine.submit([Request(key=turn, token_ids=token_ids, seed=seed, sampling=sampling, stream=True)])
        detokenizer = Detokenizer(self._decode, ())
        while not stopped():
            for _, completion in self._engine.step():
                yield self._decode(completion.token_ids)[detokenizer.emitted :]
                return
            for _, delta in self._engine.deltas():
                yield detokenizer.add(delta.token_ids)
        self._engine.abort()

    def _decode(self, token_ids: list[int]) -> str:
        text = self._model.tokenizer.decode(token_ids, skip_special_tokens=True)
        assert isinstance(text, str), "one sequence decodes to one text"
        return text
