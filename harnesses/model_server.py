"""A scripted model behind the three APIs that agents speak, as an upstream of the proxy.

`/v1/chat/completions`, `/v1/responses` (and `/compact` of it), `/v1/messages`, whole and streamed, with
`/v1/messages/count_tokens`, `/v1/models`, `/tokenize`, `/version` and `/health`. What it says is
`harnesses.script`; tokens and cache are `harnesses.engine`. Every request is recorded as it came.
"""

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from engine_bridge.errors import BridgeError
from engine_bridge.sim.clock import NANOSECONDS
from engine_bridge.sim.embedded import LOOPBACK
from engine_bridge.sim.requests import FinishedOutput, SimRequest, TokenOutput
from harnesses.conversation import CHAT, MESSAGES, RESPONSES, read_request
from harnesses.engine import MODEL_NAME, Computed, ScriptedEngine
from harnesses.script import Reply, reply_to
from harnesses.wire import Answer, ChatForm, Form, MessagesForm, ResponsesForm, Tokens, new_answer

TRUTH_HEADER = "x-harness-truth"
"""By which a driver may say whose a request is, and how it follows: `context; relation=append`."""

_FORMS: Mapping[str, tuple[Form, str, str]] = {
    CHAT: (ChatForm(), "chatcmpl-", "call_"),
    RESPONSES: (ResponsesForm(), "resp_", "call_"),
    MESSAGES: (MessagesForm(), "msg_", "toolu_"),
}

Talk = Callable[..., Reply]


class Exchange(msgspec.Struct, kw_only=True):
    """One request as it came and how it was answered. Times in seconds since the server started, but for
    `at_ns`, nanoseconds since the epoch.

    `answered_at` 0: it was not, or not to its end.
    """

    number: int
    at: float
    at_ns: int
    method: str
    path: str
    headers: list[tuple[str, str]]
    body: Any
    answer: Answer | None = None
    computed: Computed | None = None
    answered_at: float = 0.0

    def header(self, name: str) -> str:
        """A header's value, empty if it is not there."""
        return next((value for each, value in self.headers if each == name), "")

    def line(self) -> dict[str, Any]:
        """What is recorded of it, for JSON."""
        answer, computed = self.answer, self.computed
        return {
            "number": self.number,
            "at": self.at,
            "answered_at": self.answered_at,
            "method": self.method,
            "path": self.path,
            "headers": self.headers,
            "body": self.body,
            "kind": answer.reply.kind if answer else "",
            "task": answer.reply.task_id if answer else "",
            "answer": answer and {"id": answer.answer_id, **answer.chat_message()},
            "prompt_tokens": len(computed.prompt) if computed else 0,
            "not_mapped": computed.reason if computed else "",
        }


class ModelServer:
    """The application and what it recorded. `record` is a file of JSON lines, or None."""

    def __init__(self, engine: ScriptedEngine, record: Path | None = None, talk: Talk = reply_to) -> None:
        self.engine = engine
        self.exchanges: list[Exchange] = []
        self.unknown: set[str] = set()
        """Paths that were asked for in vain."""
        self._record = record
        self._talk = talk
        self._started = time.monotonic()
        self.url = ""

    def app(self) -> FastAPI:
        """The ASGI application."""
        app = FastAPI(title="scripted model")
        for path in (CHAT, RESPONSES, MESSAGES):
            app.add_api_route(path, self._inference, methods=["POST"], response_model=None)
        for method, path, handler in (
            ("POST", "/v1/responses/compact", self._compact),
            ("POST", "/v1/messages/count_tokens", self._count),
            ("POST", "/tokenize", self._tokenize),
            ("GET", "/v1/models", self._models),
            ("GET", "/version", self._version),
            ("GET", "/health", self._health),
        ):
            app.add_api_route(path, handler, methods=[method], response_model=None)
        app.add_api_route("/{rest:path}", self._unknown, methods=["GET", "POST", "HEAD"], response_model=None)
        return app

    async def _inference(self, request: Request) -> Response:
        exchange = await self._noted(request)
        body = exchange.body if isinstance(exchange.body, dict) else {}
        path = request.url.path
        form, prefix, call_prefix = _FORMS[path]
        reply = self._talk(read_request(path, body))
        answer = new_answer(prefix, call_prefix, reply, str(body.get("model") or MODEL_NAME), _seconds())
        computed, asked = await self.engine.compute(path, body, answer.chat_message())
        exchange.answer, exchange.computed = answer, computed
        if path == RESPONSES:
            self.engine.remember(body, answer.answer_id, reply.text)
        if body.get("stream") is True:
            return StreamingResponse(self._streamed(exchange, form, asked), media_type="text/event-stream")
        cached = 0
        async with contextlib.aclosing(self.engine.generate(asked)) as outputs:
            async for output in outputs:
                if isinstance(output, FinishedOutput):
                    cached = output.usage.cached_tokens
        tokens = Tokens(len(computed.prompt), len(asked.output_ids), cached)
        self._answered(exchange)
        return JSONResponse(form.whole(answer, tokens))

    async def _streamed(self, exchange: Exchange, form: Form, asked: SimRequest) -> AsyncIterator[bytes]:
        answer, body = exchange.answer, exchange.body
        assert answer is not None
        tokens = Tokens(len(asked.token_ids), len(asked.output_ids))
        async with contextlib.aclosing(self.engine.generate(asked)) as outputs:
            async for output in outputs:
                if isinstance(output, TokenOutput) and output.index == 0:
                    for piece in form.opening(answer, tokens):
                        yield piece
                elif isinstance(output, FinishedOutput):
                    tokens = Tokens(tokens.prompt, tokens.answer, output.usage.cached_tokens)
        self._answered(exchange)
        for piece in form.rest(answer, tokens, body):
            yield piece

    async def _compact(self, request: Request) -> Response:
        """Codex's remote compaction: the summary is an item that only the model reads."""
        exchange = await self._noted(request)
        body = exchange.body if isinstance(exchange.body, dict) else {}
        reply = self._talk(read_request(RESPONSES, {**body, "tools": []}))
        answer = new_answer("resp_", "call_", msgspec.structs.replace(reply, kind="summary"), "", _seconds())
        exchange.answer = answer
        self._answered(exchange)
        item = {"type": "compaction", "id": f"cmp_{answer.answer_id}", "encrypted_content": reply.text}
        head = {"id": answer.answer_id, "object": "response.compaction", "created_at": answer.created}
        return JSONResponse({**head, "output": [item], "usage": None})

    async def _count(self, request: Request) -> Response:
        exchange = await self._noted(request)
        self._answered(exchange)
        try:
            tokens = self.engine.tokenizer.prompt_ids(self.engine.prompt_of(MESSAGES, exchange.body))
        except BridgeError:
            return JSONResponse({"input_tokens": len(json.dumps(exchange.body)) // 4})
        return JSONResponse({"input_tokens": len(tokens)})

    async def _tokenize(self, request: Request) -> Response:
        body = (await self._noted(request)).body
        try:
            if "messages" in body:
                tokens = self.engine.tokenizer.prompt_ids(self.engine.prompt_of(CHAT, body))
            else:
                tokens = self.engine.tokenizer.encode(str(body.get("prompt", "")))
        except BridgeError as error:
            return JSONResponse({"error": {"message": str(error)}}, 400)
        length = self.engine.config.max_model_len
        return JSONResponse({"count": len(tokens), "max_model_len": length, "tokens": tokens.tolist()})

    async def _models(self, request: Request) -> Response:
        await self._noted(request)
        card = {
            "id": MODEL_NAME,
            "object": "model",
            "created": 0,
            "owned_by": "script",
            "root": str(self.engine.model_path),
            "max_model_len": self.engine.config.max_model_len,
        }
        return JSONResponse({"object": "list", "data": [card], "has_more": False})

    async def _version(self) -> Response:
        return JSONResponse({"version": "0.32.0+scripted"})

    async def _health(self) -> Response:
        return Response()

    async def _unknown(self, request: Request) -> Response:
        self.unknown.add((await self._noted(request)).path)
        return JSONResponse({"error": {"message": "not here", "type": "not_found_error"}}, 404)

    async def _noted(self, request: Request) -> Exchange:
        raw = await request.body()
        try:
            body = msgspec.json.decode(raw) if raw else None
        except msgspec.DecodeError:
            body = raw.decode("utf-8", "replace")
        exchange = Exchange(
            number=len(self.exchanges),
            at=self._now(),
            at_ns=self.engine.runner.clock.now_ns(),
            method=request.method,
            path=request.url.path,
            headers=[
                (name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw
            ],
            body=body,
        )
        self.exchanges.append(exchange)
        return exchange

    def _answered(self, exchange: Exchange) -> None:
        exchange.answered_at = self._now()
        if self._record is not None:
            with self._record.open("ab") as file:
                file.write(msgspec.json.encode(exchange.line()) + b"\n")

    def _now(self) -> float:
        return time.monotonic() - self._started


def _seconds() -> int:
    return time.time_ns() // NANOSECONDS


class _Server(uvicorn.Server):
    """Signals belong to the process."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


@asynccontextmanager
async def scripted_model(
    record: Path | None = None, port: int = 0, talk: Talk = reply_to, engine: ScriptedEngine | None = None
) -> AsyncIterator[ModelServer]:
    """Serve on loopback until the block ends; port 0 takes a free one."""
    async with engine or ScriptedEngine() as running:
        served = ModelServer(running, record, talk)
        server = _Server(
            uvicorn.Config(
                served.app(),
                host=LOOPBACK,
                port=port,
                loop="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=1,
            )
        )
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve())
            while not server.started:
                if serving.done():
                    raise RuntimeError("the scripted model cannot listen")
                await asyncio.sleep(0.01)
            served.url = "http://{}:{}".format(*server.servers[0].sockets[0].getsockname()[:2])
            try:
                yield served
            finally:
                server.should_exit = True
                await asyncio.wait([serving])


async def _serve(port: int, record: Path | None) -> None:
    async with scripted_model(record, port) as served:
        print(f"scripted model at {served.url}")
        await asyncio.Event().wait()


def main() -> None:
    """`python -m harnesses.model_server [--port N] [--record FILE]`: serve until interrupted."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(given.port, given.record))


if __name__ == "__main__":
    main()
