"""What cannot work is refused in words when the engine starts."""

from __future__ import annotations

import pytest

from elastic import ConfigError
from support.vllm_engine.engine import elastic_engine, run


def test_a_budget_too_small_for_the_longest_request_is_refused_and_a_larger_one_serves() -> None:
    with pytest.raises(ConfigError, match="lower max_model_len or raise the budget"), elastic_engine("14MiB"):
        pass
    with elastic_engine("20MiB") as llm:
        assert len(run(llm, [4])[0]) == 4
