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

_TABLE: tuple[tuple[tuple[Any, ...] | None, str], ...] = (
    (
        None,
        "user metadata store service_tier safety_identifier verbosity prompt_cache_key prompt_cache_retention "
        "prompt_cache_options cache_salt request_id session_id truncation_side mm_payload return_mm_kwargs "
        "spaces_between_special_tokens include_reasoning",
    ),
    (
        (None,),
        "audio prediction moderation web_search_options allowed_token_ids truncate_prompt_tokens prompt_logprobs "
        "prompt_embeds chat_template structured_outputs guided_json guided_regex guided_choice guided_grammar "
        "repetition_detection",
    ),
    (
        (None, False),
        "echo logprobs use_beam_search early_stopping watermarking include_stop_str_in_output continue_final_message "
        "return_tokens_as_token_ids return_token_ids return_weight_versions return_token_offsets return_prompt_text",
    ),
    ((None, True), "skip_special_tokens add_generation_prompt"),
    ((None, True, False), "parallel_tool_calls"),
    (
        (None, 0),
        "top_logprobs presence_penalty frequency_penalty min_p min_tokens priority routed_experts_prompt_start",
    ),
    ((None, 1), "n best_of length_penalty repetition_penalty stream_interval"),
    ((None, -1), "thinking_token_budget"),
    ((None, ""), "suffix"),
    ((None, []), "tools functions bad_words logprob_token_ids documents"),
    (
        (None, {}),
        "logit_bias chat_template_kwargs media_io_kwargs mm_processor_kwargs kv_transfer_params ec_transfer_params "
        "vllm_xargs",
    ),
    ((None, "none", "auto"), "tool_choice function_call"),
    ((None, "none"), "reasoning_effort"),
    ((None, {"type": "text"}), "response_format"),
    ((None, ["text"]), "modalities"),
)
"""Neutral values, and the fields of both servers that have them."""
_COMMON: Neutral = {name: values for values, names in _TABLE for name in names.split()}
COMPLETION: Neutral = {**_COMMON, "add_special_tokens": (None, True)}
CHAT: Neutral = {**_COMMON, "add_special_tokens": (None, False)}
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
