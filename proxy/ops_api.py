"""`/kv/v1/ops` on the data listener: what agents declare."""

from typing import Any

import msgspec

from lifecycle.vocabulary import OperationStatus
from proxy.auth import Authenticator, KeyScope
from proxy.declarations import Declarations, OperationResult
from proxy.errors import InvalidRequest, NoSuchPath
from proxy.forward import Send
from proxy.operations import MAX_OPS_BYTES, OperationProblem, parse_operation_batch
from proxy.problems import ErrorResponse, problem, send_response
from proxy.request_body import Receive, Scope, read_body

OPS_PATH = "/kv/v1/ops"


class OpsApi:
    """ASGI application for declared operations. Every operation gets a verdict of its own."""

    def __init__(self, declarations: Declarations, auth: Authenticator) -> None:
        self._declarations = declarations
        self._auth = auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; errors are problems."""
        try:
            caller = self._auth.authenticate(scope["headers"])
            caller.require(KeyScope.CALL)
            if scope["path"] != OPS_PATH or scope["method"] != "POST":
                raise NoSuchPath(f"only POST {OPS_PATH} is served here")
            if b"dry_run" in scope["query_string"]:
                raise InvalidRequest("dry_run is not served: nothing was recorded")
            body = await read_body(scope, receive, MAX_OPS_BYTES)
            document = await self._apply(caller.tenant, body)
        except Exception as error:  # noqa: BLE001 - the root of a request
            await send_response(send, problem(error, scope["path"]))
            return
        await send_response(
            send,
            ErrorResponse(200, ((b"content-type", b"application/json"),), msgspec.json.encode(document)),
        )

    async def _apply(self, tenant: str, body: bytes) -> dict[str, Any]:
        batch = parse_operation_batch(body)
        results: list[OperationResult] = []
        for item in batch.items:
            if isinstance(item, OperationProblem):
                results.append(
                    OperationResult(OperationStatus.REJECTED, item.seq or 0, item.ctx, item.reason)
                )
            else:
                results += await self._declarations.submit(tenant, batch.source, [item])
        return {"results": results}
