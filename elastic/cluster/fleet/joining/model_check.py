"""Whether a rank serves what the others do: other weights would give other answers."""

from __future__ import annotations

from elastic.cluster.control.messages import ModelFacts
from elastic.errors import ConfigError


def require_same_model(rank: str, facts: ModelFacts, expected: ModelFacts) -> None:
    """Raise `ConfigError` that names what differs, if a rank's model is not the one that the fleet serves."""
    if facts == expected:
        return
    if len(facts.digests) != len(expected.digests):
        what = f"its model has {len(facts.digests)} layers, the fleet's {len(expected.digests)}"
    elif facts.vocabulary != expected.vocabulary:
        what = f"its vocabulary has {facts.vocabulary} tokens, the fleet's {expected.vocabulary}"
    elif facts.digests != expected.digests:
        pairs = enumerate(zip(facts.digests, expected.digests, strict=True))
        what = f"the weights of its layer {next(i for i, (a, b) in pairs if a != b)} are others than the fleet's"
    elif facts.fixed_digest != expected.fixed_digest:
        what = "the weights of its embedding, norm or head are others than the fleet's"
    elif facts.variants != expected.variants:
        what = f"its variants are {facts.variants}, the fleet's {expected.variants}"
    else:
        what = (
            f"its longest text is {facts.longest} and its end tokens are {facts.end_tokens}, "
            f"the fleet's {expected.longest} and {expected.end_tokens}"
        )
    raise ConfigError(f"rank {rank!r} is refused: {what}; start it with the fleet's model and options")
