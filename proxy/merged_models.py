"""`GET /v1/models` of several engines in one answer: everything that anybody serves, each name once."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from proxy.backend_health import PATIENCE_SECONDS, read_whole
from proxy.backends import Backend
from proxy.engine_connection import Headers
from proxy.errors import ConnectFailed, UpstreamError
from proxy.forward import Send
from proxy.upstream import UpstreamRequest

MODELS_PATH = "/v1/models"
_JSON = (b"content-type", b"application/json")
_OF_THE_BODY = frozenset({b"content-length", b"content-encoding"})


class _Answer(msgspec.Struct, frozen=True):
    """What one engine said."""

    status: int
    headers: Headers
    body: bytes


class _Entry(msgspec.Struct):
    id: str


async def answer_models(backends: Sequence[Backend], raw_target: bytes, headers: Headers, send: Send) -> None:
    """Ask every engine as the client asked, and send one answer.

    Entries stand as their engines wrote them, in the order of the configuration; of one name the first
    counts. The list may depend on who asks, and how: where calls go does not follow from it. What else the
    first engine said beside its list stays. Where no engine gives a list, the first
    answer that came is passed on as it is. Raises `ConnectFailed` if none came.
    """
    wanted = [(name, value) for name, value in headers if name != b"accept-encoding"]
    request = UpstreamRequest(method="GET", raw_target=raw_target, headers=wanted)
    answers = [a for a in await asyncio.gather(*(_ask(each, request) for each in backends)) if a is not None]
    if not answers:
        raise ConnectFailed("no engine could be asked for its models")
    document: dict[str, msgspec.Raw] = {}
    merged: dict[str, msgspec.Raw] = {}
    for answer in answers:
        listed = _listed(answer)
        if listed is None:
            continue
        entries, rest = listed
        document = document or rest
        for name, entry in entries.items():
            merged.setdefault(name, entry)
    if document:
        body = msgspec.json.encode({**document, "data": list(merged.values())})
        await _send(send, 200, [_JSON], body)
    else:
        first = answers[0]
        kept = [(name, value) for name, value in first.headers if name not in _OF_THE_BODY]
        await _send(send, first.status, kept, first.body)


async def _ask(backend: Backend, request: UpstreamRequest) -> _Answer | None:
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            response = await backend.open(request)
            status, body = await read_whole(response)
    except (UpstreamError, TimeoutError):
        return None
    return _Answer(status, response.headers, body)


def _listed(answer: _Answer) -> tuple[dict[str, msgspec.Raw], dict[str, msgspec.Raw]] | None:
    """Entries by name, and the whole document, of a list of models; None for anything else."""
    if answer.status != 200:
        return None
    try:
        document = msgspec.json.decode(answer.body, type=dict[str, msgspec.Raw])
        entries = msgspec.json.decode(document["data"], type=list[msgspec.Raw])
        return {msgspec.json.decode(entry, type=_Entry).id: entry for entry in entries}, document
    except (msgspec.DecodeError, KeyError):
        return None


async def _send(send: Send, status: int, headers: Sequence[Any], body: bytes) -> None:
    head = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body, "more_body": False})
