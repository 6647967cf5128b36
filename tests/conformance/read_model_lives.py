"""Random lives for the read models, and what their rows must be: counted one event at a time."""

import random
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from lifecycle.core.directives import Admit, Demote, DirectiveResult, Pin, Reclaim, Unpin
from lifecycle.core.events import (
    CallArrived,
    CallEnded,
    CallMapped,
    ContextClosed,
    DirectiveProposed,
    DirectiveSettled,
    PinMoved,
    PinReleased,
    PinSet,
    PrefillDone,
    RecordedEvent,
    UntrackedForwarded,
)
from lifecycle.core.observations import (
    CallEnding,
    CallMapping,
    DeclareWaiting,
    MarkOneOff,
    OperationReceived,
    PinSpan,
    PromptMapping,
    UnpinSpan,
    VerificationResult,
)
from lifecycle.core.state import list_path
from lifecycle.projections.contexts import Contexts
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import CallEnd, DirectiveOutcome, MappingKind, WaitKind
from tests.lifecycle.core.story import NAMESPACE
from tests.lifecycle.lives import Agent, CountedIds, ManualClock

LISTS = ["u1", "u1 a1 u2", "u1 a1 u3", "u1 a1 u2 a2 t1", "s1 u1", "u9"]
Rows = dict[str, dict[Any, dict[str, Any]]]


class RandomLife:
    """Some agents that call, branch, wait, pin and close, and a reclaimer's directives beside them."""

    def __init__(self, tracker: Tracker, clock: ManualClock, seed: int) -> None:
        self._tracker = tracker
        self._clock = clock
        self._rng = random.Random(seed)
        self._ids = CountedIds()
        self._seq = 0
        self._seed = seed
        self._agents: list[Agent] = []
        self._calls: list[tuple[Agent, str, str, int]] = []
        self._open: list[Reclaim | Demote | Admit | Pin | Unpin] = []

    async def live(self, num_steps: int) -> None:
        """So many steps."""
        for _ in range(num_steps):
            self._clock.advance(self._rng.choice([0.001, 0.5, 2.0, 20.0]))
            steps = [self._arrive, self._arrive, self._go_on, self._go_on, self._go_on, self._declare]
            steps += [self._declare, self._direct, self._new, self._rarely]
            await self._rng.choice(steps)()

    async def _new(self) -> None:
        if len(self._agents) < 5:
            agent = Agent(self._tracker, self._ids.new(f"ctx{self._seed}"))
            parent = self._rng.choice([None, *self._agents])
            await agent.open(parent, one_off=self._rng.random() < 0.2)
            self._agents.append(agent)

    async def _arrive(self) -> None:
        if not self._agents:
            return await self._new()
        agent, words = self._rng.choice(self._agents), self._rng.choice(LISTS)
        call = self._rng.choice(["retried", self._ids.new("call")])
        await agent.arrive(words, call)
        self._calls.append((agent, words, call, agent.state.attempts[call]))
        return None

    async def _go_on(self) -> None:
        if not self._calls:
            return
        agent, words, call, attempt = self._rng.choice(self._calls)
        if agent.state.flight(call, attempt) is None:
            self._calls.remove((agent, words, call, attempt))
            return
        match self._rng.randrange(5):
            case 0:
                await agent.map(words, call, attempt)
            case 1:
                nothing = PromptMapping(kind=MappingKind.NONE, reason="no tokenizer")
                await self._tracker.observe(
                    agent.uid,
                    CallMapping(at_ns=agent.now, call_id=call, attempt=attempt, mapping=nothing),
                )
            case 2:
                await agent.first(call, attempt)
            case _:
                told = self._rng.choice([-1, 100])
                ending = CallEnding(
                    at_ns=agent.now,
                    call_id=call,
                    attempt=attempt,
                    end=self._rng.choice(list(CallEnd)),
                    wait=self._rng.choice(list(WaitKind)),
                    tool=self._rng.choice(["", "bash"]),
                    finish_reason="stop",
                    prompt_tokens=told,
                    cached_tokens=told // 2,
                    output_tokens=told,
                )
                await self._tracker.observe(agent.uid, ending)

    async def _declare(self) -> None:
        if not self._agents:
            return
        agent = self._rng.choice(self._agents)
        self._seq += 1
        about: dict[str, Any] = {"seq": self._rng.choice([1, 1, 1, 1, 5]), "ctx": agent.name}  # source is new
        operation = self._rng.choice(
            [
                DeclareWaiting(**about, kind=WaitKind.HUMAN, tool="\x00", eta=3.0),
                MarkOneOff(**about),
                PinSpan(**about, span=(0, 1), ttl=self._rng.choice([10.0, 300.0])),
                PinSpan(**about, span=(0, 2), priority=7),
                UnpinSpan(**about, span=(0, 1)),
            ]
        )
        received = OperationReceived(
            at_ns=agent.now, source=f"s{self._seq}", operation=operation, bytes_per_token=10
        )
        await self._tracker.observe(agent.uid, received)

    async def _direct(self) -> None:
        about: dict[str, Any] = {"namespace": NAMESPACE, "reason": "dead"}
        if self._open and self._rng.random() < 0.6:
            directive = self._open.pop(self._rng.randrange(len(self._open)))
            result = DirectiveResult(
                outcome=self._rng.choice(list(DirectiveOutcome)), reason="why", applied=3, skipped=1
            )
            event: Any = DirectiveSettled(
                at_ns=self._clock.now,
                directive_id=directive.directive_id,
                namespace=NAMESPACE,
                result=result,
            )
        else:
            about["directive_id"] = self._ids.new(f"d{self._seed}")
            keys = bytes(32 * self._rng.randrange(1, 5))
            directive = self._rng.choice(
                [
                    Reclaim(**about, keys=keys),
                    Demote(**about, keys=keys),
                    Admit(**about, call_id="c", bypass_from_token=0),
                    Pin(**about, pin_id="p", keys=keys, lease_until_ns=self._clock.now),
                    Unpin(**about, pin_id="p", keys=keys),
                ]
            )
            self._open.append(directive)
            position = self._tracker.contexts.position
            event = DirectiveProposed(at_ns=self._clock.now, directive=directive, as_of=position)
        await self._tracker.record(NAMESPACE, [event])

    async def _rarely(self) -> None:
        agent = self._rng.choice([None, *self._agents])
        match self._rng.randrange(6):
            case 0:
                self._clock.advance(self._rng.choice([70.0, 5000.0]))
                await self._tracker.tick()
            case 1 if agent is not None:
                await agent.close()
            case 2 | 3 if agent is not None:
                verified = VerificationResult(at_ns=agent.now, reason=self._rng.choice(["", "other keys"]))
                await self._tracker.observe(agent.uid, verified)
            case 4:
                event = UntrackedForwarded(at_ns=self._clock.now, namespace=NAMESPACE, reason="bypass")
                await self._tracker.record(NAMESPACE, [event])
            case _:
                pass


def at(ns: int) -> datetime:
    """The moment, to the microsecond."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=ns // 1000)


def expected_rows(events: Iterable[RecordedEvent]) -> Rows:
    """The rows that these events must have written, from the states they lead to."""
    contexts = Contexts()
    rows: Rows = {"kv_contexts": {}, "kv_calls": {}, "kv_directives": {}, "kv_pins": {}}
    extra: dict[str, dict[str, Any]] = {}
    for recorded in events:
        contexts.apply(recorded)
        event, uid = recorded.event, recorded.stream.removeprefix("ctx/")
        about = extra.setdefault(uid, {"messages": 0, "tokens": None, "waits": ("", ""), "unmapped": ""})
        about.setdefault("position", recorded.position)
        if recorded.version == 1 and recorded.stream.startswith("ctx/"):
            about["unmapped"] = contexts.states[uid].unmapped
        call = rows["kv_calls"].get((uid, getattr(event, "call_id", ""), getattr(event, "attempt", 0)), {})
        match event:
            case CallArrived():
                flight = contexts.states[uid].flight(event.call_id, event.attempt)
                assert flight is not None
                about["messages"] = len(list_path(contexts.states[uid], flight.tip))
                about |= {"unmapped": "the tokens of its last call are not known yet", "waits": ("", "")}
                about["closed"] = None
                rows["kv_calls"][uid, event.call_id, event.attempt] = {
                    "uid": uid,
                    "call_id": event.call_id,
                    "attempt": event.attempt,
                    "streamed": event.streamed,
                    "choices": event.num_choices,
                    "messages": about["messages"],
                    "arrived_at": at(event.at_ns),
                    "position": recorded.position,
                    **dict.fromkeys(("first_token_at", "ended_at", "mapped_tokens"), None),
                    **dict.fromkeys(("prompt_tokens", "cached_tokens", "output_tokens"), None),
                    **dict.fromkeys(("outcome", "finish_reason", "mapping", "mapping_reason"), ""),
                }
            case CallMapped():
                about["unmapped"] = call["mapping_reason"] = event.reason
                call["mapping"] = event.kind.value
                if not event.reason:
                    about["tokens"] = call["mapped_tokens"] = event.num_tokens
            case PrefillDone():
                call["first_token_at"] = at(event.at_ns)
            case CallEnded():
                about["waits"] = (event.wait.value, event.tool)
                call |= {"ended_at": at(event.at_ns), "outcome": event.end.value}
                call["finish_reason"] = event.finish_reason
                for name in ("prompt_tokens", "cached_tokens", "output_tokens"):
                    call[name] = None if getattr(event, name) == -1 else getattr(event, name)
                if event.prompt_tokens >= 0:
                    about["tokens"] = event.prompt_tokens
            case ContextClosed():
                about |= {"closed": at(event.at_ns), "waits": ("", "")}
            case PinSet():
                rows["kv_pins"][event.pin_id] = {
                    "pin_id": event.pin_id,
                    "uid": uid,
                    "message": event.index,
                    "size_bytes": event.size_bytes,
                    "priority": event.priority,
                    "leased_at": at(event.at_ns),
                    "until_at": at(event.until_ns),
                    "released_at": None,
                    "release_reason": "",
                    "position": recorded.position,
                }
            case PinMoved():
                pin = rows["kv_pins"][event.pin_id]
                pin |= {"message": event.index, "size_bytes": event.size_bytes}
            case PinReleased():
                pin = rows["kv_pins"][event.pin_id]
                pin |= {"released_at": at(event.at_ns), "release_reason": event.reason}
            case DirectiveProposed():
                about["position"] = recorded.position
                directive = event.directive
                rows["kv_directives"][directive.directive_id] = {"position": recorded.position}
            case DirectiveSettled():
                pass
            case _ if type(event).__name__ == "WaitDeclared":
                about["waits"] = (event.kind.value, event.tool.replace("\x00", "\ufffd"))  # type: ignore[union-attr]
            case _:
                pass
    for uid, state in contexts.states.items():
        about = extra[uid]
        rows["kv_contexts"][uid] = {
            "uid": uid,
            "tenant": state.key.tenant,
            "context_id": state.key.context_id,
            "model": state.namespace.model,
            "salt": state.namespace.salt,
            "agent": state.agent,
            "flow": state.flow,
            "parent_uid": state.parent_uid,
            "forked": state.forked,
            "one_off": state.one_off,
            "rung": state.rung.value,
            "state": "closed" if state.closed else "open",
            "messages": about["messages"],
            "tokens": about["tokens"],
            "unmapped": about["unmapped"],
            "unverified": state.unverified,
            "gap": state.gap,
            "wait": about["waits"][0],
            "wait_tool": about["waits"][1],
            "opened_at": at(state.created_ns),
            "last_at": at(state.last_ns),
            "closed_at": about.get("closed"),
            "close_reason": state.closed,
            "position": about["position"],
        }
    for directive_id, record in contexts.directives.items():
        directive, result = record.directive, record.result
        unsent = {DirectiveOutcome.SUPPRESSED, DirectiveOutcome.UNSUPPORTED}
        known = result is not None and result.outcome is not DirectiveOutcome.EXPIRED
        rows["kv_directives"][directive_id] |= {
            "directive_id": directive_id,
            "kind": type(directive).__name__.lower(),
            "model": directive.namespace.model,
            "salt": directive.namespace.salt,
            "fingerprint": directive.namespace.fingerprint,
            "subject": getattr(directive, "call_id", "") or getattr(directive, "pin_id", ""),
            "reason": directive.reason,
            "chunks": len(getattr(directive, "keys", b"")) // 32,
            "as_of": record.as_of,
            "proposed_at": at(record.proposed_ns),
            "outcome": result.outcome.value if result else "proposed",
            "outcome_reason": result.reason if result else "",
            "sent": result.outcome not in unsent if result and known else None,
            "applied": result.applied if result else 0,
            "skipped": result.skipped if result else 0,
            "settled_at": at(record.settled_ns) if result else None,
        }
    return rows
