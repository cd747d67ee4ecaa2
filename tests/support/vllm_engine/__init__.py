"""Helpers of the tests of elastic in vLLM. `blocks` works without vLLM."""
