"""Which versions of transformers the adapter of its continuous batching knows."""

from __future__ import annotations

from elastic.errors import BackendUnavailable

SUPPORTED = (5, 23)
"""It is rewritten about monthly, and what we build on is not public; the latest rewrite came with 5.23."""


def require_supported(version: str | None = None) -> None:
    """Raises `BackendUnavailable` where transformers is another version (None: the installed one)."""
    if version is None:
        import transformers

        version = transformers.__version__
    major, minor = SUPPORTED
    if version.split(".")[:2] != [str(major), str(minor)]:
        raise BackendUnavailable(
            f"continuous batching on elastic pages needs transformers {major}.{minor}.x, this is {version}; "
            f"pip install 'transformers>={major}.{minor},<{major}.{minor + 1}', or use generate"
        )
