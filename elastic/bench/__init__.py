"""A load generator and its figures: traces, their replay, reports. The way in is each sub-room's.

The CLI and `benchmarks/` import it; it imports the engine's protocol, the runtime and below.
"""
