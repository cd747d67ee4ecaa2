"""`elastic serve`: a model behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from elastic.cli.inputs.checks import TOKEN, read_secret, require_at_least, require_characters
from elastic.cli.inputs.deployment_options import add_deployments, check_deployments, make_deployments
from elastic.cli.inputs.fleet_options import (
    add_fleet,
    check_fleet,
    engine_options,
    fleet_policies,
    make_fleet,
    make_launcher,
    read_configs,
)
from elastic.cli.inputs.intent_options import intent_of, load_of, said_load
from elastic.cli.inputs.model_loading import add_dtype
from elastic.config import SLO, Place, parse_bytes
from elastic.engines.structured import compiler_of
from elastic.errors import ConfigError
from elastic.memory.places import require_memory
from elastic.weights.decoder import batch_context_length

API_KEY = "ELASTIC_API_KEY"


def add_options(command: ArgumentParser) -> None:
    """Add the options of the command."""
    command.add_argument("model", metavar="MODEL", help="model directory")
    _add_address(command)
    _add_answers(command)
    _add_requests(command)
    _add_secrets(command)
    add_engine(command)
    add_memory(command)
    add_fleet(command)
    add_deployments(command)


def _add_address(command: ArgumentParser) -> None:
    group = command.add_argument_group("the server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)")
    group.add_argument("--port", type=int, default=8000, help="port to listen on (8000; 0: a free one)")
    group.add_argument("--served-model-name", metavar="NAME", help="name of the model (its directory's)")
    group.add_argument("--drain-seconds", type=float, default=30.0, metavar="S", help="to finish on SIGTERM (30)")


def _add_answers(command: ArgumentParser) -> None:
    group = command.add_argument_group("answers")
    group.add_argument("--max-model-len", type=int, metavar="N", help="tokens of prompt and answer (the model's)")
    group.add_argument(
        "--generation-config",
        default="auto",
        metavar="FROM",
        help="sampling where a request says nothing: auto (the model's generation_config.json), a directory with one, "
        "or vllm (temperature 1 and all tokens)",
    )
    group.add_argument(
        "--tool-call-parser",
        metavar="FORMAT",
        help="how the model writes calls of tools: hermes (Qwen too), llama3_json, mistral or pythonic",
    )


def _add_requests(command: ArgumentParser) -> None:
    group = command.add_argument_group("bounds on requests", "what is beyond them is refused, and the server goes on")
    group.add_argument("--max-queue", type=int, metavar="N", help="requests that may wait (not bounded)")
    group.add_argument("--max-body", default="4MiB", metavar="SIZE", help="bound on the body of a request (4MiB)")
    group.add_argument(
        "--header-timeout", type=float, default=20.0, metavar="S", help="for a client to send a request's head (20)"
    )
    group.add_argument(
        "--body-timeout", type=float, default=60.0, metavar="S", help="for a client to send a request's body (60)"
    )


def _add_secrets(command: ArgumentParser) -> None:
    group = command.add_argument_group("who may use it")
    group.add_argument("--api-key-file", metavar="FILE", help=f"file with a key that /v1 asks for (else ${API_KEY})")
    group.add_argument(
        "--enable-actions", action="store_true", help="open /elastic/actions and /elastic/fleet to holders of the token"
    )
    group.add_argument("--token-file", metavar="FILE", help=f"file with the token for actions (else ${TOKEN})")
    group.add_argument(
        "--allowed-origins",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="origins of web pages that may use the server from a browser, as https://example.com, or * (none)",
    )
    group.add_argument(
        "--allowed-hosts",
        nargs="+",
        metavar="NAME",
        help="names in Host headers to answer to, as example.com, *.example.com or * "
        "(this machine's where only it can reach the server, else any)",
    )


def add_engine(command: ArgumentParser) -> None:
    """Add the options of the engine that computes: those of `ENGINE`."""
    group = command.add_argument_group("how answers are computed")
    group.add_argument(
        "--kv-cache-dtype", choices=("auto", "int8"), default="auto", help="of keys and values (auto: the model's)"
    )
    group.add_argument(
        "--enforce-eager", action="store_true", help="call the model at each step (on a CPU decode steps are replayed)"
    )
    group.add_argument("--cuda-graphs", action="store_true", help="replay decode steps on a GPU, too, as CUDA graphs")


def add_memory(command: ArgumentParser) -> None:
    """Add the options that `wrap_options` reads."""
    group = command.add_argument_group("memory and policy")
    group.add_argument(
        "--place", action="append", metavar="PLACE", help="memory to use, such as cpu=64MiB or cuda:0=20GiB; repeatable"
    )
    add_dtype(group)
    group.add_argument("--variants", nargs="+", default=[], metavar="NAME", help="what layers can be in, as int4 2:4")
    group.add_argument(
        "--policy",
        metavar="NAME",
        help="accuracy, balanced, performance or manual (balanced where there are variants); "
        "of a fleet also drop: ranks compute each other's layers when KV runs out; or lengths: they share them when a "
        "request is too long for each; or both: drop,lengths",
    )
    group.add_argument(
        "--shards", type=int, metavar="N", help="parts of each layer that ranks can share (1; 4 with lengths)"
    )
    group.add_argument(
        "--prepack", action="store_true", help="matrices in the order that a CPU multiplies fastest; rounds otherwise"
    )
    group.add_argument("--order", metavar="ORDER", help="which layers to swap first: a name, or a profile's file")
    group.add_argument("--slo-ttft", type=float, metavar="S", help="time to the first token that is to be kept")
    group.add_argument("--slo-tpot", type=float, metavar="S", help="time per further token that is to be kept")


def serve(options: Namespace) -> int:
    """Load, wrap, serve until a signal, unwrap; returns the exit code."""
    from elastic.server import create_app, run
    from elastic.server.uvicorn_server import bind

    token = read_secret("--token-file", options.token_file, TOKEN)
    api_key = read_secret("--api-key-file", options.api_key_file, API_KEY)
    _check(options, token)
    chosen, name = wrap_options(options), options.served_model_name
    if name is None:
        name = require_characters(Path(options.model).resolve().name, "the name of MODEL's directory")
    else:
        require_characters(name, "--served-model-name")
    with ExitStack() as stack:
        bound = stack.enter_context(bind(options.host, options.port))  # before minutes are spent on the model
        if options.devices is not None:
            served = deployed(options, name, stack)
        else:
            served = (fleet_of if options.ranks is not None else model_of)(options, chosen, stack)
        app = create_app(
            name=name,
            **served,
            api_key=api_key,
            token=token,
            actions=options.enable_actions,
            max_body=options.max_body,
            body_timeout_s=options.body_timeout,
            tool_call_parser=options.tool_call_parser,
            allowed_origins=options.allowed_origins,
            model_options=lambda path: answering(path, options, beside=True),
        )
        return run(
            app,
            host=options.host,
            bound=bound,
            drain_s=options.drain_seconds,
            header_timeout_s=options.header_timeout,
            allowed_hosts=options.allowed_hosts,
        )


def model_of(options: Namespace, chosen: Mapping[str, Any], stack: ExitStack) -> dict[str, Any]:
    """Load a model into this process, wrap it, and make its engine, not started yet; `stack` ends all.

    Returns arguments of `create_app`, as `fleet_of` and `deployed` do.
    """
    import elastic
    from elastic.engines.continuous.engine import ContinuousEngine
    from elastic.model_files import load_model

    device = Place.parse((options.place or ["cpu"])[0]).device
    model, tokenizer = load_model(options.model, device, options.dtype or "auto", option="MODEL")
    max_model_len = longest(model, options)
    elastic.wrap(model.to(device), **chosen)
    stack.callback(elastic.unwrap, model)
    grammars = compiler_of(model, tokenizer)
    engine = ContinuousEngine(model, max_queue=options.max_queue, grammars=grammars, **engine_options(options))
    stack.callback(engine.stop, drain=False)
    return {
        "engine": engine,
        "tokenizer": tokenizer,
        "max_model_len": max_model_len,
        "sampling_defaults": sampling_defaults(model, options.generation_config),
        "grammars": grammars,
    }


def fleet_of(options: Namespace, chosen: Mapping[str, Any], stack: ExitStack) -> dict[str, Any]:
    """Start the ranks of a fleet, which load the model; this process has its tokenizer alone. `stack` ends them."""
    launcher = make_launcher(options)
    if not isinstance(launcher, str):
        stack.callback(launcher.close)
    own = answering(options.model, options)
    fleet = make_fleet(options, launcher, chosen, own["grammars"])
    stack.callback(fleet.stop, drain=False)
    fleet.start()
    return {"engine": fleet, **own}


def deployed(options: Namespace, name: str, stack: ExitStack) -> dict[str, Any]:
    """Deploy the model by its intent, where others can be deployed beside it; `stack` ends all."""
    path = os.path.abspath(str(options.model))  # the same wherever ranks run
    deployments = make_deployments(options)
    own = answering(path, options)
    stack.callback(deployments.stop, drain=False)
    deployments.start()
    load = load_of(options) if said_load(options) else None
    replicas = 1 if options.replicas is None else options.replicas
    status = deployments.deploy(path, intent_of(options), name=name, load=load, replicas=replicas)
    devices = dict.fromkeys(device for stage in status.stages for device in stage.devices)
    print(f"{name} is {status.configuration} on {', '.join(devices)}", flush=True)
    return {"engine": deployments[name], **own, "deployments": deployments}


def answering(path: str, options: Namespace, *, beside: bool = False) -> dict[str, Any]:
    """Return what a server needs besides ranks to answer for the model of a directory. Raises `ConfigError`.

    `beside`: it is not the server's own model, for which the options were said.
    """
    tokenizer, model = read_configs(path)
    return {
        "tokenizer": tokenizer,
        "max_model_len": longest(model, options, beside=beside),
        "sampling_defaults": sampling_defaults(model, options.generation_config),
        "grammars": compiler_of(model, tokenizer),
    }


def sampling_defaults(model: Any, source: str) -> dict[str, float]:
    """Return the sampling that `--generation-config` names. Raises `ConfigError`."""
    from transformers import GenerationConfig

    from elastic.server.generation.sampling_defaults import checked, of_generation_config

    if source == "vllm":
        return {}
    config = getattr(model, "generation_config", None)
    if source != "auto":
        if not os.path.isdir(source):  # a name would be looked for at the hub
            raise ConfigError(f"--generation-config {source}: there is no such directory; give one, or auto or vllm")
        try:
            config = GenerationConfig.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--generation-config {source}: {error}; give auto, vllm, or a directory") from error
    return checked(of_generation_config(config))


def wrap_options(options: Namespace) -> dict[str, Any]:
    """Return the keyword arguments of `elastic.wrap`."""
    of_fleet = fleet_policies(options)
    policy = None if of_fleet else options.policy
    if policy is None:
        policy = "balanced" if options.variants and "drop" not in of_fleet else "manual"
    chosen: dict[str, Any] = {"places": options.place, "variants": tuple(options.variants), "policy": policy}
    slo = SLO(ttft_s=options.slo_ttft, tpot_s=options.slo_tpot)
    given = {"shards": options.shards, "prepack": options.prepack or None, "order": options.order}
    given["slo"] = None if slo == SLO() else slo
    return chosen | {name: value for name, value in given.items() if value is not None}


def _check(options: Namespace, token: str | None) -> None:
    """Raise `ConfigError` for wrong options, before a model is loaded."""
    from elastic.runtime.options import check_prepack
    from elastic.server.hosts import check_hosts, check_origins
    from elastic.server.tools.formats import TOOL_FORMATS

    if options.tool_call_parser is not None and options.tool_call_parser not in TOOL_FORMATS:
        raise ConfigError(f"--tool-call-parser {options.tool_call_parser}: choose one of {', '.join(TOOL_FORMATS)}")
    if options.enable_actions and not token:
        raise ConfigError(f"--enable-actions needs a token: give --token-file FILE, or set {TOKEN}")
    if not 0 <= options.port < 65536:
        raise ConfigError(f"--port {options.port} is not a port; use 0 to 65535")
    if options.order is not None and not options.variants:
        raise ConfigError("--order is of layers that are swapped; give --variants too, or leave it out")
    check_hosts(options.allowed_hosts or (), "--allowed-hosts")
    check_origins(options.allowed_origins, "--allowed-origins")
    check_fleet(options)
    check_deployments(options)
    if options.ranks is None and options.devices is None:
        places = [Place.parse(place) for place in options.place or ["cpu"]]
        require_memory(places)
        check_prepack(options.prepack, places, options.shards or 1, None)
    require_at_least(0, options.drain_seconds, "--drain-seconds")
    for option in ("header_timeout", "body_timeout"):
        if not getattr(options, option) > 0:
            raise ConfigError(f"--{option.replace('_', '-')} {getattr(options, option)} must be above 0")
    require_at_least(1, options.max_queue, "--max-queue")
    require_at_least(2, options.max_model_len, "--max-model-len")
    require_at_least(1, parse_bytes(options.max_body, option="--max-body"), "--max-body")


def longest(model: Any, options: Namespace, *, beside: bool = False) -> int | None:
    """Return the most tokens of prompt and answer: the option's, or the model's.

    Raises `ConfigError` for an option that is more than the model's, unless that is one `beside` the server's own.
    """
    context = batch_context_length(model.config.get_text_config(decoder=True))
    wanted: int | None = options.max_model_len
    if context and wanted is not None and wanted > context:
        if beside:
            return context
        raise ConfigError(
            f"--max-model-len {wanted} is more than the {context} tokens of the model's context (with longrope: of the "
            "original one)"
        )
    return context if wanted is None else wanted
