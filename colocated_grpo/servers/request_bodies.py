"""Request bodies as pydantic models, and the sampling parameters common to all of them."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from colocated_grpo.rollout.engine import Sampling
from colocated_grpo.servers.text import Limits
from colocated_grpo.settings.generation import RepetitionDetectionConfig
from colocated_grpo.types import JsonObject
from colocated_grpo.web.bodies import InvalidBody

CHANGES_SAMPLES = "would change which tokens are sampled, and the trainer could not reproduce their probabilities"
CHANGES_PROMPT = "would change the prompt, and is not supported"
CHANGES_RESPONSE = "would change the response, and is not supported"
GENERATE_HAS_IT = CHANGES_RESPONSE + " here; POST /generate returns tokens and has prompt_logprobs"
MEANS_TOOLS = "is not supported; describe tools with `tools`; calls are in `tool_calls`, or else in the text"

REJECTED: dict[str, str] = {
    **dict.fromkeys(("allowed_token_ids", "bad_words", "best_of", "length_penalty", "min_tokens"), CHANGES_SAMPLES),
    **dict.fromkeys(("response_format", "structured_outputs", "logits_processors"), CHANGES_SAMPLES),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), CHANGES_SAMPLES),
    **dict.fromkeys(("thinking_token_budget", "use_beam_search"), CHANGES_SAMPLES),
    **dict.fromkeys(("vllm_xargs", "watermarking"), CHANGES_SAMPLES),
    **dict.fromkeys(("add_special_tokens", "chat_template", "documents", "prompt_embeds"), CHANGES_PROMPT),
    **dict.fromkeys(("media_io_kwargs", "mm_payload", "mm_processor_kwargs", "web_search_options"), CHANGES_PROMPT),
    **dict.fromkeys(("truncate_prompt_tokens", "truncation_side"), CHANGES_PROMPT),
    "reasoning_effort": CHANGES_PROMPT + "; use chat_template_kwargs",
    **dict.fromkeys(("audio", "echo", "logprob_token_ids", "modalities", "moderation", "verbosity"), CHANGES_RESPONSE),
    **dict.fromkeys(("return_mm_kwargs", "return_prompt_text", "return_token_offsets"), CHANGES_RESPONSE),
    **dict.fromkeys(("routed_experts_prompt_start", "spaces_between_special_tokens"), CHANGES_RESPONSE),
    **dict.fromkeys(("prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"), GENERATE_HAS_IT),
    **dict.fromkeys(("function_call", "functions", "tool_choice"), MEANS_TOOLS),
}
"""Key -> reason for rejecting its value. Values without effect are accepted."""
HARMLESS: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("add_special_tokens", "allowed_token_ids", "prompt_logprobs"), ()),
    **dict.fromkeys(("thinking_token_budget", "truncate_prompt_tokens"), ()),
    "best_of": (1,),
    "length_penalty": (1.0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "spaces_between_special_tokens": (True,),
    "function_call": ("auto", "none"),
    "tool_choice": ("auto", "none"),
}
"""Values without effect, in addition to null. For keys not listed here: false, 0, and empty lists and objects."""


def check_keys(content: JsonObject, supported: frozenset[str]) -> None:
    """Raise ValueError with one line for the first unsupported key with an effect. Others are ignored, as by OpenAI."""
    for key in REJECTED.keys() & content.keys() - supported:
        value = content[key]
        harmless = HARMLESS.get(key, (False, 0, [], {}))
        if value is not None and not any(value == other and type(value) in (type(other), int) for other in harmless):
            raise ValueError(f"{key}: {REJECTED[key]}")


MAX_COMPLETIONS = 256
"""Completions of one request, over all its prompts."""
MAX_STOPS, MAX_STOP_CHARACTERS, MAX_STOP_TOKENS = 64, 256, 1 << 14
MAX_NAME_CHARACTERS = 100
MAX_LOGPROBS = 20
"""vLLM's default for max_logprobs."""


def _as_list(value: object) -> object:
    return [] if value is None else [value] if isinstance(value, str) else value


def first_problem(problems: Sequence[Mapping[str, Any]]) -> str:
    """Return pydantic's error in one line. Of a union, the variant that fails deepest is probably the intended one."""
    problem = max(problems, key=lambda problem: len(problem["loc"]))
    where = ".".join(str(part) for part in problem["loc"] if part != "sampling_parameters")
    message = problem["msg"].removeprefix("Value error, ")
    line = f"{where}: {message}" if where else message
    return " ".join(line.split())  # a key of the body may contain newlines


def _check_stop(strings: list[str]) -> list[str]:
    if len(strings) > MAX_STOPS or any(not 1 <= len(string) <= MAX_STOP_CHARACTERS for string in strings):
        raise ValueError(f"at most {MAX_STOPS} stop strings of 1 to {MAX_STOP_CHARACTERS} characters")
    return strings


def _check_no_bias(biases: JsonObject) -> JsonObject:
    if any(bias != 0 for bias in biases.values()):
        raise ValueError("only 0 is supported: the trainer cannot reproduce a bias")
    return biases


Token = Annotated[int, Field(ge=0, lt=1 << 31)]
# fail_fast: without it, one error for each element of a list of a million elements takes seconds and gigabytes.
TokenIds = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Stop = Annotated[list[str], Field(fail_fast=True), BeforeValidator(_as_list), AfterValidator(_check_stop)]
"""A string, a list of strings, or null."""
Several = Field(min_length=1, max_length=MAX_COMPLETIONS, fail_fast=True)
MaxTokens = Annotated[int, Field(ge=1, lt=1 << 31)]
LogprobCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
ZeroOnly = Annotated[float, Field(ge=0, le=0)]
"""Accepted for compatibility, but only at 0, where the parameter has no effect."""


class Body(BaseModel):
    """A request body."""

    @classmethod
    def from_json(cls, body: bytes) -> Self:
        """Parse and validate. Raises InvalidBody."""
        content = msgspec.json.decode(body)
        if not isinstance(content, dict):
            raise InvalidBody("the body must be a JSON object")
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False, include_input=False)
            raise InvalidBody(first_problem(problems)) from None


class StrictBody(Body):
    """A request body without unknown keys. pydantic's own check would build an error for each unknown key."""

    @model_validator(mode="before")
    @classmethod
    def _has_known_keys(cls, values: object) -> object:
        for name in values if isinstance(values, dict) else ():
            if name not in cls.model_fields:
                raise ValueError(f"{name[:MAX_NAME_CHARACTERS]}: this key is not supported")
        return values


class SamplingParameters(StrictBody):
    """Sampling parameters under vLLM's names. Unknown keys are rejected: ignoring one would change the samples."""

    model_config = ConfigDict(allow_inf_nan=False)

    n: int = Field(1, ge=1, le=MAX_COMPLETIONS)
    max_tokens: MaxTokens | None = 16
    """None: the rest of the context length."""
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=1 << 31)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    presence_penalty: ZeroOnly = 0.0
    frequency_penalty: ZeroOnly = 0.0
    stop: Stop = []
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    """Accepted for compatibility and ignored: responses always contain the text."""
    repetition_detection: RepetitionDetectionConfig | None = None
    seed: int | None = None
    logprobs: LogprobCount | None = 0
    """None omits log-probabilities. Any number returns the log-probabilities of the sampled tokens."""
    prompt_logprobs: LogprobCount | None = None
    """Return the k most likely tokens at each position of the prompt."""

    def for_engine(self, prompt: list[int], limits: Limits) -> Sampling:
        """Return the engine's parameters for a prompt. Raises InvalidRequest for a request beyond the limits."""
        limits.check_prompt(prompt)
        limits.check_vocabulary(self.stop_token_ids or (), "stop_token_ids: ")
        room = limits.max_tokens - len(prompt)
        return Sampling(
            temperature=self.temperature,
            max_tokens=min(self.max_tokens or room, room),
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            repetition_detection=self.repetition_detection,
            stop=tuple(self.stop),
            stop_token_ids=tuple(sorted(self.stop_token_ids or ())),
        )


class TextPrompt(StrictBody):
    prompt: str


class TokenPrompt(StrictBody):
    prompt_token_ids: TokenIds


class GenerateBody(SamplingParameters):
    """POST /generate"""

    prompt: str | TextPrompt | TokenPrompt | TokenIds
    stream: bool = False

    @property
    def text_or_tokens(self) -> str | list[int]:
        match self.prompt:
            case TokenPrompt(prompt_token_ids=token_ids) | list(token_ids):
                return token_ids
            case TextPrompt(prompt=text) | str(text):
                return text


class TokensBody(Body):
    """POST /inference/v1/generate"""

    model_config = ConfigDict(extra="ignore")

    token_ids: TokenIds
    sampling_params: SamplingParameters = SamplingParameters()
    request_id: str | None = Field(None, max_length=256)
    model: str | None = None
    stream: bool | None = False


SAMPLED = frozenset(SamplingParameters.model_fields.keys() - {"logprobs", "prompt_logprobs", "detokenize"})
"""Keys of OpenAI's bodies that are sampling parameters. Null: the default; for max_tokens, the rest of the context."""


class OpenAIBody(Body):
    """Fields of both /v1/completions and /v1/chat/completions. Other keys are checked by `check_keys`."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)
    default_max_tokens: ClassVar[int | None] = None

    model: str | None = None
    stream: bool | None = False
    stream_options: JsonObject | None = None
    logit_bias: Annotated[JsonObject, AfterValidator(_check_no_bias)] | None = None
    sampling_parameters: SamplingParameters

    @model_validator(mode="before")
    @classmethod
    def _with_sampling_parameters(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        check_keys(values, SAMPLED.union(cls.model_fields))
        given = {name: values[name] for name in SAMPLED if values.get(name) is not None}
        given["max_tokens"] = values.get("max_tokens", cls.default_max_tokens)
        return {**values, "sampling_parameters": given}

    @property
    def includes_usage(self) -> bool:
        """True when a stream ends with token counts."""
        return bool((self.stream_options or {}).get("include_usage"))


class CompletionBody(OpenAIBody):
    """POST /v1/completions"""

    default_max_tokens = 16

    prompt: str | TokenIds | Annotated[list[str], Several] | Annotated[list[TokenIds], Several]
    logprobs: LogprobCount | None = None
    suffix: None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        several = [entry for entry in self.prompt if not isinstance(entry, int)]
        return several or [[entry for entry in self.prompt if isinstance(entry, int)]]

    @model_validator(mode="after")
    def _is_supported(self) -> Self:
        if len(self.prompts) * self.sampling_parameters.n > MAX_COMPLETIONS:
            raise ValueError(f"at most {MAX_COMPLETIONS} completions a request")
        return self


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Annotated[list[JsonObject], Field(fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _join_text(self) -> Self:
        """Join the text parts. Other parts are rejected: no processor for images or audio is loaded."""
        if isinstance(self.content, list):
            if any(not isinstance(part.get("text"), str) for part in self.content):
                raise ValueError("only text content is supported")
            self.content = "".join(part["text"] for part in self.content)
        return self


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions"""

    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = False
    top_logprobs: LogprobCount | None = None
    tools: Annotated[list[JsonObject], Field(fail_fast=True)] | None = None
    """Passed to the chat template. Tool calls are returned as text, except to agents."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: JsonObject | None = None

    @property
    def template_settings(self) -> JsonObject:
        """Arguments of the chat template."""
        return {
            **(self.chat_template_kwargs or {}),
            "add_generation_prompt": self.add_generation_prompt and not self.continue_final_message,
            "continue_final_message": self.continue_final_message,
            "tools": self.tools or None,  # some templates also describe an empty list
        }

    @property
    def plain_messages(self) -> list[JsonObject]:
        return [message.model_dump(exclude_none=True) for message in self.messages]

    @model_validator(mode="after")
    def _limit_tokens(self) -> Self:
        if self.max_completion_tokens is not None:
            self.sampling_parameters.max_tokens = self.max_completion_tokens
        return self
