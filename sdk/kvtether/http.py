"""Hooks for httpx clients: calls of the current context carry its headers and its operations.

`OpenAI(http_client=kvtether.http.client())` is all that an agent needs beside its contexts. httpx is imported
only where a client is made.
"""

import json
from typing import Any

from kvtether.client import Client, default_client
from kvtether.context import current
from kvtether.names import LIFECYCLE_BODY_FIELD, LIFECYCLE_HEADER

_INFERENCE = ("/chat/completions", "/completions", "/messages", "/responses", "/generate")


def hooks(client: Client | None = None) -> dict[str, list[Any]]:
    """`event_hooks` for a sync httpx client. `client` learns of answers where no context is current."""

    def before(request: Any) -> None:
        _before(request)

    def after(response: Any) -> None:
        _after(response, client)

    return {"request": [before], "response": [after]}


def async_hooks(client: Client | None = None) -> dict[str, list[Any]]:
    """`event_hooks` for an async httpx client."""

    async def before(request: Any) -> None:
        _before(request)

    async def after(response: Any) -> None:
        _after(response, client)

    return {"request": [before], "response": [after]}


def client(**options: Any) -> Any:
    """An `httpx.Client` with the hooks; `options` are its own."""
    return _library().Client(event_hooks=hooks(), **options)


def async_client(**options: Any) -> Any:
    """An `httpx.AsyncClient` with the hooks; `options` are its own."""
    return _library().AsyncClient(event_hooks=async_hooks(), **options)


def _library() -> Any:
    """httpx, or what new OpenAI clients come with in its stead."""
    try:
        import httpx
    except ImportError:
        import httpx2

        return httpx2
    return httpx


def _before(request: Any) -> None:
    context = current()
    if context is None or request.method != "POST" or not request.url.path.endswith(_INFERENCE):
        return
    if LIFECYCLE_HEADER in request.headers or not context.client.serves(str(request.url)):
        return
    content = _object(request)
    if content is None:
        request.headers.update(context.headers())
        return
    said = context.call()
    request.headers.update(said["extra_headers"])
    if said["extra_body"] is not None:
        # In front of the members, so that every other byte stays.
        ours = json.dumps(said["extra_body"][LIFECYCLE_BODY_FIELD], separators=(",", ":")).encode()
        content = b'{"%s":%s,%s' % (LIFECYCLE_BODY_FIELD.encode(), ours, content)
        request.stream = type(request.stream)(content)
        request.headers["content-length"] = str(len(content))


def _object(request: Any) -> bytes | None:
    """The members of a JSON body, without the brace before them; None if nothing can be put there."""
    content_type = request.headers.get("content-type", "")
    if not content_type.startswith("application/json") or "content-encoding" in request.headers:
        return None
    if type(request.stream).__name__ != "ByteStream":
        return None
    content = request.read()
    members = content[1:].lstrip()
    return members if content[:1] == b"{" and members[:1] == b'"' else None


def _after(response: Any, client: Client | None) -> None:
    if not response.request.url.path.endswith(_INFERENCE):
        return
    context = current()
    told = context.client if context is not None else client or default_client()
    authorization = response.request.headers.get("authorization", "")
    told.saw(str(response.request.url), response.headers, authorization)
