"""Structured output: which tokens may come next in an answer of a JSON schema, a regular expression or a grammar."""
