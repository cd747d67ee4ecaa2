"""Ranks as processes for one fleet after another."""

from __future__ import annotations

from elastic.cluster.launch.local import LocalLauncher


class SharedLauncher(LocalLauncher):
    """Starts ranks as `launch="local"` does, and outlives the fleets that close it.

    A fork server imports torch and transformers for seconds; a fleet that stops has ended its ranks itself by then.
    """

    def close(self) -> None:
        """Do nothing: another fleet comes."""

    def end(self) -> None:
        """End the fork server."""
        super().close()
