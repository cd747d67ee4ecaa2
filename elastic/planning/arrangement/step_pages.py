"""What a step takes beside keys and values while it is computed, as planners of a rank's memory count it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StepPages:
    """Pages that a rank keeps free for steps: more for longer requests, and so for an instance with more sectors.

    What any step takes is in none of these: the rank's place is charged with it. (AMOEBA, table 1)
    """

    prompt: float = 0.0
    """For each sector of an instance: for a part of a prompt behind so much of it, the same at each of its ranks,"""
    decode: float = 0.0
    """or for a step of requests that are generated together, divided among its ranks as heads are."""
    charged: int = 0
    """Of the rank's place, for as many sectors as it has room for by itself."""

    def of(self, share: float) -> int:
        """Return the pages for a sector of an instance of whose keys and values a rank has this share, 0 to 1."""
        return math.ceil(max(self.prompt, share * self.decode)) if share else 0

    def kept(self, sectors: int) -> int:
        """Return the pages that the rank's place is charged with for the sectors that it has room for by itself."""
        return min(self.charged, sectors * self.of(1.0))
