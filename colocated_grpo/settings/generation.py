"""Settings of the model, the vLLM engines and sampling."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from colocated_grpo.settings.base import FileName, InputFile, Integer, Number, Positive, Section, TemplateVariables
from colocated_grpo.types import JsonObject


def _checked_url(text: str) -> str:
    with suppress(ValueError):  # an invalid port or address
        parts = urlsplit(text)
        if parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0:
            return text
    raise ValueError("must be http://HOST:PORT, or https")


Url = Annotated[str, AfterValidator(_checked_url)]
RESHAPING = ("top_p", "top_k", "min_p", "repetition_penalty")
"""Settings of a rollout that make the engine sample from another distribution, unless they have their defaults."""
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


REFUSED_ARGUMENTS = {
    "speculative_config": "not supported: on CPUs, vLLM samples from a wrong distribution",
    "model": "is the run's own model; write model.name",
    "tokenizer": "is the run's own tokenizer; write model.tokenizer",
    "logprobs_mode": "must be unset: training needs log-probabilities of the distribution that is sampled",
    "distributed_executor_backend": "must be unset: each engine runs inside its ranks",
    "data_parallel_size": "must be unset: each rank has an engine; --gpus or --nproc starts more ranks",
    "pipeline_parallel_size": "not supported; write engine.tensor_parallel_size",
}
"""Arguments of vLLM that would make engine and policy differ, or that vLLM implements wrongly."""


class EngineConfig(Section):
    placement: Literal["colocated", "server"] = "colocated"
    """colocated: every rank has an engine in its own process. server: engines run in separate processes, on GPUs of
    their own or on the ranks' GPUs, and serve over HTTP."""
    bridge: Literal["broadcast", "shared", "adapter", "restart"] = "broadcast"
    """Transport of weights to the servers. broadcast: over NCCL, or gloo on the CPU. shared: trainer and server use the
    same copy in memory. adapter: the server loads the saved adapter (policy.lora). restart: the server restarts from a
    saved model. No effect with `placement: colocated`."""
    urls: list[Url] = []
    """Addresses of running servers (colocated-grpo serve). Empty: the launcher starts them."""
    api_key_variable: str | None = None
    """Name of the environment variable with the API key of the servers."""
    bridge_config: FileName | None = None
    """With `bridge: shared`: path of the server's vllm_bridge_config.json. Default: the file in $LOGDIR, else in the
    working directory."""
    server_timeout: Number = Field(600.0, gt=0)
    """Maximum seconds for a server to start, restart or answer. Then the run saves a checkpoint and ends."""
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
    """Further vLLM engine arguments, passed unchanged. Example: {kv_cache_dtype: fp8}."""

    def problems(self) -> Iterator[str]:
        for name in self.args:
            if name in EngineConfig.model_fields:
                yield f"engine.args.{name}: has a setting of its own; write engine.{name}"
            elif name in REFUSED_ARGUMENTS:
                yield f"engine.args.{name}: {REFUSED_ARGUMENTS[name]}"
        if len(set(self.urls)) < len(self.urls):
            yield f"engine.urls: repeats an address: {', '.join(self.urls)}"


class ResampleConfig(Section):
    max_rounds: Positive = 3
    """Maximum extra sampling rounds per step. A round samples as many fresh prompts as it takes, at the step's own
    rate, to replace the groups without reward variance; at most rollout.prompts_per_step."""


class SkipSolvedConfig(Section):
    after: Positive = 2
    """Skip a prompt after its group was solved in this many consecutive visits."""
    reward: Number = Field(1.0, gt=0)
    """A group is solved if all its rewards are equal and at least this value."""


class PartialConfig(Section):
    oversample: Number = Field(1.5, ge=1, le=8)
    """Number of groups that are sampled at the same time, as a multiple of rollout.prompts_per_step. At 1, no new
    groups are left unfinished."""
    max_age: Positive = 3
    """Maximum number of steps from the one that draws a prompt to the one that trains its group. A step waits for the
    groups that have reached this age."""


class RepetitionDetectionConfig(Section):
    max_pattern_size: Integer = Field(64, ge=1, le=1024)
    """Length of the longest pattern in tokens."""
    min_count: Integer = Field(8, ge=2)
    """Copies of the pattern, one after the other, that end the completion."""


class RolloutConfig(Section):
    prompts_per_step: Integer = Field(32, ge=1, le=100_000)
    """Number of prompts in one step, over all ranks. A step trains prompts_per_step * group_size completions."""
    group_size: Integer = Field(8, ge=2, le=10_000)
    """Completions of each prompt. At least 2, because their rewards are compared with each other."""
    max_prompt_tokens: Positive = 1024
    """Maximum prompt length in tokens. Longer prompts are dropped, never truncated (metric prompts_dropped). Both
    default lengths are lowered, with a note, where they exceed the positions of the model."""
    max_completion_tokens: Positive = 1024
    """Maximum completion length in tokens. Sampling stops there with finish_reason 'length'. In an episode, the limit
    applies to all tokens after the prompt, including observations."""
    temperature: Number = Field(1.0, ge=MIN_TEMPERATURE, le=2)
    """Sampling temperature. The trainer divides its logits by it, so that both use the same distribution."""
    top_p: Number = Field(1.0, gt=0, le=1)
    """Nucleus sampling: keep the most likely tokens up to this total probability; 1 keeps all. Below 1, the engine's
    log-probabilities are renormalised over the kept tokens and no longer match the trainer's."""
    top_k: Integer = Field(0, ge=0)
    """Sample from the k most likely tokens; 0 keeps all tokens. Changes log-probabilities like top_p."""
    min_p: Number = Field(0.0, ge=0.0, le=1.0)
    """Drop tokens whose probability is below this fraction of the most likely token's probability; 0 keeps all tokens.
    Changes log-probabilities like top_p."""
    repetition_penalty: Number = Field(1.0, gt=0)
    """vLLM's repetition penalty; 1 is none. Changes log-probabilities like top_p."""
    stop: list[str] = []
    """Strings that end a completion. The tokens of the string are part of the completion and are trained."""
    repetition_detection: RepetitionDetectionConfig | None = None
    """End a completion that ends with copies of one pattern of tokens, with finish_reason 'repetition'. It counts as
    truncated. For long completions (docs/guides/long_rollouts.md). null: off. {}: on, with the defaults below."""
    max_staleness: Literal[0, 1] = 0
    """0: generate, then train. 1 (engine servers only): generate the next step's completions while the current step
    trains, with weights one step older. The metric `staleness` reports this, and loss.correction corrects for it."""
    resample: ResampleConfig | None = None
    """Replace groups without reward variance by groups of fresh prompts in the same step (dynamic sampling). null: off.
    {}: on, with the defaults below."""
    partial: PartialConfig | None = None
    """Partial rollouts: sampling ends when rollout.prompts_per_step groups are complete, and the next step continues
    the others with its weights (docs/guides/long_rollouts.md). null: off. {}: on, with the defaults below."""
    skip_solved: SkipSolvedConfig | None = None
    """Skip prompts whose groups were solved in their last visits. null: off. {}: on, with the defaults below."""
    generation: Literal["sharded", "replicated"] = "sharded"
    """sharded: each prompt is generated by one engine. replicated: every engine generates every prompt, and the
    completions of rank 0's engine are used."""
    reward_workers: Positive = 8
    """Threads and worker processes per rank that compute rewards while the engine decodes. 1: one prompt at a time."""
    reward_timeout: Number = Field(60.0, gt=0)
    """Time limit in seconds for the rewards of one prompt. The time counts from the call of the reward, or from the
    rank's last sampled completion of the step if this is later. On timeout the prompt's completions count as failed,
    and hanging threads and processes are replaced. User code that blocks all threads of a rank for this long ends the
    run. This second limit is at least 10 s, and with episodes or agents at least tool_timeout."""
    tool_timeout: Number = Field(60.0, gt=0)
    """Maximum seconds between two turns of an episode (tools, reward). On timeout the episode counts as failed."""
    max_reward_errors: Number = Field(0.2, ge=0.0, le=1.0)
    """Maximum fraction of a step's completions whose reward may fail. Above it, the run stops and shows the first
    error. A completion that a working scorer cannot read does not count as failed (metric `unscorable`). Its reward is
    0, or the lowest reward of the prompt's other completions if that reward is negative after weighting."""

    def problems(self) -> Iterator[str]:
        if "" in self.stop:
            yield "rollout.stop: '' would end every completion; leave it out"
        if self.partial is not None:
            if self.partial.oversample > 1 + self.partial.max_age:
                rule = "must be at most 1 + max_age, or complete groups would wait longer than max_age"
                yield f"rollout.partial.oversample={self.partial.oversample:g}: {rule}"
            if self.resample is not None:
                yield "rollout.resample: not possible with rollout.partial; its rounds need complete groups"
            if self.generation == "replicated":
                yield "rollout.generation=replicated: must be sharded with rollout.partial"
            if self.stop:
                yield "rollout.stop: must be empty with rollout.partial; a stop string may span two steps"
