"""Continuous batching of a wrapped model: requests join and leave a running batch, their cache lives in its pages.

Way in: `ContinuousEngine`. The CLI and programs of users import it; it joins the scheduler of `core`, the `executor`,
sampling and the runtime.
"""

from elastic.engines.continuous.engine import ContinuousEngine

__all__ = ["ContinuousEngine"]
