"""A rank, put together: a model is loaded and wrapped, and gets an engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from elastic.cluster.control.connection import Connection
from elastic.cluster.control.messages import ModelFacts
from elastic.cluster.rank.activations import keep_activations
from elastic.cluster.rank.facts import model_facts
from elastic.cluster.rank.rank import Rank
from elastic.cluster.rank.skeleton import load_skeleton
from elastic.cluster.rank.spec import ENGINE_OPTIONS, RankSpec, options_of, rank_places
from elastic.config import Place, require
from elastic.engines.continuous.chunk_profile import fit_cost
from elastic.engines.continuous.engine import ContinuousEngine
from elastic.engines.structured import compiler_of
from elastic.errors import ConfigError, ElasticError
from elastic.memory.places import require_memory
from elastic.model_files import load_weights, read_tokenizer
from elastic.planning.pipeline.chunk_cost import ModelCost
from elastic.runtime.runtime import Runtime
from elastic.weights.decoder import find_decoder
from elastic.wrap import unwrap, wrap

logger = logging.getLogger(__name__)


_loading = threading.Lock()  # transformers changes its modules while it loads: one model at a time in a process
_measuring = threading.Lock()  # ranks of one process would measure each other


@contextmanager
def built(spec: RankSpec, connection: Connection) -> Iterator[Rank]:
    """Give a rank that `run` can be called of; at the end its engine has stopped, and the model is as it came.

    Raises what loading and wrapping raise, in words.
    """
    places = [Place.parse(place) for place in spec.places]
    require_memory(places)
    most_tokens = ENGINE_OPTIONS["max_batch_tokens"].default
    options = {"max_requests": 256, "max_batch_tokens": most_tokens, **options_of("engine", spec.engine)}
    options_of("wrap", spec.wrap)
    with ExitStack() as stack:
        model, facts = _load_wrapped(spec, places, stack) if spec.share is None else _load_share(spec, places, stack)
        if model.elastic.shards > 1:  # digests by which shared weights come back, and leave without being read
            model.elastic.digests(range(len(model.elastic.shards_here)))
        if isinstance(options.get("grammars"), str):
            require(options["grammars"] == "llguidance", "grammars", options["grammars"], "'llguidance', or none")
            options["grammars"] = compiler_of(model, read_tokenizer(str(spec.model), option="model"))
        engine = ContinuousEngine(model, **options)
        stack.callback(engine.stop, drain=False)
        with _measuring, _loading:  # for a rank with a share, a model without data is made
            keep_activations(engine, options["max_batch_tokens"], options["max_requests"], stack)
        cost = _measured_cost(engine, spec, options) if spec.lookahead and spec.share is None else None
        most, held = options["max_requests"], rank_places(spec.places)
        yield Rank(engine, connection, spec.name, facts, max_requests=most, cost=cost, places=held)


def _load_wrapped(spec: RankSpec, places: list[Place], stack: ExitStack) -> tuple[Any, ModelFacts]:
    """Return a wrapped model with all of its weights, and what it is; at the end it is as it came."""
    model = _load(spec, places)
    facts = model_facts(model, [str(variant) for variant in spec.wrap.get("variants", ())])
    if not isinstance(getattr(model, "elastic", None), Runtime):
        has_files = isinstance(spec.model, str | Path) and any(Path(spec.model).glob("*.safetensors"))
        checkpoint = {"checkpoint": spec.model} if has_files else {}  # what it drops comes back from there
        wrap(model, places=places or None, **{**checkpoint, **spec.wrap})
        stack.callback(_unwrap, model, spec.name)
        model.elastic.keep_no_prefetch_buffers()  # layers that others compute are dropped, not released
    return model, facts


def _load_share(spec: RankSpec, places: list[Place], stack: ExitStack) -> tuple[Any, ModelFacts]:
    """Return a wrapped model with the rank's share of the weights, read straight into its pages, and what it is.

    There is never more of the model in memory than that share and a buffer of bounded size.
    """
    assert spec.share is not None, "it has all of the weights"
    if not isinstance(spec.model, str | Path):
        raise ConfigError("tp=, pp=: ranks read their shares of a model's directory; give its path, not the model")
    with _loading:
        model, files = load_skeleton(str(spec.model), _device(places), spec.dtype)
    facts, options = model_facts(model, files=files), {"checkpoint": files, **spec.wrap}
    layers = len(find_decoder(model).layers)
    wrap(model, places=places or None, load_shards=spec.share.shards_of(layers, options.get("shards", 1)), **options)
    stack.callback(_abandon, model)
    model.elastic.keep_no_prefetch_buffers()
    return model, facts


def _abandon(model: Any) -> None:
    """Give the memory of a model back that nobody has had without its wrapping."""
    from elastic.runtime.installation import installations

    installations.pop(model).abandon()


def _device(places: list[Place]) -> torch.device:
    return places[0].device if places else Place.parse("cpu").device


def _measured_cost(engine: ContinuousEngine, spec: RankSpec, options: Mapping[str, Any]) -> ModelCost | None:
    """Fit what steps of an engine cost, and have it use that, unless its options say how long steps are."""
    try:
        with _measuring:
            cost = fit_cost(engine, options["max_batch_tokens"])
    except ElasticError as error:
        logger.warning("rank %s has steps of so many tokens, not of equal cost: %s", spec.name, error)
        return None
    if options.get("step_budget") is None:
        engine.cohorts.use_cost(cost.whole)
    return cost


def _unwrap(model: Any, name: str) -> None:
    """Have a model be as it came, unless other ranks have some of its weights and no file does."""
    runtime: Runtime = model.elastic
    try:
        if runtime.dropped:
            runtime.restore(runtime.dropped)
    except ElasticError as error:
        logger.warning("the model of rank %s stays wrapped: %s", name, error)
        return
    unwrap(model)


def _load(spec: RankSpec, places: list[Place]) -> Any:
    """Return the model of a rank: as it was given, or from its directory, at the device of its first place."""
    if not isinstance(spec.model, str | Path):
        require(spec.dtype == "auto", "dtype", spec.dtype, "'auto', as the model is loaded")
        return spec.model
    device = _device(places)
    with _loading:
        return load_weights(str(spec.model), device, spec.dtype, option="model").to(device)
