"""vLLM's endpoints `/tokenize`, `/detokenize` and `/version`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from elastic import __version__
from elastic.server.generation.bodies import JSONRoute
from elastic.server.protocol.tokens import DetokenizeBody, TokenizeBody
from elastic.server.routes.catalogue import Catalogue


def routes(models: Catalogue) -> APIRouter:
    """Make the endpoints. Texts are tokenized where those of other requests are: never on the event loop."""
    router = APIRouter(route_class=JSONRoute)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        serving = models.named(body.model)
        body.check()
        if body.prompt is None:
            tokens = await serving.prompts.encode_chat(body, add_special_tokens=body.add_special_tokens)
        else:
            tokens = await serving.prompts.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        names = await serving.prompts.names(tokens) if body.return_token_strs else None
        return {"count": len(tokens), "max_model_len": serving.longest_request, "tokens": tokens, "token_strs": names}

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        serving = models.named(body.model)
        body.check()
        return {"prompt": await serving.prompts.decode(body.tokens)}

    @router.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": __version__}

    return router
