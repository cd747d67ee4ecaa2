"""Several processes that serve one model behind one address: ranks, instances, and the fleet that routes to them."""

from __future__ import annotations
