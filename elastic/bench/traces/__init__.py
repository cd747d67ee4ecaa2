"""Traces, the arrival times and lengths of requests: read from files, or generated. It imports only the leaves.

Way in: `trace.Trace`, `readers.read_trace`, `generator.generate`, `prompts`.
"""
