"""A call's context is found or named; a limit changes that, and never whether the call is followed."""

from pathlib import Path

from proxy.config import LimitsConfig
from proxy.lifecycle_fields import LifecycleFields
from tests.proxy.conversations import chat, user
from tests.proxy.whole_proxy import whole_proxy


async def test_what_has_no_room_is_a_one_off_of_its_own_each_time(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, limits=LimitsConfig(contexts=0), ready=False) as it:
        tracking = it.runtime.tracking
        namespace = tracking.namespace("m", "")
        asked = [
            tracking.calls.request("t", namespace, chat([user("hi")]), LifecycleFields(ctx="c"), "")
            for _ in "12"
        ]
        assert len({request.uid for request in asked}) == 2
        assert all(request.identity.context_id.startswith("c~") for request in asked)
        assert all(request.fields.one_off and request.awaits_plan for request in asked)
        assert all("context limit" in request.fields.errors[0] for request in asked)


async def test_a_one_off_needs_no_room(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path, limits=LimitsConfig(contexts=0), ready=False) as it:
        tracking = it.runtime.tracking
        fields = LifecycleFields(ctx="c", one_off=True)
        request = tracking.calls.request("t", tracking.namespace("m", ""), chat([user("hi")]), fields, "")
        assert request.identity.context_id == "c"
        assert not request.fields.errors
