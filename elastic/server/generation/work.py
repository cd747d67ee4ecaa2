"""What the requests of a server were computed by: generated tokens, each layer counted, by the layer's variant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from elastic.engines.base import Output


class Work:
    """Counts on the event loop; may be read on any thread."""

    def __init__(self) -> None:
        self._tokens: Counter[int] = Counter()  # index into `Engine.weights` -> tokens

    def add(self, output: Output) -> None:
        """News of a request."""
        self._tokens[output.weights] += len(output.tokens)

    def by_variant(self, weights: Sequence[Sequence[str]]) -> dict[str, int]:
        """Pairs of a generated token and a decoder layer, by the variant that the layer was in; `Engine.weights`."""
        pairs: Counter[str] = Counter()
        for index, tokens in self._tokens.copy().items():
            for variant in weights[index] if index < len(weights) else ():
                pairs[variant] += tokens
        return dict(pairs)
