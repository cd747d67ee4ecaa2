"""Continuous batching of a wrapped model: transformers' own, with a cache, scheduler and sampling over elastic pages.

Way in: `ContinuousEngine`. The CLI and programs of users import it; it imports the runtime and below.
"""

from elastic.engines.continuous.engine import ContinuousEngine

__all__ = ["ContinuousEngine"]
