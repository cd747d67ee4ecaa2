"""The formats in which families of models write calls."""

from __future__ import annotations

from elastic.server.tools.base import ToolFormat
from elastic.server.tools.hermes import HermesParser
from elastic.server.tools.llama import LlamaParser
from elastic.server.tools.mistral import MistralParser
from elastic.server.tools.pythonic import PythonicParser

TOOL_FORMATS = {
    "hermes": ToolFormat(HermesParser, special=True),  # of some models they are
    "llama3_json": ToolFormat(LlamaParser, marked=False, special=True),
    "mistral": ToolFormat(MistralParser, special=True),
    "pythonic": ToolFormat(PythonicParser, marked=False, special=True),
}
"""Under the names that vLLM's `--tool-call-parser` has for them."""
