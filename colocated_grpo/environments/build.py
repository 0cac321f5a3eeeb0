"""Builds the environments and evaluation sets of a run from its config. Each type of source has one builder."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

from colocated_grpo.environments import base, registry
from colocated_grpo.environments.prompts import PromptEncoder, build_template, check_is_read
from colocated_grpo.environments.rewards.functions import RewardScorer, build_rewards, start_workers
from colocated_grpo.environments.rewards.scoring import TaskScorer
from colocated_grpo.environments.streams import GeneratedItems, Mixture, PromptSource, SequenceStream, UnsolvedItems
from colocated_grpo.environments.user_code.loading import unique_names
from colocated_grpo.settings import evaluation, generation, sources
from colocated_grpo.settings.base import without_folder
from colocated_grpo.settings.schema import AtroposSourceConfig, Config, LossConfig, TurnsSourceConfig
from colocated_grpo.types import Prompt

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from colocated_grpo.environments.agents.programs import OpenEpisodes

MAX_DROPPED_HELD_OUT = 1000
"""Maximum items that may be dropped while the prompts of an evaluation are collected."""


@dataclass(frozen=True, kw_only=True)
class Environments:
    """All environments and evaluation sets of a run."""

    trained: Sequence[base.Environment]
    sets: Sequence[base.Environment]
    """Evaluation sets, in the order of the config."""
    weights: Mapping[str, float]
    """Relative share of each environment in the training prompts, by `Prompt.source`."""
    encoder: PromptEncoder
    seed: int
    skip_solved: generation.SkipSolvedConfig | None
    scorers: Mapping[str, base.Scorer]
    """By `Prompt.source`, as `episodes` and `limits`."""
    episodes: Mapping[str, base.Playable]
    limits: Mapping[str, base.AgentLimits]
    open_episodes: "OpenEpisodes | None"
    """Open episodes, through which the agents of this rank sample. None if no environment has agents."""

    def load_reward_models(self, device: "torch.device") -> None:
        """Load the weights of reward models. Call before an engine's cache is sized. Raises EnvironmentSetupError."""
        from colocated_grpo.environments.rewards.reward_model import RewardModel  # imports torch

        for scorer in self.scorers.values():
            for one in scorer.functions if isinstance(scorer, RewardScorer) else ():
                if isinstance(one.function, RewardModel):
                    one.function.load(device)

    def open_source(self) -> PromptSource:
        """Return the source of training prompts. Like all methods below it reads data, so it is for rank 0 only."""
        streams = {each.name: each.items.open_stream(self.seed) for each in self.trained}
        for each in self.trained:
            # Fail before the engine is built if no prompt is usable. Not for games: drawing a prompt would begin one.
            if isinstance(streams[each.name], SequenceStream):
                PromptSource({each.name: each.items.open_stream(self.seed)}, {each.name: 1.0}, self.encoder).next(1)
        if self.skip_solved is not None:
            streams = {name: UnsolvedItems(stream, name, self.skip_solved) for name, stream in streams.items()}
        return PromptSource(streams, self.weights, self.encoder)

    def held_out(self, n: int) -> list[Prompt]:
        """Return up to n prompts that are never trained on, mixed by weight. Every call returns the same prompts."""
        if not self.trained:
            return []
        mixture = Mixture(self.weights)
        for _ in range(n):
            mixture.counts[mixture.next_name()] += 1
        prompts: list[Prompt] = []
        for each in self.trained:
            items = each.items.held_out(self.seed)
            prompts += self._encoded(each.name, items, mixture.counts[each.name], first_index=len(prompts))[0]
        return prompts

    def evaluated(self, one: base.Environment, count: int | None, first_index: int) -> tuple[list[Prompt], int]:
        """Return an evaluation set's prompts and the number of dropped items. count: None: `default_count`."""
        wanted = one.items.default_count if count is None else count
        return self._encoded(one.name, one.items.evaluated(self.seed), wanted, first_index)

    def _encoded(
        self, source: str, items: Iterator[base.Item], count: int, first_index: int
    ) -> tuple[list[Prompt], int]:
        """Return up to `count` prompts and the number dropped. Raises EnvironmentSetupError if all are dropped."""
        prompts: list[Prompt] = []
        dropped = 0
        for item in islice(items, count + MAX_DROPPED_HELD_OUT):
            if len(prompts) == count:
                break
            if (prompt := self.encoder.encode(item, index=first_index + len(prompts), source=source)) is None:
                dropped += 1
            else:
                prompts.append(prompt)
        if dropped and not prompts:
            raise self.encoder.no_usable_prompt(source, dropped)
        return prompts, dropped


@dataclass(frozen=True, kw_only=True)
class _RunValues:
    """Values of the run that builders need in addition to the entry itself."""

    seed: int
    loss: LossConfig
    optimizer_steps: int
    max_tokens: int
    """Maximum tokens of a sequence: prompt and completion together."""

    @cached_property
    def open_episodes(self) -> "OpenEpisodes":
        from colocated_grpo.environments.agents.programs import OpenEpisodes

        return OpenEpisodes()


def build_environments(
    config: Config, tokenizer: "PreTrainedTokenizerBase", vocab_size: int | None = None
) -> Environments:
    """Resolve names and import user code, except filters of rows; read no data. Raises EnvironmentSetupError.

    vocab_size: of the model, to check prompts.
    """
    entries = [entry for entry in config.environments if not isinstance(entry, AtroposSourceConfig)]
    sets = {f"{evaluation.PREFIX}/{entry.name}": entry.source for entry in config.evaluation.sets}
    # Scorers and stream positions are stored by name. Names leave out folders, because a resumed run has absolute paths
    # and its files may have moved.
    names = unique_names([*sets, *(without_folder(entry.name) for entry in entries)], "#")[len(sets) :]
    trained = dict(zip(names, entries, strict=True))
    variables = config.model.chat_template_kwargs
    for name in variables:
        check_is_read(tokenizer, f"model.chat_template_kwargs.{name}", name)
    run = _RunValues(
        seed=config.seed,
        loss=config.loss,
        optimizer_steps=config.optimizer_steps,
        max_tokens=config.max_sequence_tokens,
    )
    built = {name: BUILDERS[entry.type](name, entry, run) for name, entry in (trained | sets).items()}
    limits = {name: each.limits for name, each in built.items() if each.limits is not None}
    templates = {name: build_template(entry, name, tokenizer, variables) for name, entry in (trained | sets).items()}
    return Environments(
        trained=[built[name] for name in trained],
        sets=[built[name] for name in sets],
        weights={name: entry.weight for name, entry in trained.items()},
        encoder=PromptEncoder(tokenizer, config.rollout.max_prompt_tokens, templates, vocab_size),
        seed=config.seed,
        skip_solved=config.rollout.skip_solved,
        scorers={name: each.scorer for name, each in built.items() if each.scorer is not None},
        episodes={name: each.episode for name, each in built.items() if each.episode is not None},
        limits=limits,
        open_episodes=run.open_episodes if limits else None,
    )


def _task(name: str, entry: sources.TaskSourceConfig, run: _RunValues) -> base.Environment:
    task = registry.build_task(entry.name, entry.args, entry.given)
    return base.Environment(name=name, items=GeneratedItems(name, task), scorer=TaskScorer(task))


def _dataset(name: str, entry: sources.DatasetSourceConfig, run: _RunValues) -> base.Environment:
    from colocated_grpo.environments.rows.dataset import RowItems

    key = f"environments {name!r}"
    rewards = build_rewards(entry.rewards, f"{key}: rewards")
    scorer = RewardScorer(rewards, run.optimizer_steps, start_workers(entry.rewards, rewards, f"{key}: rewards"))
    return base.Environment(name=name, items=RowItems(name, entry, scorer.check_item), scorer=scorer)


def _episode(name: str, entry: sources.EpisodeSourceConfig, run: _RunValues) -> base.Environment:
    episode = registry.build_episode(entry.name, entry.args, entry.given)
    return base.Environment(name=name, items=GeneratedItems(name, episode), episode=episode)


def _agent(name: str, entry: sources.AgentSourceConfig, run: _RunValues) -> base.Environment:
    from colocated_grpo.environments.agents.programs import AgentEpisode, build_agent
    from colocated_grpo.environments.rows.dataset import RowItems

    key = f"environments {name!r}"
    return base.Environment(
        name=name,
        items=RowItems(name, entry, lambda item: None),
        episode=AgentEpisode(build_agent(entry.program, entry.arguments, key), run.open_episodes),
        limits=base.AgentLimits(
            max_tokens=run.max_tokens, max_requests=entry.max_requests, max_running=entry.max_running
        ),
    )


def _turns(name: str, entry: TurnsSourceConfig, run: _RunValues) -> base.Environment:
    from colocated_grpo.environments.turns.games import TurnGames

    games = TurnGames(name, entry, run.seed)
    if games.delayed and run.loss.correction.mode == "off" and run.loss.old_logprobs == "trainer":
        raise base.EnvironmentSetupError(
            f"loss.correction.mode=off: turns of {name!r} train after the end of their game, with newer weights than "
            "sampled them, and need importance weights; set another mode, or loss.old_logprobs=sampling"
        )
    return base.Environment(name=name, items=games, scorer=games)


BUILDERS: dict[str, Callable[[str, Any, _RunValues], base.Environment]] = {
    "task": _task,
    "dataset": _dataset,
    "episode": _episode,
    "agent": _agent,
    "turns": _turns,
}
"""Builders by `type` of an entry. Each builder imports only what its type needs. Type `atropos` has no builder: its
groups arrive from outside the run."""
