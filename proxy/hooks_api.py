"""`/kv/v1/hooks/{harness}` on the data listener: what agents' hooks tell, in each harness's own JSON.

A hook must never change what its harness does: whatever can be read is answered 200 with an empty object, at
once. What became of it stands in a header.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from lifecycle.vocabulary import HOOK_HEADER
from proxy.auth import Authenticator, KeyScope
from proxy.claude_code_hooks import claude_code_fact
from proxy.codex_hooks import codex_fact
from proxy.errors import InvalidRequest, NoSuchPath
from proxy.forward import Send
from proxy.harness_identity import HarnessCall
from proxy.hook_facts import HookFact
from proxy.hook_reports import HookReports
from proxy.opencode_hooks import opencode_fact
from proxy.problems import ErrorResponse, problem, send_response
from proxy.request_body import Receive, Scope, read_body

HOOKS_PATH = "/kv/v1/hooks/"

MAX_HOOK_BYTES = 1024 * 1024

WAIT_SECONDS = 0.2
"""Longest time that an answer waits for what it says of the hook."""

_READERS: Mapping[str, Callable[[Mapping[str, Any]], HookFact | None]] = {
    "claude-code": claude_code_fact,
    "codex": codex_fact,
    "opencode": opencode_fact,
}


class HooksApi:
    """ASGI application for hooks."""

    def __init__(self, reports: HookReports, auth: Authenticator) -> None:
        self._reports = reports
        self._auth = auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; errors are problems."""
        try:
            caller = self._auth.authenticate(scope["headers"])
            caller.require(KeyScope.CALL)
            harness = scope["path"].removeprefix(HOOKS_PATH)
            if harness not in _READERS or scope["method"] != "POST":
                known = ", ".join(HOOKS_PATH + name for name in _READERS)
                raise NoSuchPath(f"hooks are taken by POST {known}")
            fact = _READERS[harness](_event(await read_body(scope, receive, MAX_HOOK_BYTES)))
            verdict = await self._take(caller.tenant, harness, fact)
        except Exception as error:  # noqa: BLE001 - the root of a request
            await send_response(send, problem(error, scope["path"]))
            return
        headers = ((b"content-type", b"application/json"), (HOOK_HEADER.encode(), verdict.encode()))
        await send_response(send, ErrorResponse(200, headers, b"{}"))

    def told_of(self, tenant: str, said: HarnessCall) -> HarnessCall:
        """What a harness says of a call, with what its hooks have told before."""
        if said.context_id and self._reports.compacting(tenant, said.context_id):
            return msgspec.structs.replace(said, compacts=True)
        return said

    async def _take(self, tenant: str, harness: str, fact: HookFact | None) -> str:
        if fact is None:
            return "ignored"
        taken = self._reports.post(tenant, harness, fact)
        await asyncio.wait([taken], timeout=WAIT_SECONDS)
        if not taken.done():
            return "queued"
        return f"ignored: {taken.result()}" if taken.result() else "taken"


def _event(body: bytes) -> Mapping[str, Any]:
    try:
        event = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("the body is no JSON") from error
    if not isinstance(event, dict):
        raise InvalidRequest("the body is no object")
    return event
