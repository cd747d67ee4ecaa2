"""Sampling: the next token of each answer from the model's scores, by its own rule, the same on every engine.

Way in: `SamplingState` for each answer, `sample` for a batch, `token_logprobs`. Executors import it; it imports the
engines' protocol.
"""

from elastic.engines.sampling.limits import require_tokens, require_valid
from elastic.engines.sampling.logprobs import token_logprobs
from elastic.engines.sampling.random_numbers import answer_seed
from elastic.engines.sampling.sampler import sample
from elastic.engines.sampling.state import SamplingState

__all__ = ["SamplingState", "answer_seed", "require_tokens", "require_valid", "sample", "token_logprobs"]
