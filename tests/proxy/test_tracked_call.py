"""What an answer's head says of its call, and that what is heard is handed on."""

from lifecycle.core.ids import Namespace
from lifecycle.vocabulary import Arm, CallEnd, IdentityRung, MappingKind, Mode
from proxy.answer_facts import AnswerFacts
from proxy.identity import Identity
from proxy.lifecycle_fields import LifecycleFields, read_lifecycle_fields
from proxy.tracked_call import CallRequest, TrackedCall, can_be_labelled
from tests.proxy.conversations import chat, user


def request(fields: LifecycleFields) -> CallRequest:
    return CallRequest(
        tenant="t",
        mode=Mode.ENFORCE,
        arm=Arm.ENFORCE,
        harness="",
        namespace=Namespace("m"),
        identity=Identity(rung=IdentityRung.EXPLICIT, reason="header", context_id="é name"),
        uid="u",
        call_id="c",
        awaits_plan=False,
        asked=chat([user("hi")]),
        fields=fields,
    )


async def test_the_head_names_context_call_and_mapping() -> None:
    call = TrackedCall(request(LifecycleFields()), lambda c: None, lambda *told: None)
    assert dict(call.response_headers()) == {
        b"x-kv-context": "é name".encode(),
        b"x-kv-call": b"c",
        b"x-kv-mapping": b"none",
    }
    call.mapping_kind = MappingKind.EXACT
    assert dict(call.response_headers())[b"x-kv-mapping"] == b"exact"


async def test_what_could_not_be_read_is_told() -> None:
    fields = read_lifecycle_fields([(b"x-kv-lifecycle", b"ctx=7")], None)
    call = TrackedCall(request(fields), lambda c: None, lambda *told: None)
    assert b"ctx" in dict(call.response_headers())[b"x-kv-lifecycle-error"]


async def test_what_is_heard_is_handed_on() -> None:
    told: list[object] = []
    call = TrackedCall(
        request(LifecycleFields()),
        lambda c: told.append(("first", c.request.call_id)),
        lambda c, end, facts, reason: told.append((end, facts.status, reason)),
    )
    call.on_head(200)
    call.on_first_token()
    call.on_end(CallEnd.ABORTED, AnswerFacts(status=200), "gone")
    assert told == [("first", "c"), (CallEnd.ABORTED, 200, "gone")]


def test_a_call_with_reports_of_its_own_is_not_labelled() -> None:
    assert can_be_labelled(chat([user("hi")], vllm_xargs={"other": 1}))
    assert not can_be_labelled(chat([user("hi")], session_id="mine"))
    assert not can_be_labelled(chat([user("hi")], vllm_xargs={"kv_cache_report_mode": "full"}))
