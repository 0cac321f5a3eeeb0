"""Keys of OpenAI's and vLLM's request bodies that `request_bodies` does not support: rejected or ignored."""

from __future__ import annotations

from typing import Any

from colocated_grpo.types import JsonObject

CHANGES_SAMPLES = "would change which tokens are sampled, and the trainer could not reproduce their probabilities"
CHANGES_PROMPT = "would change the prompt, and is not supported"
CHANGES_RESPONSE = "would change the response, and is not supported"
MEANS_TOOLS = "tool calls are not parsed; describe tools with `tools` and read calls from the text"

REJECTED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "allowed_token_ids": (CHANGES_SAMPLES, ()),
    "bad_words": (CHANGES_SAMPLES, ([],)),
    "best_of": (CHANGES_SAMPLES, (1,)),
    "length_penalty": (CHANGES_SAMPLES, (1.0,)),
    "min_tokens": (CHANGES_SAMPLES, (0,)),
    "repetition_detection": (CHANGES_SAMPLES, ()),
    "response_format": (CHANGES_SAMPLES, ({"type": "text"},)),
    "structured_outputs": (CHANGES_SAMPLES, ()),
    "guided_json": (CHANGES_SAMPLES, ()),
    "guided_regex": (CHANGES_SAMPLES, ()),
    "guided_choice": (CHANGES_SAMPLES, ()),
    "guided_grammar": (CHANGES_SAMPLES, ()),
    "logits_processors": (CHANGES_SAMPLES, ([],)),
    "thinking_token_budget": (CHANGES_SAMPLES, ()),
    "use_beam_search": (CHANGES_SAMPLES, (False,)),
    "vllm_xargs": (CHANGES_SAMPLES, ({},)),
    "watermarking": (CHANGES_SAMPLES, (False,)),
    "add_special_tokens": (CHANGES_PROMPT, ()),
    "audio": (CHANGES_RESPONSE, ()),
    "chat_template": (CHANGES_PROMPT, ()),
    "documents": (CHANGES_PROMPT, ([],)),
    "echo": (CHANGES_RESPONSE, (False,)),
    "media_io_kwargs": (CHANGES_PROMPT, ({},)),
    "mm_payload": (CHANGES_PROMPT, ()),
    "mm_processor_kwargs": (CHANGES_PROMPT, ({},)),
    "prompt_embeds": (CHANGES_PROMPT, ()),
    "reasoning_effort": (CHANGES_PROMPT + "; use chat_template_kwargs", ()),
    "truncate_prompt_tokens": (CHANGES_PROMPT, ()),
    "truncation_side": (CHANGES_PROMPT, ()),
    "web_search_options": (CHANGES_PROMPT, ()),
    "function_call": (MEANS_TOOLS, ("auto", "none")),
    "functions": (MEANS_TOOLS, ([],)),
    "tool_choice": (MEANS_TOOLS, ("auto", "none")),
    "logprob_token_ids": (CHANGES_RESPONSE, ([],)),
    "modalities": (CHANGES_RESPONSE, (["text"],)),
    "moderation": (CHANGES_RESPONSE, ()),
    "prompt_logprobs": (CHANGES_RESPONSE + " here; POST /generate has it", ()),
    "return_mm_kwargs": (CHANGES_RESPONSE, (False,)),
    "return_prompt_text": (CHANGES_RESPONSE, (False,)),
    "return_token_ids": (CHANGES_RESPONSE + " here; POST /generate returns tokens", (False,)),
    "return_token_offsets": (CHANGES_RESPONSE, (False,)),
    "return_tokens_as_token_ids": (CHANGES_RESPONSE + " here; POST /generate returns tokens", (False,)),
    "routed_experts_prompt_start": (CHANGES_RESPONSE, (0,)),
    "spaces_between_special_tokens": (CHANGES_RESPONSE, (True,)),
    "verbosity": (CHANGES_RESPONSE, ()),
}
"""Key -> why a value is rejected, and the values beside null that have no effect and are accepted."""

IGNORED = frozenset(
    {
        *("cache_salt", "metadata", "priority", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("request_id", "safety_identifier", "service_tier", "session_id", "store", "user"),  # bookkeeping
        *("ec_transfer_params", "kv_transfer_params", "prediction", "stream_interval"),  # speed
        *("include_reasoning", "parallel_tool_calls"),  # responses have no reasoning and no parsed calls
    }
)
"""Keys without effect on tokens and text. Keys that neither OpenAI nor vLLM knows are ignored too, as by OpenAI."""


def check_keys(content: JsonObject, supported: frozenset[str]) -> None:
    """Raise ValueError with one line for the first key that is not supported and has an effect."""
    for key in REJECTED.keys() & content.keys() - supported:
        reason, harmless = REJECTED[key]
        value = content[key]
        if value is not None and not any(value == other and type(value) in (type(other), int) for other in harmless):
            raise ValueError(f"{key}: {reason}")
