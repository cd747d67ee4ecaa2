"""What of a layer's inputs belongs to which requests of one row of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.hooks.replicas.split_requests import BY_REQUESTS, request_cache
from elastic.hooks.replicas.split_rows import BatchSlice, LayerInputs, NotSplittable, gather

CPU = torch.device("cpu")


class Requests:
    """A cache that knows how many new tokens each request has."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def new_tokens(self) -> list[int]:
        return self.tokens

    def of_requests(self, start: int, stop: int) -> Any:
        return self.tokens[start:stop]


def inputs_of(count: int, cache: Any) -> dict[str, Any]:
    """All that a layer is given for so many tokens; token i has the number i everywhere."""
    tokens = torch.arange(count)
    rotary = tokens[:, None].expand(count, 4).float()
    return {
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool),
        "position_ids": tokens[None],
        "position_embeddings": (rotary[None], rotary.expand(3, 1, count, 4)),
        "past_key_values": None,
        "use_cache": False,
        "paged_cache": cache,
    }


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_each_part_is_given_its_tokens_and_they_are_put_together_again(tokens: list[int], data: Any) -> None:
    count, cut = sum(tokens), data.draw(st.integers(0, len(tokens)))
    cache, hidden = Requests(tokens), torch.randn(1, count, 4)
    inputs = LayerInputs(["hidden_states"], (hidden,), inputs_of(count, cache))
    assert request_cache(inputs) is cache
    middle, outputs = sum(tokens[:cut]), []
    for start, stop in ((0, middle), (middle, count)):
        rows = BatchSlice(start, stop, count, CPU, BY_REQUESTS)
        mine = rows.take(hidden)
        args, named = inputs.take(rows, "a part of the cache").call(mine)
        assert args[0] is mine
        assert torch.equal(mine, hidden[:, start:stop])
        assert named["position_ids"].tolist() == [list(range(start, stop))]
        for rotary, kinds in zip(named["position_embeddings"], (1, 3), strict=True):
            assert rotary[..., 0].flatten().tolist() == list(range(start, stop)) * kinds
        assert named["paged_cache"] == "a part of the cache"
        given = inputs_of(count, cache)
        assert named["attention_mask"].shape == given["attention_mask"].shape
        outputs.append((mine + 1, "other"))
    assert torch.equal(gather(outputs, [middle, count - middle], CPU, axis=1)[0], hidden + 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_mask", torch.ones(1, 1, 8, 8)),
        ("position_ids", torch.ones(1, 7)),
        ("position_embeddings", (torch.ones(4),)),
        ("something", torch.ones(1, 8)),
    ],
)
def test_what_is_not_known_to_belong_to_tokens_is_not_taken(name: str, value: Any) -> None:
    inputs = LayerInputs((), (), {"hidden_states": torch.ones(1, 8, 4), name: value})
    with pytest.raises(NotSplittable, match=name):
        inputs.take(BatchSlice(0, 4, 8, CPU, BY_REQUESTS), None)


def test_a_cache_of_other_tokens_is_noticed_and_one_of_others_left_alone() -> None:
    hidden = torch.ones(1, 8, 4)
    assert request_cache(LayerInputs((), (), {"hidden_states": hidden})) is None
    assert request_cache(LayerInputs((), (), {"hidden_states": hidden, "paged_cache": object()})) is None
    for wrong in (hidden[:, :7], hidden[0], hidden.expand(2, 8, 4)):
        with pytest.raises(NotSplittable, match="8 tokens of requests"):
            request_cache(LayerInputs((), (), {"hidden_states": wrong, "paged_cache": Requests([3, 5])}))
    with pytest.raises(NotSplittable, match=r"^hidden_states, a tensor of 4 dimensions$"):  # alike for all batches
        request_cache(LayerInputs((), (), {"hidden_states": hidden[None], "paged_cache": Requests([3, 5])}))
