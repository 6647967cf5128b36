"""The embedded engine's HTTP surface: that part of vLLM's OpenAI-compatible server which text needs.

Multimodal inputs, embeddings, log probabilities and adapters are not there. `/reset_prefix_cache` is, as with
vLLM in its development mode.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from engine_bridge.chunk_keys import chunk_keys
from engine_bridge.errors import RejectedByEngine, Unmappable
from engine_bridge.mapping.prompts import ChatPrompt
from engine_bridge.sim.answers import Answer, ChatForm, Choice, Form, TextForm, error_document, new_id
from engine_bridge.sim.clock import NANOSECONDS
from engine_bridge.sim.generation import Ask, Refused, Speaker, read_chat, read_completion
from engine_bridge.sim.requests import SimRequest
from engine_bridge.sim.runner import EngineRunner
from engine_bridge.sim.tokenizer import ChatTokenizer
from lifecycle.core.ids import split_keys
from lifecycle.vocabulary import KV_TRANSFER_PARAMS, Tier

VERSION = "0.32.0+kvtether.sim"
"""What `/version` says: whose behaviour this follows, and that it is not it."""


class EngineApi:
    """Routes and what they need. `root` is the model's path, as vLLM's `/v1/models` tells it."""

    def __init__(
        self,
        runner: EngineRunner,
        tokenizer: ChatTokenizer,
        speaker: Speaker,
        model_name: str,
        root: str,
        save_generated: bool,
        max_model_len: int,
    ) -> None:
        self._runner = runner
        self._tokenizer = tokenizer
        self._speaker = speaker
        self._model_name = model_name
        self._root = root
        self._save_generated = save_generated
        self._max_model_len = max_model_len
        self._started = self._now()

    def app(self) -> FastAPI:
        """The ASGI application."""
        app = FastAPI(title="kvtether embedded engine", version=VERSION)
        for method, path, handler in (
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/completions", self.completion),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            ("POST", "/reset_prefix_cache", self.reset_prefix_cache),
            ("GET", "/v1/models", self.models),
            ("GET", "/version", self.version),
            ("GET", "/health", self.health),
            ("GET", "/ping", self.health),
            ("GET", "/metrics", self.metrics),
        ):
            app.add_api_route(path, handler, methods=[method], response_model=None)
        app.add_exception_handler(Refused, _refused)
        return app

    async def chat(self, request: Request) -> Response:
        body = await self._body(request)
        ask = await self._off_the_loop(read_chat, body)
        return await self._answer([ask], ChatForm(), "chatcmpl")

    async def completion(self, request: Request) -> Response:
        body = await self._body(request)
        asks = await self._off_the_loop(read_completion, body)
        return await self._answer(asks, TextForm(), "cmpl")

    async def _off_the_loop(self, read: Callable[..., Any], body: dict[str, Any]) -> Any:
        """Long prompts take long to encode, and others share this loop."""
        return await asyncio.to_thread(read, body, self._tokenizer, self._max_model_len)

    async def _answer(self, asks: list[Ask], form: Form, kind: str) -> Response:
        name = new_id(kind)
        choices = await asyncio.to_thread(self._choices, asks, name)
        extra: dict[str, Any] = {}
        first = asks[0]
        if first.body.get("return_token_ids") and isinstance(form, ChatForm):
            extra["prompt_token_ids"] = first.prompt.tolist()
        if first.body.get(KV_TRANSFER_PARAMS) is not None:
            extra[KV_TRANSFER_PARAMS] = None
        if first.wants_cache_stats:
            extra[KV_TRANSFER_PARAMS] = self._cached_before(first)
        head = {"id": name, "created": self._now(), "model": self._model_name}
        return _Application(Answer(self._runner, form, choices, head, extra))

    def _choices(self, asks: list[Ask], name: str) -> list[Choice]:
        choices: list[Choice] = []
        for ask in asks:
            for number in range(ask.num_choices):
                said = self._speaker.generation(ask, number)
                index = len(choices)
                request = SimRequest(
                    request_id=f"{name}-{index}",
                    token_ids=ask.prompt,
                    output_ids=said.ids,
                    session_id=ask.session_id,
                    salt=ask.salt,
                    store_until=ask.store_until,
                    save_generated=self._save_generated,
                )
                choices.append(Choice(index=index, ask=ask, said=said, request=request))
        return choices

    def _cached_before(self, ask: Ask) -> dict[str, Any]:
        """What LMCache's lookup finds of a prompt, as its connector reports it."""
        size = self._runner.engine.config.chunk_tokens
        keys = split_keys(chunk_keys(ask.prompt, size))
        found = self._runner.locate(ask.salt, keys)
        hits = next((n for n, tiers in enumerate(found) if not tiers & {Tier.L1, Tier.L2}), len(found)) * size
        return {"cached_token_stats": {"num_lmcache_cached_tokens": min(hits, len(ask.prompt) - 1)}}

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request)
        try:
            if "messages" in body:
                chat = ChatPrompt.from_body({**body, "add_special_tokens": None})
                ids = await asyncio.to_thread(self._tokenizer.prompt_ids, chat)
            else:
                text = body.get("prompt")
                if not isinstance(text, str):
                    raise Refused("prompt must be a string", "prompt")
                ids = self._tokenizer.encode(text)
        except (RejectedByEngine, Unmappable) as error:
            raise Refused(str(error)) from error
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": self._max_model_len,
            "tokens": ids.tolist(),
            "token_strs": self._tokenizer.names(ids) if body.get("return_token_strs") else None,
        }
        return JSONResponse(answer)

    async def detokenize(self, request: Request) -> Response:
        tokens = (await self._body(request)).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(each, int) and each >= 0 for each in tokens):
            raise Refused("tokens must be a list of token ids", "tokens")
        return JSONResponse({"prompt": self._tokenizer.decode(tokens, skip_special=False)})

    async def reset_prefix_cache(self) -> Response:
        """Empty HBM. As vLLM it answers 200 also where requests stand in the way."""
        self._runner.reset_prefix_cache()
        return Response()

    async def models(self) -> Response:
        card = {
            "id": self._model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "kvtether",
            "root": self._root,
            "parent": None,
            "max_model_len": self._max_model_len,
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def version(self) -> Response:
        return JSONResponse({"version": VERSION})

    async def health(self) -> Response:
        return Response()

    async def metrics(self) -> Response:
        """A few of vLLM's metrics."""
        stats = self._runner.stats()
        hbm = stats.tiers[Tier.GPU]
        values = {
            ("vllm:num_requests_running", "gauge"): stats.num_running,
            ("vllm:num_requests_waiting", "gauge"): stats.num_waiting,
            ("vllm:kv_cache_usage_perc", "gauge"): hbm.reserved_bytes / max(1, hbm.capacity_bytes),
            ("vllm:prompt_tokens_total", "counter"): stats.tokens.prompt_tokens,
            ("vllm:generation_tokens_total", "counter"): stats.tokens.completion_tokens,
            ("vllm:prefix_cache_queries_total", "counter"): stats.tokens.prompt_tokens,
            ("vllm:prefix_cache_hits_total", "counter"): stats.tokens.hbm_tokens,
            ("vllm:external_prefix_cache_hits_total", "counter"): stats.tokens.l1_tokens
            + stats.tokens.l2_tokens,
        }
        lines = []
        for (name, kind), value in values.items():
            lines += [f"# TYPE {name.removesuffix('_total')} {kind}"]
            lines += [f'{name}{{engine="0",model_name="{self._model_name}"}} {float(value)}']
        return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _body(self, request: Request) -> dict[str, Any]:
        """The parsed body. Raises `Refused`, also for a model that is not served."""
        try:
            body = msgspec.json.decode(await request.body())
        except msgspec.DecodeError as error:
            raise Refused(f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise Refused("the body is not an object")
        model = body.get("model")
        if model is not None and model != self._model_name:
            raise Refused(
                f"The model `{model}` does not exist. Valid aliases: {self._model_name}.", "model", 404
            )
        return body

    def _now(self) -> int:
        return self._runner.clock.now_ns() // NANOSECONDS


class _Application(Response):
    """An ASGI application as the answer to a request."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._answer(scope, receive, send)


async def _refused(request: Request, error: Exception) -> Response:
    if not isinstance(error, Refused):
        raise error
    return JSONResponse(error_document(str(error), error.kind, error.status, error.param), error.status)
