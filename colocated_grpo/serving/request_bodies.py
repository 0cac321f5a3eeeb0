"""What requests may ask for. Bodies as pydantic models, and how they become `Sampling`."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

MOST_COMPLETIONS = 256
MOST_STOPS, LONGEST_STOP = 64, 256
MOST_LOGPROBS = 20
"""vLLM's own default."""


def _as_list(value: str | list[str] | None) -> list[str]:
    strings = [value] if isinstance(value, str) else value or []
    if len(strings) > MOST_STOPS or any(not 1 <= len(string) <= LONGEST_STOP for string in strings):
        raise ValueError(f"at most {MOST_STOPS} stop strings of 1 to {LONGEST_STOP} characters")
    return strings


Token = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[Token], Field(min_length=1)]
Stop = Annotated[str | list[str] | None, AfterValidator(_as_list)]
Neutral = Annotated[float, Field(ge=0, le=0)]
"""Sampling that the trainer could not reproduce: accepted as long as it is off."""


class SamplingWish(BaseModel):
    """Sampling parameters under vLLM's names. Unknown ones are refused: ignoring one would change what is sampled."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    n: int = Field(1, ge=1, le=MOST_COMPLETIONS)
    max_tokens: int | None = Field(16, ge=1)
    """None: as many as fit."""
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=1 << 31)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    presence_penalty: Neutral = 0.0
    frequency_penalty: Neutral = 0.0
    stop: Stop = Field(None, validate_default=True)
    stop_token_ids: list[Token] | None = Field(None, max_length=MOST_COMPLETIONS)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    """Accepted and not needed: the text is always made."""
    seed: int | None = None
    logprobs: int | None = Field(0, ge=0, le=MOST_LOGPROBS)
    """None leaves them out. The sampled token's own is given, whatever the number."""
    prompt_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    """The k likeliest tokens at each position of the prompt."""


class TextPrompt(BaseModel):
    model_config = ConfigDict(extra="forbid")
    prompt: str


class TokenPrompt(BaseModel):
    model_config = ConfigDict(extra="forbid")
    prompt_token_ids: TokenIds


class GenerateBody(SamplingWish):
    """POST /generate"""

    prompt: str | TextPrompt | TokenPrompt | TokenIds
    stream: bool = False


class TokensBody(BaseModel):
    """POST /inference/v1/generate"""

    model_config = ConfigDict(extra="ignore")

    token_ids: TokenIds
    sampling_params: SamplingWish = SamplingWish()
    request_id: str | None = Field(None, max_length=256)
    model: str | None = None
    stream: bool | None = False


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False
    """A last chunk that counts the tokens."""


class OpenAIBody(BaseModel):
    """What /v1/completions and /v1/chat/completions share. Keys without influence on the sampling are ignored."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = Field(1, ge=1, le=MOST_COMPLETIONS)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(1.0, ge=0, le=100)
    top_p: float | None = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(0, ge=-1, lt=1 << 31)
    min_p: float | None = Field(0.0, ge=0, le=1)
    repetition_penalty: float | None = Field(1.0, ge=0.01, le=100)
    presence_penalty: Neutral | None = 0.0
    frequency_penalty: Neutral | None = 0.0
    logit_bias: dict[str, Neutral] | None = None
    stop: Stop = None
    stop_token_ids: list[Token] | None = Field(None, max_length=MOST_COMPLETIONS)
    ignore_eos: bool = False
    seed: int | None = None

    @property
    def counts_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wish(self) -> SamplingWish:
        shared = set(SamplingWish.model_fields) & set(OpenAIBody.model_fields)
        given = {name: getattr(self, name) for name in shared if getattr(self, name) is not None}
        return SamplingWish(**{"max_tokens": None, **given})


class CompletionBody(OpenAIBody):
    """POST /v1/completions"""

    max_tokens: int | None = Field(16, ge=1)
    prompt: str | TokenIds | Annotated[list[str], Field(min_length=1)] | Annotated[list[TokenIds], Field(min_length=1)]
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: Annotated[bool, Field(strict=True)] = False
    suffix: None = None

    @property
    def alternatives(self) -> int:
        """Likeliest tokens to name beside each sampled one."""
        return self.logprobs or 0

    @property
    def prompts(self) -> list[str | list[int]]:
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return self.prompt if several else [self.prompt]

    @model_validator(mode="after")
    def _within_what_is_served(self) -> Self:
        if self.echo:
            raise ValueError("echo is not served")
        if len(self.prompts) * (self.n or 1) > MOST_COMPLETIONS:
            raise ValueError(f"at most {MOST_COMPLETIONS} completions a request")
        return self


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _is_text(self) -> Self:
        """Parts are joined; what is no text is refused, since no processor for it is loaded."""
        if isinstance(self.content, list):
            if any(not isinstance(part.get("text"), str) for part in self.content):
                raise ValueError("only text content is served")
            self.content = "".join(part["text"] for part in self.content)
        return self


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions"""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tools: list[dict[str, Any]] | None = None
    """Shown to the model through its chat template; calls come back as text."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def alternatives(self) -> int:
        """Likeliest tokens to name beside each sampled one."""
        return self.top_logprobs or 0 if self.logprobs else 0

    @property
    def wish(self) -> SamplingWish:
        wish = super().wish
        limit = self.max_completion_tokens or self.max_tokens
        return wish.model_copy(update={"max_tokens": limit})
