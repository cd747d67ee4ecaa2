"""Structured output: which tokens may come next in an answer of a JSON schema, a regular expression or a grammar.

Way in: `LlguidanceCompiler`, a `GrammarCompiler`, given to the engine; `compiler_of` makes that of a model. Its package
llguidance is the extra `structured`.
"""

from elastic.engines.structured.compiler import LlguidanceCompiler, compiler_of

__all__ = ["LlguidanceCompiler", "compiler_of"]
