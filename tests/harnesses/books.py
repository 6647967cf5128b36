"""Exchanges and events of a proxy as they would be recorded, made up of chunks of one letter a token."""

from array import array
from collections.abc import Sequence
from typing import Any

from blake3 import blake3

from engine_bridge.mapping.prompts import ChatPrompt
from harnesses.conversation import CHAT
from harnesses.engine import Computed
from harnesses.model_server import TRUTH_HEADER, Exchange
from harnesses.script import Reply
from harnesses.wire import new_answer
from lifecycle.core.events import (
    CallArrived,
    CallMapped,
    ContextClosed,
    ContextCreated,
    DeclarationMismatched,
    Event,
    OperationApplied,
    RecordedEvent,
)
from lifecycle.core.ids import Namespace, context_stream
from lifecycle.core.observations import ReplaceMessages
from lifecycle.vocabulary import IdentityRung, MappingKind

CHUNK = 4
"""Letters of a chunk."""

TAIL = "a" * 8
"""What every prompt ends with."""


def chunks(text: str) -> tuple[bytes, ...]:
    """Keys of the full chunks of a text: each stands for all before it, too."""
    return tuple(blake3(text[:end].encode()).digest() for end in range(CHUNK, len(text) + 1, CHUNK))


class Books:
    """What a model server and a proxy recorded of the same requests."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        self.events: list[RecordedEvent] = []

    def request(
        self,
        prompt: str,
        truth: str = "",
        *,
        uid: str = "",
        kind: str = "step",
        missing: Sequence[bytes] = (),
        missing_since: int = 0,
        answer: str = "",
        task_id: str = "",
        one_off: bool = False,
        headers: Sequence[tuple[str, str]] = (),
        body: Any = None,
        messages: Sequence[str] = (),
    ) -> Exchange:
        """A request, by the truth of a context, that the proxy took for `uid`'s; empty: did not follow."""
        number = len(self.exchanges)
        told = prompt + TAIL
        chat = ChatPrompt(messages=[{"role": "user", "content": each} for each in messages])
        reply = Reply(kind, answer or f"answer {number}", (), task_id)
        exchange = Exchange(
            number=number,
            at=float(number),
            at_ns=number * 1000,
            method="POST",
            path=CHAT,
            headers=[*headers, *([(TRUTH_HEADER, truth)] if truth else [])],
            body=body or {},
            answer=new_answer("a-", "c-", reply, "m", 0),
            computed=Computed(
                array("I", map(ord, told)),
                chunks(told + "answer.."),
                len(told) // CHUNK,
                dict.fromkeys(missing, missing_since or number * 1000 - 1),
                "",
                CHUNK,
                chat,
            ),
            answered_at=number + 0.5,
        )
        self.exchanges.append(exchange)
        if uid:
            call = f"call-{number}"
            self.tell(uid, CallArrived(at_ns=number * 1000, call_id=call, attempt=1, kept=0, one_off=one_off))
            mapped = CallMapped(
                at_ns=number * 1000,
                call_id=call,
                attempt=1,
                kind=MappingKind.EXACT,
                num_tokens=len(told),
                keys=b"".join(chunks(told)),
            )
            self.tell(uid, mapped)
        return exchange

    def tell(self, uid: str, event: Event) -> None:
        """An event of a context."""
        stream = context_stream(uid)
        version = 1 + sum(each.stream == stream for each in self.events)
        self.events.append(RecordedEvent(stream, version, len(self.events) + 1, event))

    def begins(self, uid: str, *, one_off: bool = False) -> None:
        self.tell(
            uid,
            ContextCreated(
                at_ns=0,
                uid=uid,
                tenant="t",
                context_id=uid,
                namespace=Namespace("m", "", "f"),
                rung=IdentityRung.NEW,
                one_off=one_off,
            ),
        )

    def replaces(self, uid: str) -> None:
        """The client says that it put something in another's place."""
        operation = ReplaceMessages(seq=1, ctx=uid, span=(0, 1), n=1)
        self.tell(uid, OperationApplied(at_ns=0, source="s", operation=operation))

    def mismatches(self, uid: str, exchange: Exchange) -> None:
        self.tell(
            uid, DeclarationMismatched(at_ns=0, call_id=f"call-{exchange.number}", expected=1, actual=2)
        )

    def closes(self, uid: str) -> None:
        self.tell(uid, ContextClosed(at_ns=0, reason="declared"))
