"""Plain data that crosses module and rank boundaries: no behaviour, no torch.

Lists are aligned token by token unless a field says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np

JsonObject = dict[str, Any]
"""A parsed JSON object: a dataset row, a request body, a record in a run folder."""
FinishReason = Literal["stop", "length", "abort", "repetition"]
CUT_REASONS = ("length", "repetition")
"""Reasons of completions that the sampler ended, and not the policy."""
Routes: TypeAlias = "np.ndarray"
"""[tokens, layers, experts per token]: the experts that each layer with experts chose for a token. uint8, or int16 for
models of more than MAX_UINT8_EXPERTS."""
MAX_UINT8_EXPERTS = 256
ANSWER_COLUMNS = (
    "answer", "solution", "ground_truth", "final_answer", "target", "gold", "label", "expected", "output",
)  # fmt: skip
"""Columns of reference answers in items, the most likely one first."""
STDERR = "_stderr"
"""Suffix of the name of a metric's standard error over prompts."""


class ContextGroup(NamedTuple):
    """This rank's place in the group of ranks that each micro-batch is split over (policy.context_parallel)."""

    rank: int
    size: int
    name: str
    """Name of the torch process group of these ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One question, tokenized.

    Example: Prompt(index=7, token_ids=[3, 9], text="3+4=", item={"answer": "7"}, source="arithmetic")
    """

    index: int
    """Position in the run's stream of prompts (training) or in the held-out list (evaluation)."""
    token_ids: list[int]
    text: str
    """The prompt as the model reads it, after the chat template."""
    item: JsonObject
    """The dataset row or task instance for the scorer; 'prompt' holds the prompt in the user's form."""
    source: str
    """Name of the environment that made the prompt. Also the key of the prompt's scorer."""
    pattern: str | None = None
    """Regular expression that constrains the completions; None: unconstrained."""
    by_opponent: bool = False
    """True: completed once by the frozen opponent, to continue a game, and not trained."""
    template: JsonObject = field(default_factory=dict)
    """Arguments of the chat template besides the messages, also for later messages of an episode: tools, variables."""

    @property
    def answer(self) -> str | None:
        """The item's reference answer as text; None if it has none."""
        found = next((self.item[name] for name in ANSWER_COLUMNS if self.item.get(name) is not None), None)
        return None if found is None else str(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sampled sequence.

    Example: Completion(token_ids=[12, 9], sampling_logprobs=[-0.2, -1.1], finish_reason="stop", policy_version=7)
    """

    token_ids: list[int]
    sampling_logprobs: list[float]
    """The engine's log-probability of each sampled token, at the sampling temperature."""
    finish_reason: FinishReason
    policy_version: int
    """Completed optimizer steps of the weights that sampled the first token."""
    newer_versions: list[tuple[int, int]] = field(default_factory=list)
    """(start, policy_version) of each later part that newer weights sampled. start: a position in token_ids."""
    routes: Routes | None = field(default=None, compare=False)
    """Routes of the prompt and of all sampled tokens but the last, which is never an input. None: not requested."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Result of scoring one completion. Example: Score(reward=1.0, parts={"format": 0.5, "correct": 1.0})"""

    reward: float | None
    """None: not applicable, or scoring failed; the rollout then has no learning signal."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named components, for metrics."""
    error: str | None = None
    """One line about the exception that scoring raised. With a reward: the answer could not be read."""

    @property
    def failed(self) -> bool:
        """True if scoring failed, which says nothing about the answer."""
        return self.error is not None and self.reward is None

    @property
    def unscorable(self) -> bool:
        """True if the scorer works and raised on this answer."""
        return self.error is not None and self.reward is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """All turns of one episode, prompt included, and its reward."""

    token_ids: list[int]
    """Prompt, then every sampled and observed token."""
    loss_mask: list[bool]
    """True for tokens that the policy sampled and that are trained."""
    sampling_logprobs: list[float] | None
    """0.0 where loss_mask is False. None: unknown; the trainer recomputes them before the first update."""
    prompt_length: int
    """Number of tokens before the first sampled token."""
    text: str
    """The completion as text, of an episode all of its sequences, for people, logs and maj@k."""
    finish_reason: FinishReason
    policy_version: int
    """As in Completion; the version of the oldest token."""
    newer_versions: list[tuple[int, int]] = field(default_factory=list)
    """As in Completion."""
    temperature: float
    """Temperature of sampling_logprobs; the trainer divides its logits by this temperature."""
    score: Score
    advantages: list[float] | None = None
    """One for each sampled token, given by the environment. None: computed from the group's rewards."""
    plain: bool = False
    """Sampled by this run's engine without top_p, top_k, min_p, penalties or a pattern: the policy of the same version
    must then give the same log-probabilities, up to rounding, or the run stops (freshness.py)."""
    ref_logprobs: list[float] | None = None
    """From the environment, 0.0 where loss_mask is False. None: computed by the trainer's reference model."""
    routes: Routes | None = field(default=None, compare=False)
    """Routes of the first tokens, as the engine chose them. The policy chooses the experts of all other tokens."""
    further: list[Rollout] = field(default_factory=list)
    """Sequences of the same episode whose prompts do not extend this one. They are trained with the same advantage."""

    @property
    def sequences(self) -> list[Rollout]:
        """The training sequences of the episode."""
        return [self, *self.further]

    @property
    def completion_tokens(self) -> int:
        """Tokens after the prompts of all sequences, sampled and observed."""
        return sum(len(one.token_ids) - one.prompt_length for one in self.sequences)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A prompt and its completions."""

    prompt: Prompt
    rollouts: list[Rollout]
    advantages: list[float] = field(default_factory=list)
    """One for each rollout, computed from their rewards; empty if the group is not trained."""


def shallow(record: Any) -> JsonObject:
    """Return the fields of a record by name. asdict() would also copy every token in them."""
    return {each.name: getattr(record, each.name) for each in fields(record)}
