"""Request bodies as pydantic models, and the sampling parameters that all of them reduce to."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from colocated_grpo.types import JsonObject

MAX_COMPLETIONS = 256
"""Completions of one request, over all its prompts."""
MAX_STOPS, MAX_STOP_CHARACTERS = 64, 256
MAX_LOGPROBS = 20
"""vLLM's default for max_logprobs."""


def _as_list(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, str) else value


def _check_stop(strings: list[str]) -> list[str]:
    if len(strings) > MAX_STOPS or any(not 1 <= len(string) <= MAX_STOP_CHARACTERS for string in strings):
        raise ValueError(f"at most {MAX_STOPS} stop strings of 1 to {MAX_STOP_CHARACTERS} characters")
    return strings


Token = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[Token], Field(min_length=1)]
Stop = Annotated[list[str], BeforeValidator(_as_list), AfterValidator(_check_stop)]
"""A string, a list of strings, or null."""
ZeroOnly = Annotated[float, Field(ge=0, le=0)]
"""Accepted for compatibility, but only at 0, where the parameter has no effect."""


class SamplingParameters(BaseModel):
    """Sampling parameters under vLLM's names. Unknown keys are rejected: ignoring one would change the samples."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    n: int = Field(1, ge=1, le=MAX_COMPLETIONS)
    max_tokens: int | None = Field(16, ge=1)
    """None: the rest of the context length."""
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=1 << 31)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    presence_penalty: ZeroOnly = 0.0
    frequency_penalty: ZeroOnly = 0.0
    stop: Stop = []
    stop_token_ids: list[Token] | None = Field(None, max_length=MAX_COMPLETIONS)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    """Accepted for compatibility and ignored: responses always contain the text."""
    seed: int | None = None
    logprobs: int | None = Field(0, ge=0, le=MAX_LOGPROBS)
    """None omits log-probabilities. Any number returns those of the sampled tokens."""
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Return the k most likely tokens at each position of the prompt."""


class TextPrompt(BaseModel):
    model_config = ConfigDict(extra="forbid")
    prompt: str


class TokenPrompt(BaseModel):
    model_config = ConfigDict(extra="forbid")
    prompt_token_ids: TokenIds


class GenerateBody(SamplingParameters):
    """POST /generate"""

    prompt: str | TextPrompt | TokenPrompt | TokenIds
    stream: bool = False


class TokensBody(BaseModel):
    """POST /inference/v1/generate"""

    model_config = ConfigDict(extra="ignore")

    token_ids: TokenIds
    sampling_params: SamplingParameters = SamplingParameters()
    request_id: str | None = Field(None, max_length=256)
    model: str | None = None
    stream: bool | None = False


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False
    """End the stream with a chunk of token counts."""


class OpenAIBody(BaseModel):
    """Fields of both /v1/completions and /v1/chat/completions. Unknown keys, such as min_tokens, are ignored."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(1, ge=1, le=MAX_COMPLETIONS)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(1.0, ge=0, le=100)
    top_p: float | None = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(0, ge=-1, lt=1 << 31)
    min_p: float | None = Field(0.0, ge=0, le=1)
    repetition_penalty: float | None = Field(1.0, ge=0.01, le=100)
    presence_penalty: ZeroOnly | None = 0.0
    frequency_penalty: ZeroOnly | None = 0.0
    logit_bias: dict[str, ZeroOnly] | None = None
    stop: Stop = []
    stop_token_ids: list[Token] | None = Field(None, max_length=MAX_COMPLETIONS)
    ignore_eos: bool = False
    seed: int | None = None

    @property
    def includes_usage(self) -> bool:
        """True when a stream ends with token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def sampling_parameters(self) -> SamplingParameters:
        """The body's sampling parameters. Null means the default; for max_tokens, the rest of the context length."""
        names = set(SamplingParameters.model_fields) & set(OpenAIBody.model_fields)
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return SamplingParameters.model_validate({"max_tokens": None, **given})


class CompletionBody(OpenAIBody):
    """POST /v1/completions"""

    max_tokens: int | None = Field(16, ge=1)
    prompt: str | TokenIds | Annotated[list[str], Field(min_length=1)] | Annotated[list[TokenIds], Field(min_length=1)]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: Annotated[bool, Field(strict=True)] = False
    suffix: None = None

    @property
    def num_top_logprobs(self) -> int:
        """Number of most likely tokens to return for each position."""
        return self.logprobs or 0

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        several = [entry for entry in self.prompt if not isinstance(entry, int)]
        return several or [[entry for entry in self.prompt if isinstance(entry, int)]]

    @model_validator(mode="after")
    def _is_supported(self) -> Self:
        if self.echo:
            raise ValueError("echo is not supported")
        if len(self.prompts) * (self.n or 1) > MAX_COMPLETIONS:
            raise ValueError(f"at most {MAX_COMPLETIONS} completions a request")
        return self


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[JsonObject] | None = None

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

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[JsonObject] | None = None
    """Passed to the chat template. Tool calls are returned as text."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: JsonObject | None = None

    @property
    def num_top_logprobs(self) -> int:
        """Number of most likely tokens to return for each position."""
        return self.top_logprobs or 0 if self.logprobs else 0

    @property
    def sampling_parameters(self) -> SamplingParameters:
        limit = self.max_completion_tokens or self.max_tokens
        return super().sampling_parameters.model_copy(update={"max_tokens": limit})
