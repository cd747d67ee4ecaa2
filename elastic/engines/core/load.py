"""What an engine says of its work and of its room."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineLoad:
    """How much an engine has to do, and how much more it could hold."""

    running: int = 0
    """Sequences that have blocks."""
    waiting: int = 0
    """Sequences that have none yet."""
    free_blocks: int = 0
    """Blocks of KV cache that could be given now, after what live sequences are promised (Llumnix, section 4.2); where
    groups of layers have blocks of several sizes, those of the first."""
    total_blocks: int = 0
    """The same at the limit that is in force, with nothing there."""
    steps: int = 0
    """Steps that were begun so far; it stands still where there is no work, or the engine hangs."""
    lost_rank: str = ""
    """The rank that it waits for to be given up: it computes layers of this engine, and its connection has ended."""
    uncapped_blocks: int = 0
    """`total_blocks` without the cap that a fleet has set; 0: nobody says."""
