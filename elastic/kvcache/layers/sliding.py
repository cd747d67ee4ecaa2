"""Cache layers of attention to the last tokens only."""

from __future__ import annotations

from transformers.cache_utils import DynamicSlidingWindowLayer

from elastic.errors import StateError
from elastic.kvcache.layers.full import ElasticLayer, LayerMemory
from elastic.kvcache.layers.synchronized import synchronized
from elastic.kvcache.storage.pool import KVPool


class ElasticSlidingLayer(ElasticLayer):
    """Attention to the last `sliding_window` tokens: pages behind the window go back as it slides on.

    While past is recorded (assisted decoding), nothing is given back before `crop` says what was accepted.
    """

    is_sliding = True

    def __init__(
        self,
        memory: LayerMemory,
        sliding_window: int,
        record_past: bool = False,
        index: int | None = None,
        fixed_pool: KVPool | None = None,
    ) -> None:
        super().__init__(memory, index, fixed_pool)
        self.sliding_window = sliding_window
        self.record_past = record_past

    def activate_past_recording(self) -> None:
        """Keep what slides out of the window until the next `crop`."""
        self.record_past = True

    @synchronized
    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens. Raises `StateError` where the window had lost those before.

        That is also where a crop before it has given them up, with no tokens between the two, or where they went before
        the past was recorded.
        """
        length, window = self.cumulative_length, self.sliding_window
        if length >= window and not self.record_past:
            raise StateError(
                f"the window of {window} tokens was passed without recording the past; call "
                "activate_past_recording() on the cache before tokens are to be cropped"
            )
        if self._first > max(0, length + tokens_to_remove - window + 1):
            raise StateError(
                f"crop({tokens_to_remove}): what is held begins at token {self._first} of {length}, and the "
                f"window of {window} needs more: an earlier crop gave it up, or it went before the past "
                "was recorded; remove all tokens in one crop, and call activate_past_recording() before they come"
            )
        super().crop(tokens_to_remove)
        if self.cumulative_length:
            first = self._visible_from()
            self._resident().hold(first - self._origin, self.cumulative_length - self._origin)
            self._first = first

    @synchronized
    def to_stock(self) -> DynamicSlidingWindowLayer:
        """Make a stock cache layer with a copy of what is held."""
        stock = DynamicSlidingWindowLayer(self.sliding_window)
        stock.record_past, stock.cumulative_length = self.record_past, self.cumulative_length
        return self._copy_into(stock)

    def like(self, fixed_pool: KVPool | None) -> ElasticLayer:
        """Make an empty layer of the same kind and window."""
        return ElasticSlidingLayer(self._memory, self.sliding_window, self.record_past, self.index, fixed_pool)
