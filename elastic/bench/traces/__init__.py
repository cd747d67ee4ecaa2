"""When requests arrive and how long they are: read from files, or generated. It imports only the leaves.

Way in: `trace.Trace`, `readers.read_trace`, `generator.generate`, `prompts`.
"""
