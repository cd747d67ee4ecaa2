"""Structured output: which tokens may come next in an answer of a JSON schema, a regular expression or a grammar.

Way in: `LlguidanceCompiler`, a `GrammarCompiler`, given to the engine. Its package llguidance is the extra
`structured`.
"""

from elastic.engines.structured.compiler import LlguidanceCompiler

__all__ = ["LlguidanceCompiler"]
