"""Schema of a run's settings, with bounds and documentation. Some sections are in separate files.

Defaults are defined in these models and nowhere else. The module imports neither torch nor vllm. Losses and
environments are unions of models, selected by `type`.
"""

from typing import Literal, Self

from pydantic import Field

from colocated_grpo.settings.atropos import AtroposSourceConfig
from colocated_grpo.settings.base import INITIAL, FileName, Integer, NonNegative, Number, Positive, Section
from colocated_grpo.settings.evaluation import EvaluationConfig
from colocated_grpo.settings.generation import EngineConfig, ModelConfig, RolloutConfig
from colocated_grpo.settings.losses import AdvantageConfig, DAPOConfig, LossConfig
from colocated_grpo.settings.sources import EnvironmentConfig, OpponentConfig, TurnsSourceConfig, is_rewarded
from colocated_grpo.settings.training import BatchConfig, PolicyConfig


class CheckpointConfig(Section):
    every: NonNegative = 50
    """Steps between checkpoints. 0: only at the end and when a signal stops the run."""
    keep_last: Positive = 2
    """Number of checkpoints to keep. Older checkpoints are deleted."""
    final: bool = True
    """Save a checkpoint and export final_model/ after the last step."""
    export_every: NonNegative = 0
    """Steps between exports in Hugging Face format (step_N/ in the run folder). 0: only final_model/."""
    export_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of exported weights. auto: policy.compute_dtype."""
    export_merged: bool = False
    """With policy.lora: besides each exported adapter (final_adapter/, adapter_step_N/) also write the merged weights
    as a model (final_model/, step_N/)."""


class TrackingConfig(Section):
    console: Literal["auto", "live", "plain"] = "auto"
    """live: progress bar and table. plain: one line per step. auto: live on a terminal, else plain."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Log to Weights & Biases."""
    wandb_project: str = "colocated_grpo"
    """W&B project."""
    wandb_group: str | None = None
    """W&B group."""
    tensorboard: bool = False
    """Write TensorBoard events into the run folder."""
    completions_every: NonNegative = 0
    """Steps between tables of completions (with prompts and rewards) sent to W&B. 0: none. rollouts.jsonl has
    completions of every step (rollouts_per_step)."""
    completions_rows: Integer = Field(16, ge=1, le=1000)
    """Number of completions in each table of completions. They are evenly spaced from the worst to the best reward."""
    profile_step: NonNegative | None = None
    """Step (from 0) whose training phase is profiled on rank 0, into profile/ in the run folder. null: none."""
    rollouts_per_step: NonNegative = 4
    """Rollouts of each step that are written to rollouts.jsonl."""
    show_completion: bool = True
    """Show each step's completion with the median reward on the console, with its advantage and reference answer."""


class HubConfig(Section):
    repo: str
    """Model repository, OWNER/NAME. OWNER defaults to the token's owner. The repository is created if it does not
    exist. The token is read from HF_TOKEN or from the login stored by `hf auth login`."""
    private: bool = True
    """Create the repository as private. An existing repository is not changed."""
    every: NonNegative = 0
    """Steps between pushes. 0: only the final model or adapter."""
    timeout: Number = Field(3600.0, gt=0)
    """Maximum seconds of a push; a longer one is aborted and counts as failed. The run ends after its last push."""


class FreshnessConfig(Section):
    every: NonNegative = 1
    """Compare the engine's weights with the policy's weights, bit for bit, after every n-th sync. 0: check neither
    weights nor samples."""
    max_mean_diff: Number | None = Field(None, gt=0)
    """Largest accepted mean of |engine - policy| log-probability over the sampled tokens (mismatch/plain). Above this
    limit, the run stops before the optimizer step. The limit for the mean over a single completion (mismatch/worst) is
    five times as large. Default: 0.3 if the engine's weights or KV cache are quantized, else 0.1 if engine or policy is
    16-bit, 0.01 in float32. The limit is divided by a temperature below 1. Each optimizer step since sampling adds
    20000 times policy.lr to the limit."""


class Config(Section):
    model: ModelConfig
    """Model to train. `model: NAME` is short for `model: {name: NAME}`."""
    environments: list[EnvironmentConfig] = Field(min_length=1)
    """Sources of prompts and rewards, mixed by weight. Default: the built-in task arithmetic, with a note."""
    training_steps: Positive = 100
    """Steps of the whole run. A step samples one batch and makes batch.minibatches * batch.epochs optimizer steps."""
    sync_frequency: Positive = 1
    """Steps between weight syncs into the engine; an evaluation always syncs. Above 1, rollouts are sampled with older
    weights. The metric `staleness` reports the age of these weights in optimizer steps, and loss.correction corrects
    for the difference."""
    weights: Literal["copied", "shared"] = "copied"
    """copied: the policy has weights of its own, and each sync copies them into the engine. shared: policy and engine
    use the same tensors, so there is no sync; needs a single rank. The shared tensors stay on the device while the
    policy trains. A run can resume a checkpoint of the other mode."""
    seed: Integer = Field(0, ge=0, lt=2**32)
    """Determines all random numbers of the run."""
    deterministic: bool = False
    """Assign prompts to engines in a fixed order and use deterministic kernels, so that a resumed run repeats the
    uninterrupted run bit for bit. Slower."""
    numerics: Literal["fast", "exact"] = "fast"
    """exact: the policy computes, bit for bit, the log-probabilities that the engine computed while sampling. Each step
    checks this before the first update. On Hopper GPUs in 16 bit and on CPUs in float32, for Llama, Qwen 2 and 3,
    Mistral and Gemma 3; on GPUs also for Qwen 3 MoE and OLMoE. Slower."""
    output_dir: FileName = "runs"
    """Folder in which run folders are created."""
    run_name: str | None = None
    """Name of the run folder, new or resumed by --resume auto. Default: the config file's name and the start time."""
    policy: PolicyConfig = PolicyConfig()
    """Optimizer, precision and memory of the trained model."""
    engine: EngineConfig = EngineConfig()
    """vLLM engines: inside each rank, or servers."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling and rewards."""
    advantage: AdvantageConfig = AdvantageConfig()
    """Computation of advantages from rewards."""
    loss: LossConfig = DAPOConfig()
    """Objective, selected by `type`: grpo, dr_grpo, dapo, bnpo, cispo or gspo."""
    batch: BatchConfig = BatchConfig()
    """Packing, minibatches and epochs."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation on held-out prompts and separate sets, and selection of the best step."""
    freshness: FreshnessConfig = FreshnessConfig()
    """Checks that the engine's weights and the samples' log-probabilities match the policy's."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints and exports."""
    hub: HubConfig | None = None
    """Push the model or adapter to the Hugging Face Hub: docs/guides/sharing.md. null: off."""
    tracking: TrackingConfig = TrackingConfig()
    """Console, W&B, TensorBoard and logged rollouts."""

    @property
    def atropos(self) -> AtroposSourceConfig | None:
        """The Atropos entry; there is at most one."""
        return next((entry for entry in self.environments if isinstance(entry, AtroposSourceConfig)), None)

    @property
    def atropos_share(self) -> float:
        """Number of a step's prompts that the Atropos batch supplies. `rules` requires a whole number."""
        total = sum(entry.weight for entry in self.environments)
        return 0.0 if self.atropos is None else self.rollout.prompts_per_step * self.atropos.weight / total

    @property
    def opponent(self) -> OpponentConfig | None:
        """The opponent of the turn games. `rules` rejects games with different opponents."""
        turns = [source for source in self.environments if isinstance(source, TurnsSourceConfig)]
        return next((source.opponent for source in turns if source.opponent is not None), None)

    @property
    def opponent_model(self) -> ModelConfig | None:
        """Model that provides the opponent's initial weights."""
        if (opponent := self.opponent) is None:
            return None
        other = {"name": opponent.name, "revision": opponent.revision}
        return self.model if opponent.name == INITIAL else self.model.model_copy(update=other)

    @property
    def reference_model(self) -> ModelConfig | None:
        """Model of loss.kl.model; None: there is no reference, or it is the run's model."""
        name = self.loss.kl.model
        return None if name is None else ModelConfig(name=name, trust_remote_code=self.model.trust_remote_code)

    @property
    def is_rewarded(self) -> bool:
        """False if no environment gives rewards, so that only the KL penalty trains."""
        return any(map(is_rewarded, self.environments))

    @property
    def final_step(self) -> int | None:
        """The step after which the final weights are exported; None if no final weights are exported."""
        return self.training_steps if self.checkpoint.final else None

    @property
    def optimizer_steps(self) -> int:
        return self.training_steps * self.batch.updates

    @property
    def recomputes_logprobs(self) -> bool:
        """True if a forward pass over each batch computes log-probabilities before the batch's first update."""
        return self.batch.updates > 1 and self.loss.old_logprobs == "trainer"

    @property
    def is_mixed(self) -> bool:
        """True if the run has several environments. The metrics of each are then also recorded separately."""
        return len(self.environments) > 1

    @property
    def ranks_per_engine(self) -> int:
        """Number of the run's ranks that form one engine. 1 with engine servers, whose processes are no ranks."""
        return self.engine.tensor_parallel_size if self.engine.placement == "colocated" else 1

    @property
    def shares_weights(self) -> str | None:
        """The setting that makes policy and engine share tensors; None if no setting does."""
        if self.engine.placement == "server":
            return "engine.bridge" if self.engine.bridge == "shared" else None
        return "weights" if self.weights == "shared" else None

    @property
    def sources(self) -> list[EnvironmentConfig]:
        """Environments of training and of the evaluation sets."""
        return [*self.environments, *(entry.source for entry in self.evaluation.sets)]

    @property
    def structured(self) -> bool:
        """True if a grammar constrains some of the completions."""
        return any(isinstance(source, TurnsSourceConfig) and source.structured for source in self.environments)

    @property
    def max_sequence_tokens(self) -> int:
        return self.rollout.max_prompt_tokens + self.rollout.max_completion_tokens

    def with_values(self, section: str, **values: object) -> Self:
        """Return the config with other values in a section, without a check: with_values("batch", epochs=2)."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})
