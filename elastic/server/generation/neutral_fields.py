"""Fields of OpenAI's and vLLM's requests that are not supported, and the values with which they change nothing.

Clients send what their libraries have as defaults. Such a value is what happens here anyway, so it is taken; any other
would change the answer, so it is refused with the field's name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from elastic.server.generation.errors import invalid

Neutral = Mapping[str, tuple[Any, ...] | None]
"""Field -> its neutral values; None: it never changes an answer here, whatever its value."""

_IGNORED: Neutral = dict.fromkeys(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "verbosity"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_salt"),
        *("request_id", "session_id", "truncation_side", "mm_payload", "return_mm_kwargs"),
        *("spaces_between_special_tokens", "include_reasoning"),
    )
)
_OPENAI: Neutral = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "moderation": (None,),
    "reasoning_effort": (None, "none"),
    "web_search_options": (None,),
}
_VLLM: Neutral = {
    "use_beam_search": (None, False),
    "length_penalty": (None, 1),
    "early_stopping": (None, False),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "watermarking": (None, False),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "truncate_prompt_tokens": (None,),
    "prompt_logprobs": (None,),
    "logprob_token_ids": (None, []),
    "prompt_embeds": (None,),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "media_io_kwargs": (None, {}),
    "mm_processor_kwargs": (None, {}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "priority": (None, 0),
    "thinking_token_budget": (None, -1),
    "return_tokens_as_token_ids": (None, False),
    "return_token_ids": (None, False),
    "return_weight_versions": (None, False),
    "return_token_offsets": (None, False),
    "return_prompt_text": (None, False),
    "routed_experts_prompt_start": (None, 0),
    "kv_transfer_params": (None, {}),
    "ec_transfer_params": (None, {}),
    "vllm_xargs": (None, {}),
    "repetition_detection": (None,),
    "stream_interval": (None, 1),
}
COMPLETION: Neutral = {**_IGNORED, **_OPENAI, **_VLLM, "add_special_tokens": (None, True)}
CHAT: Neutral = {**_IGNORED, **_OPENAI, **_VLLM, "add_special_tokens": (None, False)}
"""The text of a chat template has its special tokens."""
STREAM_OPTIONS: Neutral = {"include_obfuscation": (None, False)}
MESSAGE: Neutral = dict.fromkeys(
    ("tool_calls", "function_call", "refusal", "audio", "annotations", "reasoning", "reasoning_content"), (None, [])
)
PART: Neutral = {"cache_control": (None,)}


def check_neutral(extra: Mapping[str, Any] | None, neutral: Neutral, prefix: str = "") -> None:
    """Raise `APIError` for the first field whose value would change the answer, and for fields that nobody knows.

    Values are equal as in JSON: 1.0 is 1, and true is not.
    """
    for name, value in (extra or {}).items():
        if name not in neutral:
            raise invalid(prefix + name, "is not known here", "unknown_parameter")
        allowed = neutral[name]
        if allowed is None or any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in allowed):
            continue
        words = " or ".join(map(json.dumps, allowed[1:])) or "null"
        raise invalid(prefix + name, f"only {words} is supported", "unsupported_value")
