"""`/kv/v1/ops` on the data listener: what agents declare."""

from typing import Any
from urllib.parse import parse_qs

import msgspec

from lifecycle.vocabulary import OperationStatus
from proxy.auth import Authenticator, KeyScope
from proxy.declarations import Declarations, OperationCost, OperationResult
from proxy.errors import NoSuchPath
from proxy.forward import Send
from proxy.limits import Limits
from proxy.operations import MAX_OPS_BYTES, OperationProblem, parse_operation_batch
from proxy.problems import ErrorResponse, problem, send_response
from proxy.request_body import Receive, Scope, read_body

OPS_PATH = "/kv/v1/ops"


class OpsApi:
    """ASGI application for declared operations. Every operation gets a verdict of its own."""

    def __init__(self, declarations: Declarations, auth: Authenticator, limits: Limits) -> None:
        self._declarations = declarations
        self._auth = auth
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; errors are problems."""
        try:
            caller = self._auth.authenticate(scope["headers"])
            caller.require(KeyScope.CALL)
            if scope["path"] != OPS_PATH or scope["method"] != "POST":
                raise NoSuchPath(f"only POST {OPS_PATH} is served here")
            body = await read_body(scope, receive, MAX_OPS_BYTES)
            apply = self._costs if _is_dry_run(scope["query_string"]) else self._apply
            document = await apply(caller.tenant, body)
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
            elif wait := self._limits.operation(tenant):
                results.append(
                    OperationResult(
                        OperationStatus.REJECTED,
                        item.seq,
                        item.ctx,
                        self._limits.operation_refusal(tenant),
                        retry_after=round(wait, 3),
                    )
                )
            else:
                results += await self._declarations.submit(tenant, batch.source, [item])
        return {"results": results}

    async def _costs(self, tenant: str, body: bytes) -> dict[str, Any]:
        """What each operation would cost by itself; nothing is recorded."""
        return {
            "results": [
                OperationCost(item.seq or 0, item.ctx, reason=item.reason)
                if isinstance(item, OperationProblem)
                else self._declarations.cost(tenant, item)
                for item in parse_operation_batch(body).items
            ]
        }


def _is_dry_run(query: bytes) -> bool:
    values = parse_qs(query.decode("latin-1"), keep_blank_values=True).get("dry_run", ["0"])
    return values[-1] not in ("0", "false")
