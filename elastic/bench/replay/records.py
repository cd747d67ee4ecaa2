"""Records of requests, and the file that keeps them: one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from elastic.errors import ConfigError

Finish = Literal["stop", "length", "cancelled", "failed", "rejected", "timeout", "unfinished"]
COMPLETED: frozenset[Finish] = frozenset({"stop", "length"})


@dataclass(frozen=True)
class Record:
    """One offered request. Times are seconds since the replay began; None: it did not come to that, or is not known."""

    id: str
    arrival_s: float
    """The time in the trace, whenever the request was really submitted."""
    prompt_tokens: int
    asked_tokens: int
    """The output length that the trace wants."""
    submitted_s: float | None
    """The time when the replay handed it in; its delay after `arrival_s` counts as waiting."""
    scheduled_s: float | None
    """The time of its first forward pass."""
    waited_for_kv_s: float | None
    """The time before that in which there was no KV block for it although the batch had room."""
    token_times_s: tuple[float, ...]
    """The time of each token, or of each piece of a stream."""
    output_tokens: int
    """The number of generated tokens; more than of `token_times_s` where a piece of a stream had several."""
    finish: Finish
    ended_s: float | None
    error: str | None = None
    weights: tuple[int, ...] = ()
    """The index of the weights that computed each token; empty where it is not known."""
    tokens: tuple[int, ...] = ()
    """The generated token ids; empty where they are not known."""

    @property
    def completed(self) -> bool:
        """True if it ended well, with a token at least."""
        return self.finish in COMPLETED and bool(self.token_times_s)

    @property
    def ttft_s(self) -> float | None:
        """The time from arrival to first token, waiting included, in seconds."""
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None

    @property
    def e2el_s(self) -> float | None:
        """The time from arrival to last token, in seconds."""
        return self.token_times_s[-1] - self.arrival_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """(E2EL - TTFT) / (tokens - 1) in seconds, of two tokens or more."""
        if self.output_tokens < 2 or not self.token_times_s:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.output_tokens - 1)

    @property
    def itls_s(self) -> tuple[float, ...]:
        """The gaps between one token, or piece, and the next, in seconds."""
        return tuple(later - earlier for earlier, later in pairwise(self.token_times_s))

    @property
    def queued_s(self) -> float | None:
        """The time from arrival to first scheduling, in seconds."""
        return None if self.scheduled_s is None else self.scheduled_s - self.arrival_s


def write_records(path: str | Path, records: Iterable[Record]) -> None:
    """Write one line for each record. Raises `ConfigError` where the file cannot be written."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(record)) + "\n" for record in records)
    except OSError as error:
        raise ConfigError(f"records {path} cannot be written: {error.strerror}") from error
