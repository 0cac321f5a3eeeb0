"""The objects of a run, which the loop works with. `assembly/` builds them; nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from colocated_grpo.callbacks import Callbacks
    from colocated_grpo.checkpoint.checkpoints import Checkpoints
    from colocated_grpo.evaluation.evaluator import Best, Evaluator
    from colocated_grpo.freshness import Judge
    from colocated_grpo.phases import Choreography, Clock
    from colocated_grpo.policy.export import Export
    from colocated_grpo.policy.masters import Reference
    from colocated_grpo.policy.policy import Policy
    from colocated_grpo.rollout.collect import Collector
    from colocated_grpo.rollout.engine import RolloutEngine
    from colocated_grpo.rollout.supply import Supply
    from colocated_grpo.runtime.distributed import World
    from colocated_grpo.runtime.supervision import StopRequest
    from colocated_grpo.settings.schema import Config
    from colocated_grpo.summaries import RewardCheck
    from colocated_grpo.tracking.hub import Hub
    from colocated_grpo.tracking.tracker import NullTracker, Tracker
    from colocated_grpo.types import JsonObject

GOAL_REACHED = "goal_reached"
"""Key in a checkpoint's state: the environment has reached its goal, so no step is left."""
BEST = "best"
"""Key in a checkpoint's state: the record of the best evaluation."""
LEARNING_RATE = "learning_rate"
"""Key in a checkpoint's state: the learning rate that a callback has set, or None."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The objects that the loop works with."""

    config: Config
    """The settings. Automatic ones, such as the size of micro-batches, are resolved."""
    world: World
    stop: StopRequest
    folder: Path
    model_shape: JsonObject
    """Settings that determine the shapes of weights and adapter. A run resumes only if these settings are equal."""
    tokenizer: PreTrainedTokenizerBase
    policy: Policy
    reference: Reference | None
    engine: RolloutEngine
    collector: Collector
    supply: Supply
    choreography: Choreography
    rewards: RewardCheck
    judge_samples: Judge
    clock: Clock
    evaluator: Evaluator
    best: Best
    checkpoints: Checkpoints
    exports: list[Export]
    hub: Hub | None
    """None: nothing is pushed."""
    tracker: Tracker | NullTracker
    callbacks: Callbacks
    start: int
    """Steps completed by earlier parts of the run."""
    goal_reached: bool
    """True if an earlier part of the run has reached the environment's goal, so that no step is left."""
