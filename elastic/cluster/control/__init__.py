"""What a fleet and its ranks say to each other, and how."""

from __future__ import annotations
