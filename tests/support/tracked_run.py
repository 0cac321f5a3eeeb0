"""A small run with made-up metrics and rollouts, for the tests of tracking, report and tools."""

import io
from pathlib import Path

from rich.console import Console

from colocated_grpo.settings.schema import Config
from colocated_grpo.tracking.ending import RunOutput, make_output
from colocated_grpo.tracking.tracker import Tracker
from colocated_grpo.types import Group, Prompt, Rollout, Score

HOSTILE = "</pre></div><script>alert(1)</script>\x1b[2J\x1b]0;owned\x07\ud800"


def config_of(**tracking: object) -> Config:
    return Config.model_validate(
        {
            "model": {"name": "tiny"},
            "environments": [{"type": "task", "name": "sort"}],
            "training_steps": 6,
            "tracking": {"console": "plain", **tracking},
        }
    )


def rollout_of(reward: float | None, text: str, error: str | None = None) -> Rollout:
    return Rollout(
        token_ids=[1, 2, 3, 4],
        loss_mask=[False, True, True, True],
        sampling_logprobs=[0.0, -1.0, -1.0, -1.0],
        prompt_length=1,
        text=text,
        finish_reason="stop",
        policy_version=0,
        temperature=1.0,
        score=Score(reward=reward, parts={} if reward is None else {"correct": reward}, error=error),
    )


def groups_of(step: int, prompts: int = 3, group_size: int = 4) -> list[Group]:
    """Groups in which every reward is different: prompt index + sample / 10."""
    return [
        Group(
            prompt=Prompt(
                index=index, token_ids=[1], text=f"sort {index}", item={"answer": f"{index} sorted"}, source="sort"
            ),
            advantages=[0.5 * (sample - 1) for sample in range(group_size)],
            rollouts=[rollout_of(index + sample / 10, f"step {step} sample {sample}") for sample in range(group_size)],
        )
        for index in range(prompts)
    ]


def row_of(step: int) -> dict[str, float]:
    return {
        "reward": 0.1 * step,
        "mismatch/kl": 1e-6 * (step + 1),
        "seconds/step": 1.0,
        "seconds/generate": 0.5,
        "seconds/train": 0.25,
        "my_own/metric": float(step),
    }


def output_of(config: Config, console: Console | None = None) -> RunOutput:
    return make_output(config.tracking.console, config.training_steps, is_main=True, console=console)


class TrackedRun:
    """A tracker that writes to `run_dir` and prints to a string."""

    def __init__(self, run_dir: Path, config: Config | None = None, encoding: str = "utf-8") -> None:
        self.run_dir = run_dir
        self.config = config or config_of()
        self._bytes = io.BytesIO()
        self._stream = io.TextIOWrapper(self._bytes, encoding=encoding)
        self.output = output_of(self.config, Console(file=self._stream))
        self.tracker = Tracker(run_dir, self.output, self.config.tracking)

    @property
    def printed(self) -> str:
        self._stream.flush()
        return self._bytes.getvalue().decode(self._stream.encoding)

    def train(self, first_step: int = 0, last_step: int = 6) -> "TrackedRun":
        """Record steps first_step ... last_step - 1, with an evaluation before each even step, without closing."""
        facts = {"model": "7 parameters in float32, 2 x CPU", "micro-batches": "64 tokens"}
        self.tracker.start(self.config.model_dump(mode="json"), facts, first_step, None)
        for step in range(first_step, last_step):
            if step % 2 == 0:
                self.evaluate(step)
            self.tracker.flush(step, row_of(step), groups_of(step))
        return self

    def evaluate(self, step: int) -> None:
        self.tracker.evaluation(step, {"held_out/reward": 0.2 + 0.1 * step}, groups_of(step, prompts=20, group_size=2))

    def finish(self) -> "TrackedRun":
        self.evaluate(6)
        self.tracker.close("finished")
        return self


def finished_run(run_dir: Path) -> Path:
    TrackedRun(run_dir).train().finish()
    return run_dir
