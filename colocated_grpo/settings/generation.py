"""Settings of the model, the vLLM engines and sampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field

from colocated_grpo.settings.base import (
    FileName,
    Fraction,
    InputFile,
    Integer,
    Number,
    Positive,
    Section,
    TemplateVariables,
)
from colocated_grpo.types import JsonObject

MIN_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this value; at 0 it samples greedily."""


class ModelConfig(Section):
    name: InputFile
    """Local folder or Hugging Face name of a causal language model."""
    revision: str | None = None
    """Branch, tag or commit on the Hub. Default: the main branch."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint. Only for repositories you trust."""
    chat_template: InputFile | None = None
    """Chat template: Jinja text, or the path of a file with it. Default: the tokenizer's own."""
    chat_template_kwargs: TemplateVariables = {}
    """Variables of the chat template, such as {enable_thinking: false}, in prompts of every environment and evaluation
    set, and in chat requests to the engine's server that do not set them."""


class EngineConfig(Section):
    placement: Literal["colocated", "server"] = "colocated"
    """colocated: every rank has an engine in its own process. server: engines run in processes of their own, on their
    own GPUs, and serve over HTTP."""
    bridge: Literal["broadcast", "shared", "adapter", "restart"] = "broadcast"
    """Transport of weights to the servers. broadcast: over NCCL, or gloo on the CPU. shared: trainer and server use the
    same copy in memory. adapter: the server loads the saved adapter (policy.lora). restart: the server restarts from a
    saved model. No effect with `placement: colocated`."""
    urls: list[str] = []
    """Addresses of running servers (python -m colocated_grpo.servers). Empty: the launcher starts them."""
    api_key_variable: str | None = None
    """Name of the environment variable with the API key of the servers."""
    bridge_config: FileName | None = None
    """With `bridge: shared`: path of the server's vllm_bridge_config.json. Default: in $LOGDIR, else in the working
    directory."""
    server_timeout: Number = Field(600.0, gt=0)
    """Seconds to wait for a server that starts, restarts or does not answer. Then the run saves and ends."""
    tensor_parallel_size: Positive = 1
    """Number of consecutive ranks that form one engine, or GPUs of one engine server. Must divide the model's attention
    heads and the number of ranks."""
    max_num_seqs: Positive | None = None
    """Sequences that one engine decodes at the same time. Default: its share of a step's completions, at least 64 and
    at most 512; 256 with an atropos environment."""
    max_model_len: Positive | None = None
    """Longest prompt plus completion in tokens, reduced to the model's own limit. Default: rollout.max_prompt_tokens +
    rollout.max_completion_tokens."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the engine's weights. auto: policy.compute_dtype."""
    gpu_memory_utilization: Number | None = Field(None, gt=0, le=1)
    """Fraction of the GPU's memory for the engine, as in vLLM. Default: the KV cache is sized from the memory left free
    by the trainer, and is at most as large as its sequences can use."""
    kv_cache_memory_bytes: Positive | None = None
    """Exact size of the KV cache in bytes. Takes precedence over gpu_memory_utilization."""
    enforce_eager: bool = False
    """Decode without CUDA graphs: the engine starts faster and decodes more slowly."""
    sleep: bool = True
    """Free the engine's weights and KV cache while the policy trains. With `weights: shared` or sync_frequency above 1,
    the weights stay on the device. No effect on CPU."""
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
    """Maximum number of extra sampling rounds per step. A round samples at most rollout.prompts_per_step fresh prompts:
    as many as are needed for that number of groups with variance, at the step's own rate of such groups."""


class SkipSolvedConfig(Section):
    after: Positive = 2
    """Skip a prompt after this many consecutive visits in which all its completions were solved."""
    reward: Number = Field(1.0, gt=0)
    """A group is solved if its rewards are equal and at least this."""


class RolloutConfig(Section):
    prompts_per_step: Positive = 32
    """Prompts of one step, over all ranks. A step trains prompts_per_step * group_size completions."""
    group_size: Integer = Field(8, ge=2)
    """Completions sampled for each prompt. At least 2, as their rewards are compared with each other."""
    max_prompt_tokens: Positive = 1024
    """Maximum prompt length in tokens. Longer prompts are dropped, never truncated (metric prompts_dropped)."""
    max_completion_tokens: Positive = 1024
    """Maximum completion length in tokens; sampling stops there with finish_reason 'length'. In an episode: all tokens
    after the prompt, observations included."""
    temperature: Number = Field(1.0, ge=MIN_TEMPERATURE, le=2)
    """Sampling temperature. The trainer divides its logits by the same value, so both use the same distribution."""
    top_p: Number = Field(1.0, gt=0, le=1)
    """Nucleus sampling: keep the most likely tokens up to this total probability; 1 keeps all. Below 1 the engine's
    log-probabilities are renormalised over the kept tokens and no longer match the trainer's."""
    top_k: Integer = Field(0, ge=0)
    """Sample from the k most likely tokens; 0 keeps all. Changes log-probabilities like top_p."""
    min_p: Fraction = 0.0
    """Drop tokens whose probability is below this fraction of the most likely token's; 0 keeps all. Changes
    log-probabilities like top_p."""
    repetition_penalty: Number = Field(1.0, gt=0)
    """vLLM's repetition penalty; 1 is none. Changes log-probabilities like top_p."""
    stop: list[str] = []
    """Strings that end a completion. The tokens of the string are part of the completion and are trained."""
    max_staleness: Literal[0, 1] = 0
    """With engine servers only. 0: generate, then train. 1: generate the next step's completions while this step
    trains; they are sampled with weights one step older, which `staleness` reports and loss.correction corrects."""
    resample: ResampleConfig | None = None
    """Replace groups without reward variance by groups of fresh prompts in the same step (dynamic sampling). null: off.
    {}: on, with the defaults below."""
    skip_solved: SkipSolvedConfig | None = None
    """Skip prompts whose completions were all solved in their last visits. null: off. {}: on, with the defaults
    below."""
    generation: Literal["sharded", "replicated"] = "sharded"
    """sharded: each prompt is generated by one engine. replicated: every engine generates every prompt, and the
    completions of rank 0's engine are used."""
    reward_workers: Positive = 8
    """Threads and worker processes per rank that compute rewards while the engine decodes. 1: rewards of one prompt at
    a time."""
    reward_timeout: Number = Field(60.0, gt=0)
    """Time limit in seconds for the rewards of one prompt. The time counts from the call, or from the rank's last
    sampled completion of the step if that is later. On timeout the completions count as failed, and hanging threads and
    processes are replaced. User code that blocks all threads of its rank for this long ends the run. With episodes or
    agents, that limit is tool_timeout if it is longer; in any case at least 10 s."""
    tool_timeout: Number = Field(60.0, gt=0)
    """Time limit in seconds between two turns of an episode (tools, reward). On timeout the episode has failed."""
    max_reward_errors: Fraction = 0.2
    """Maximum fraction of a step's completions whose reward may fail. Above it, the run stops and shows the first
    error. A completion whose answer cannot be read by a working scorer does not count as failed (metric `unscorable`).
    Its reward is 0, or its worst sibling's reward if that is below 0 after weighting."""
