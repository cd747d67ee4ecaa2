"""A rank, put together: a model is loaded and wrapped, and gets an engine."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from elastic.cluster.control.connection import Connection
from elastic.cluster.rank.facts import model_facts
from elastic.cluster.rank.rank import Rank
from elastic.cluster.rank.spec import RankSpec
from elastic.config import Place
from elastic.engines.base import GrammarCompiler
from elastic.engines.continuous.engine import ContinuousEngine
from elastic.engines.stopping import end_tokens
from elastic.engines.structured import LlguidanceCompiler
from elastic.errors import BackendUnavailable, ConfigError
from elastic.memory.places import require_memory
from elastic.model_files import load_model
from elastic.runtime.runtime import Runtime
from elastic.wrap import unwrap, wrap

logger = logging.getLogger(__name__)


@contextmanager
def built(spec: RankSpec, connection: Connection) -> Iterator[Rank]:
    """Give a rank that `run` can be called of; at the end its engine has stopped, and the model is as it came.

    Raises what loading and wrapping raise, in words.
    """
    places = [Place.parse(place) for place in spec.places]
    require_memory(places)
    if unknown := sorted(spec.engine.keys() - _ENGINE_OPTIONS):
        raise ConfigError(f"engine: no option {unknown[0]!r}; there are {', '.join(sorted(_ENGINE_OPTIONS))}")
    with ExitStack() as stack:
        model, tokenizer = _load(spec, places)
        facts = model_facts(model, [str(variant) for variant in spec.wrap.get("variants", ())])
        if not isinstance(getattr(model, "elastic", None), Runtime):
            wrap(model, places=places or None, **spec.wrap)
            stack.callback(unwrap, model)
        options = dict(spec.engine)
        if tokenizer is not None and "grammars" not in options:
            options["grammars"] = _grammars(model, tokenizer)
        engine = ContinuousEngine(model, **options)
        stack.callback(engine.stop, drain=False)
        yield Rank(engine, connection, spec.name, facts, max_requests=options.get("max_requests", 256))


def _load(spec: RankSpec, places: list[Place]) -> tuple[Any, Any]:
    """Return the model of a rank at the device of its first place, and its tokenizer, if it comes from a directory."""
    if not isinstance(spec.model, str | Path):
        return spec.model, None
    device = places[0].device if places else Place.parse("cpu").device
    model, tokenizer = load_model(str(spec.model), device, option="model")
    return model.to(device), tokenizer


def _grammars(model: Any, tokenizer: Any) -> GrammarCompiler | None:
    """Return the compiler of grammars, where answers of the model can end and its package is there."""
    ends = dict.fromkeys([*end_tokens(model), *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])])
    try:
        return LlguidanceCompiler(tokenizer, tuple(ends)) if ends else None
    except BackendUnavailable as error:
        logger.info("no structured output: %s", error)
        return None


_ENGINE_OPTIONS = inspect.signature(ContinuousEngine).parameters.keys() - {"model"}
