"""Settings of the model, the vLLM engines, sampling, and evaluation on held-out prompts and separate sets."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, model_validator

from colocated_grpo.settings import sources
from colocated_grpo.settings.base import (
    CodeName,
    FileName,
    Fraction,
    InputFile,
    Integer,
    NonNegative,
    Number,
    Positive,
    Section,
    TemplateVariables,
)
from colocated_grpo.types import JsonObject

MIN_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this value. At temperature 0, vLLM samples greedily."""


class ModelConfig(Section):
    name: InputFile
    """Local folder or Hugging Face name of a causal language model."""
    revision: str | None = None
    """Branch, tag or commit on the Hub. Default: the main branch."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint. Only for repositories you trust."""
    tokenizer: InputFile | None = None
    """Local folder or Hugging Face name of another tokenizer. Default: the model's own."""
    chat_template: InputFile | None = None
    """Chat template: Jinja text, or the path of a file with Jinja text. Default: the tokenizer's template."""
    chat_template_kwargs: TemplateVariables = {}
    """Variables of the chat template, such as {enable_thinking: false}. They apply to the prompts of every environment
    and evaluation set, and to chat requests to the engine's server that do not set the same variables."""


def is_inline(chat_template: str) -> bool:
    """Return True if `model.chat_template` is Jinja text. Text without a brace is a file's name, not Jinja text."""
    return "{" in chat_template


class EngineConfig(Section):
    placement: Literal["colocated", "server"] = "colocated"
    """colocated: every rank has an engine in its own process. server: engines run in separate processes, on GPUs of
    their own or on the ranks' GPUs, and serve over HTTP."""
    bridge: Literal["broadcast", "shared", "adapter", "restart"] = "broadcast"
    """Transport of weights to the servers. broadcast: over NCCL, or gloo on the CPU. shared: trainer and server use the
    same copy in memory. adapter: the server loads the saved adapter (policy.lora). restart: the server restarts from a
    saved model. No effect with `placement: colocated`."""
    urls: list[str] = []
    """Addresses of running servers (python -m colocated_grpo.servers). Empty: the launcher starts them."""
    api_key_variable: str | None = None
    """Name of the environment variable with the API key of the servers."""
    bridge_config: FileName | None = None
    """With `bridge: shared`: path of the server's vllm_bridge_config.json. Default: the file in $LOGDIR, else in the
    working directory."""
    server_timeout: Number = Field(600.0, gt=0)
    """Maximum seconds for a server to start, to restart or to answer. After this time, the run saves a checkpoint and
    ends."""
    tensor_parallel_size: Positive = 1
    """Number of consecutive ranks that form one colocated engine, or number of GPUs of one engine server. Must divide
    the model's attention heads and the number of ranks."""
    max_num_seqs: Positive | None = None
    """Number of sequences that one engine decodes at the same time. Default: the engine's part of a step's completions,
    at least 64 and at most 512; 256 with an atropos environment."""
    max_model_len: Positive | None = None
    """Maximum length of prompt plus completion in tokens. Reduced to the model's own limit. Default:
    rollout.max_prompt_tokens + rollout.max_completion_tokens."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the engine's weights. auto: policy.compute_dtype."""
    gpu_memory_utilization: Number | None = Field(None, gt=0, le=1)
    """Fraction of the GPU's memory that the engine may use, as in vLLM. Default: the KV cache gets the memory that the
    trainer leaves free, but at most as much as the engine's sequences can use."""
    kv_cache_memory_bytes: Positive | None = None
    """Exact size of the KV cache in bytes. Takes precedence over gpu_memory_utilization."""
    enforce_eager: bool = False
    """Decode without CUDA graphs: the engine starts faster and decodes more slowly."""
    sleep: bool = True
    """Free the engine's weights and KV cache while the policy trains, unless engine and training use less than half of
    the memory that is free for training. With `weights: shared` or sync_frequency above 1, the engine's weights stay on
    the device. No effect on CPU."""
    args: JsonObject = {}
    """Further vLLM engine arguments, passed unchanged. Example: {quantization: fp8}."""

    def problems(self) -> Iterator[str]:
        """Yield a line for each contradiction in this section."""
        for name in self.args:
            if name in EngineConfig.model_fields:
                yield f"engine.args.{name}: has a setting of its own; write engine.{name}"
        for url in self.urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                yield f"engine.urls={url!r}: must be an address like http://localhost:9001"
        if len(set(self.urls)) < len(self.urls):
            yield f"engine.urls: repeats an address: {', '.join(self.urls)}"


class ResampleConfig(Section):
    max_rounds: Positive = 3
    """Maximum number of extra sampling rounds per step. A round replaces the groups that lack reward variance. It
    samples as many fresh prompts as this requires at the step's own rate of groups with reward variance, but at most
    rollout.prompts_per_step."""


class SkipSolvedConfig(Section):
    after: Positive = 2
    """Skip a prompt after its group was solved in this many consecutive visits."""
    reward: Number = Field(1.0, gt=0)
    """A group is solved if all its rewards are equal and at least this value."""


class RolloutConfig(Section):
    prompts_per_step: Positive = 32
    """Number of prompts in one step, over all ranks. A step trains prompts_per_step * group_size completions."""
    group_size: Integer = Field(8, ge=2)
    """Number of completions sampled for each prompt. At least 2, because the rewards of a prompt's completions are
    compared with each other."""
    max_prompt_tokens: Positive = 1024
    """Maximum prompt length in tokens. Longer prompts are dropped, never truncated (metric prompts_dropped). Both
    default lengths are lowered, with a note, where they exceed the positions of the model."""
    max_completion_tokens: Positive = 1024
    """Maximum completion length in tokens. Sampling stops there with finish_reason 'length'. In an episode, the limit
    applies to all tokens after the prompt, including observations."""
    temperature: Number = Field(1.0, ge=MIN_TEMPERATURE, le=2)
    """Sampling temperature. The trainer divides its logits by the same value, so that engine and trainer use the same
    distribution."""
    top_p: Number = Field(1.0, gt=0, le=1)
    """Nucleus sampling: keep the most likely tokens up to this total probability; 1 keeps all tokens. Below 1, the
    engine's log-probabilities are renormalised over the kept tokens and no longer match the trainer's
    log-probabilities."""
    top_k: Integer = Field(0, ge=0)
    """Sample from the k most likely tokens; 0 keeps all tokens. Changes log-probabilities like top_p."""
    min_p: Fraction = 0.0
    """Drop tokens whose probability is below this fraction of the most likely token's probability; 0 keeps all tokens.
    Changes log-probabilities like top_p."""
    repetition_penalty: Number = Field(1.0, gt=0)
    """vLLM's repetition penalty; 1 is none. Changes log-probabilities like top_p."""
    stop: list[str] = []
    """Strings that end a completion. The tokens of the string are part of the completion and are trained."""
    max_staleness: Literal[0, 1] = 0
    """0: generate, then train. 1 (with engine servers only): generate the next step's completions while the current
    step trains. These completions are sampled with weights that are one step older. The metric `staleness` reports the
    difference, and loss.correction corrects for it."""
    resample: ResampleConfig | None = None
    """Replace groups without reward variance by groups of fresh prompts in the same step (dynamic sampling). null: off.
    {}: on, with the defaults below."""
    skip_solved: SkipSolvedConfig | None = None
    """Skip prompts whose groups were solved in their last visits. null: off. {}: on, with the defaults below."""
    generation: Literal["sharded", "replicated"] = "sharded"
    """sharded: each prompt is generated by one engine. replicated: every engine generates every prompt, and the
    completions of rank 0's engine are used."""
    reward_workers: Positive = 8
    """Threads and worker processes per rank that compute rewards while the engine decodes. 1: rewards of one prompt at
    a time."""
    reward_timeout: Number = Field(60.0, gt=0)
    """Time limit in seconds for the rewards of one prompt. The time counts from the call of the reward, or from the
    rank's last sampled completion of the step if this is later. On timeout the prompt's completions count as failed,
    and hanging threads and processes are replaced. User code that blocks all threads of a rank for this long ends the
    run. This second limit is at least 10 s, and with episodes or agents at least tool_timeout."""
    tool_timeout: Number = Field(60.0, gt=0)
    """Time limit in seconds between two turns of an episode (tools, reward). On timeout the episode counts as
    failed."""
    max_reward_errors: Fraction = 0.2
    """Maximum fraction of a step's completions whose reward may fail. Above it, the run stops and shows the first
    error. A completion that a working scorer cannot read does not count as failed (metric `unscorable`). Its reward is
    0, or the lowest reward of the prompt's other completions if that reward is negative after weighting."""


HELD_OUT = "held_out/reward"
PREFIX = "eval"
MEAN = "mean"

ANSWERS = {"exact_match": "final_answer", "gsm8k": "last_number", "math_verify": "boxed"}
"""Built-in reward -> function that extracts the answer that the reward compares."""

SetSource = Annotated[
    sources.TaskSourceConfig | sources.DatasetSourceConfig | sources.EpisodeSourceConfig | sources.AgentSourceConfig,
    Field(discriminator="type"),
]


class EvaluationSetConfig(Section):
    """Prompts evaluated at regular intervals, separate from the training environments."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """Part of the metrics' names: eval/<name>/mean."""
    source: SetSource
    """Source of the prompts. A dataset or agent provides all rows of `split`, in order; a task or episode provides its
    held-out items. A plain name is short for {type: dataset, name: ...}."""
    rewards: list[Annotated[sources.RewardConfig, BeforeValidator(sources.reward_by_name)]] | None = None
    """Reward functions of a dataset, short for `rewards` inside `source`."""
    prompts: Positive | None = None
    """Number of prompts. The first prompts of the source are used, so every evaluation has the same prompts. Default:
    all rows of a dataset or an agent; 64 prompts of a task or an episode."""
    samples: Positive = 1
    """Completions per prompt. pass@k is estimated for k = 1, 2, 4, ... up to this number."""
    temperature: Number = Field(1.0, ge=0, le=2)
    """Sampling temperature; 0 is greedy."""
    top_p: Number = Field(1.0, gt=0, le=1)
    """Nucleus sampling: keep the most likely tokens up to this total probability; 1 keeps all tokens."""
    every: NonNegative | None = None
    """Steps between evaluations of this set. The set is also evaluated at the start and the end of the run. 0: never;
    only tools.evaluate uses the set. Default: evaluation.every."""
    pass_reward: Number = 1.0
    """Minimum reward of a completion that counts as passed in pass@k and maj@k."""
    answer: CodeName | None = None
    """Function that extracts from a completion's text the answer that maj@k compares: final_answer, last_number, boxed,
    or your own 'package.module:function' or 'path/to/file.py:function'. Your function returns None if the text contains
    no answer. Default: the function that matches the reward exact_match, gsm8k or math_verify. With other rewards and
    no function, there is no maj@k."""

    @model_validator(mode="before")
    @classmethod
    def _long_form(cls, values: object) -> object:
        """Write a plain source in full, and move `rewards` into the source."""
        if not isinstance(values, dict):
            return values
        source, rewards = values.get("source"), values.get("rewards")
        if isinstance(source, str):
            source = {"type": "dataset", "name": source}
        if not isinstance(source, dict):
            return values
        source = {"type": "dataset" if rewards or "rewards" in source else "task", **source}
        if rewards is not None and "rewards" in source:
            raise ValueError("rewards are given twice, in the set and in its source; remove one of them")
        if rewards is not None and source["type"] != "dataset":
            raise ValueError(f"rewards belong to a dataset; a source of type {source['type']} scores by itself")
        if source["type"] == "dataset" and rewards is None and "rewards" not in source:
            raise ValueError("a dataset needs rewards, such as rewards: [math_verify]")
        if rewards is not None:
            source["rewards"] = rewards
        return {**values, "source": source, "rewards": None}

    @property
    def answer_name(self) -> str | None:
        """Name of the function whose results maj@k compares; None if there is no maj@k."""
        if self.answer is not None or not isinstance(self.source, sources.DatasetSourceConfig):
            return self.answer
        return next((ANSWERS[reward.name] for reward in self.source.rewards if reward.name in ANSWERS), None)

    @property
    def pass_ks(self) -> list[int]:
        """Values of k in pass@k: the powers of two up to the number of samples, and the number of samples itself."""
        powers = {1 << exponent for exponent in range(self.samples.bit_length())}
        return sorted(powers | {self.samples})

    @property
    def rates(self) -> list[str]:
        """Names of the metrics where higher is better, in display order."""
        majority = [f"maj@{self.samples}"] if self.samples > 1 and self.answer_name is not None else []
        return [MEAN, *(f"pass@{k}" for k in self.pass_ks), *majority]

    def problems(self, key: str) -> Iterator[str]:
        """Yield a line for each contradiction in this set."""
        if self.answer is not None and ":" not in self.answer and self.answer not in ANSWERS.values():
            yield (
                f"{key}.answer={self.answer!r}: must be one of {', '.join(ANSWERS.values())}, or "
                "your own module:function or path/to/file.py:function"
            )
        plain = type(self.source).model_fields
        for name in ("eval_split", "held_out", "shuffle", "weight"):
            value = getattr(self.source, name, None)
            if name in plain and value != plain[name].default:
                yield (
                    f"{key}.source.{name}={value}: has no meaning here; a set uses its prompts in "
                    "order, and all rows of `split`"
                )


class EvaluationConfig(Section):
    every: NonNegative = 10
    """Steps between evaluations on held-out prompts. The run also evaluates at its start and its end. 0: never."""
    prompts: Positive = 64
    """Number of held-out prompts per evaluation, taken from all environments by weight. Every evaluation has the same
    prompts."""
    samples_per_prompt: Positive = 1
    """Completions per held-out prompt."""
    temperature: Number = Field(1.0, ge=0, le=2)
    """Sampling temperature on held-out prompts; 0 is greedy. rollout.top_p, top_k, min_p and repetition_penalty are not
    applied."""
    sets: list[EvaluationSetConfig] = []
    """Additional evaluation sets with their own metrics: docs/guides/evaluation.md."""
    keep_best: str | None = None
    """Metric that selects the best evaluated step: held_out/reward, or eval/<name>/mean, pass@k or maj@k of a set. The
    checkpoint of the best step is kept. The weights of the best step are exported as best_model/ (an adapter as
    best_adapter/). null: none."""
    patience: Positive | None = None
    """End the run after this many evaluations in a row without a new best value of keep_best. null: never."""

    def interval(self, entry: EvaluationSetConfig) -> int:
        """Return the steps between evaluations of a set; 0: never."""
        return self.every if entry.every is None else entry.every

    def problems(self) -> Iterator[str]:
        """Yield a line for each contradiction in this section."""
        temperatures = {"evaluation.temperature": self.temperature}
        temperatures |= {f"evaluation.sets.{i}.temperature": entry.temperature for i, entry in enumerate(self.sets)}
        for key, temperature in temperatures.items():
            if 0 < temperature < MIN_TEMPERATURE:
                yield f"{key}={temperature:g}: must be 0 (greedy) or at least {MIN_TEMPERATURE:g}"
        names = [entry.name for entry in self.sets]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield (
                f"evaluation.sets: {names.count(name)} sets are named {name!r}; their metrics would have the same names"
            )
        for index, entry in enumerate(self.sets):
            yield from entry.problems(f"evaluation.sets.{index}")
        if self.keep_best is not None and self.keep_best not in (possible := self._metrics()):
            listed = f"must be one of {', '.join(possible)}" if possible else "needs evaluation.every above 0, or a set"
            yield f"evaluation.keep_best={self.keep_best}: {listed}"
        if self.patience is not None and self.keep_best is None:
            yield f"evaluation.patience={self.patience}: needs evaluation.keep_best, the metric that has to improve"

    def _metrics(self) -> list[str]:
        """Return the metrics that keep_best accepts."""
        own = [f"{PREFIX}/{entry.name}/{rate}" for entry in self.sets if self.interval(entry) for rate in entry.rates]
        return [HELD_OUT, *own] if self.every else own

    def remarks(self, trained: Sequence[sources.EnvironmentConfig]) -> Iterator[str]:
        """Yield a note for each set whose rows are also training rows."""
        sources_of_rows = (source for source in trained if isinstance(source, sources.RowsSourceConfig))
        used = {(source.name, source.subset, source.split) for source in sources_of_rows}
        for entry in self.sets:
            own = entry.source
            if isinstance(own, sources.RowsSourceConfig) and (own.name, own.subset, own.split) in used:
                name = f"evaluation set {entry.name!r}"
                yield f"{name}: its rows are also trained on, so it does not measure generalization"
