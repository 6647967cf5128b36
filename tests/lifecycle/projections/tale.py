"""A log told by hand, as a test tool: contexts, calls, dead chunks and what became of them."""

from hashlib import blake2b

from lifecycle.core.directives import Demote, DirectiveResult, Reclaim
from lifecycle.core.events import (
    CallArrived,
    CallEnded,
    CallMapped,
    CallVerified,
    ChunksGone,
    ContextCreated,
    DirectiveProposed,
    DirectiveSettled,
    Event,
    RecordedEvent,
)
from lifecycle.core.ids import Namespace, context_stream
from lifecycle.vocabulary import Arm, CallEnd, DirectiveOutcome, IdentityRung, MappingKind

SECOND = 10**9
SIZE = 4
"""Tokens of a chunk."""
TOKEN_BYTES = 10
SPACE = Namespace("m")


def keys(*names: str) -> bytes:
    """A run of chunk keys, one a name."""
    return b"".join(blake2b(name.encode(), digest_size=32).digest() for name in names)


class Tale:
    """`log` is what was told; `now` the time in nanoseconds, moved by `wait`."""

    def __init__(self, now_ns: int = 10**18) -> None:
        self.now = now_ns
        self.log: list[RecordedEvent] = []
        self._count = 0

    def wait(self, seconds: float) -> None:
        self.now += int(seconds * SECOND)

    def tell(self, stream: str, event: Event) -> None:
        position = len(self.log) + 1
        self.log.append(RecordedEvent(stream, position, position, event))

    def context(self, uid: str, tenant: str = "t", agent: str = "", namespace: Namespace = SPACE) -> None:
        self.tell(
            context_stream(uid),
            ContextCreated(
                at_ns=self.now,
                uid=uid,
                tenant=tenant,
                context_id=uid,
                namespace=namespace,
                rung=IdentityRung.EXPLICIT,
                agent=agent,
            ),
        )

    def call(
        self,
        uid: str,
        chunks: bytes,
        *,
        known: int = 0,
        prompt: int = -1,
        cached: int = -1,
        arm: Arm | None = Arm.ENFORCE,
        harness: str = "",
        shown: int | None = None,
        backend: str = "",
        took: str = "",
    ) -> None:
        """A whole call: `known` chunks were its context's already, `chunks` are new in its chain.

        It went to engine `backend`, and `took` answered where that is another one.
        """
        self._count += 1
        call_id, stream = f"call-{self._count}", context_stream(uid)
        self.tell(
            stream,
            CallArrived(
                at_ns=self.now,
                call_id=call_id,
                attempt=1,
                kept=-1,
                arm=arm,
                harness=harness,
                backend=backend,
            ),
        )
        num_tokens = known * SIZE + len(chunks) // 32 * SIZE
        self.tell(
            stream,
            CallMapped(
                at_ns=self.now,
                call_id=call_id,
                attempt=1,
                kind=MappingKind.EXACT,
                num_tokens=num_tokens,
                chunk_size=SIZE,
                first_chunk=known,
                keys=chunks,
                bytes_per_token=TOKEN_BYTES,
            ),
        )
        self.tell(
            stream,
            CallEnded(
                at_ns=self.now,
                call_id=call_id,
                attempt=1,
                end=CallEnd.COMPLETED,
                prompt_tokens=prompt,
                cached_tokens=cached,
                backend=took,
            ),
        )
        if shown is not None:
            self.tell(
                stream,
                CallVerified(
                    at_ns=self.now, call_id=call_id, attempt=1, num_chunks=num_tokens // SIZE, num_shown=shown
                ),
            )

    def dead(
        self, chunks: bytes, *owners: tuple[str, int], namespace: Namespace = SPACE, demote: bool = False
    ) -> str:
        """A plan found these dead; answers the directive's id."""
        self._count += 1
        kind = Demote if demote else Reclaim
        directive = kind(
            directive_id=f"d-{self._count}", namespace=namespace, reason="dead", keys=chunks, owners=owners
        )
        event = DirectiveProposed(at_ns=self.now, directive=directive, as_of=len(self.log))
        self.tell(namespace.stream(), event)
        return directive.directive_id

    def settle(
        self,
        directive_id: str,
        outcome: DirectiveOutcome,
        gone: bytes = b"",
        namespace: Namespace = SPACE,
    ) -> None:
        self.tell(
            namespace.stream(),
            DirectiveSettled(
                at_ns=self.now,
                directive_id=directive_id,
                namespace=namespace,
                result=DirectiveResult(outcome=outcome, gone=gone),
            ),
        )

    def freed(self, chunks: bytes, *owners: tuple[str, int]) -> None:
        self.settle(self.dead(chunks, *owners), DirectiveOutcome.APPLIED, chunks)

    def observed(self, chunks: bytes, *owners: tuple[str, int]) -> None:
        self.settle(self.dead(chunks, *owners), DirectiveOutcome.SUPPRESSED)

    def gone(self, chunks: bytes, namespace: Namespace = SPACE) -> None:
        self.tell(namespace.stream(), ChunksGone(at_ns=self.now, namespace=namespace, keys=chunks))
