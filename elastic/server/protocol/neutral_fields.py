"""Fields of OpenAI's and vLLM's requests that are not supported, and the values with which they change nothing.

Clients send what their libraries have as defaults. Such a value is what happens here anyway, so it is taken; any other
would change the answer, so it is refused with the field's name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from elastic.server.protocol.errors import invalid

Neutral = Mapping[str, tuple[Any, ...] | None]
"""Field -> its neutral values; None: it never changes an answer here, whatever its value."""

_TABLE: tuple[tuple[tuple[Any, ...] | None, str], ...] = (
    (
        None,
        "user metadata service_tier safety_identifier verbosity prompt_cache_key prompt_cache_retention "
        "prompt_cache_options cache_salt request_id session_id truncation_side mm_payload return_mm_kwargs "
        "spaces_between_special_tokens include_reasoning store",
    ),
    (
        (None,),
        "audio prediction moderation web_search_options allowed_token_ids truncate_prompt_tokens prompt_embeds "
        "chat_template repetition_detection guided_decoding_backend guided_whitespace_pattern structural_tag",
    ),
    (
        (None, False),
        "use_beam_search early_stopping watermarking return_weight_versions return_token_offsets return_prompt_text",
    ),
    ((None, 0), "priority routed_experts_prompt_start"),
    ((None, 1), "length_penalty stream_interval"),
    ((None, -1), "thinking_token_budget"),
    ((None, ""), "suffix"),
    ((None, []), "functions bad_words logprob_token_ids documents"),
    ((None, {}), "media_io_kwargs mm_processor_kwargs kv_transfer_params ec_transfer_params vllm_xargs"),
    ((None, "none", "auto"), "function_call"),
    ((None, "none"), "reasoning_effort"),
    ((None, ["text"]), "modalities"),
)
"""Neutral values, and the fields of both servers that have them."""
_COMMON: Neutral = {name: values for values, names in _TABLE for name in names.split()}
COMPLETION: Neutral = {
    **_COMMON,
    **dict.fromkeys(("add_generation_prompt", "parallel_tool_calls"), (None, True)),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "top_logprobs": (None, 0),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
}
CHAT: Neutral = {**_COMMON, "best_of": (None, 1), "echo": (None, False)}
STREAM_OPTIONS: Neutral = {"include_obfuscation": (None, False)}
STRUCTURED_OUTPUTS: Neutral = {
    **dict.fromkeys(("whitespace_pattern", "structural_tag"), (None,)),
    **dict.fromkeys(("disable_any_whitespace", "disable_additional_properties", "disable_fallback"), (None, False)),
}
MESSAGE: Neutral = dict.fromkeys(
    ("function_call", "refusal", "audio", "annotations", "reasoning", "reasoning_content"), (None, [])
)
PART: Neutral = {"cache_control": (None,)}
RESPONSES: Neutral = {
    **dict.fromkeys(
        (
            *("user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
            *("prompt_cache_options", "max_tool_calls"),
        )
    ),
    **dict.fromkeys(
        ("conversation", "prompt", "context_management", "moderation", "access_programs", "image"), (None,)
    ),
    **dict.fromkeys(("background", "background_options"), (None, False)),
    "truncation": (None, "disabled"),
    "reasoning": (None, {}, {"effort": None}, {"effort": "none"}),
}
ITEM: Neutral = dict.fromkeys(("id", "status", "phase", "annotations", "logprobs", "caller", "namespace"))
TOKENIZE: Neutral = {"chat_template": (None,), "mm_processor_kwargs": (None, {})}


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
