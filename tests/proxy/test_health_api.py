"""What a proxy says of itself to who balances and who operates."""

from pathlib import Path

from tests.proxy.whole_proxy import whole_proxy


async def test_a_proxy_alone_on_its_log_owns_it_and_is_ready_to_the_end(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        told = (await it.admin.get("/readyz")).json()
        assert (told["status"], told["control"], told["owns"]) == ("ready", True, True)
        assert told["owner"] == told["proxy"] == it.runtime.office.name
        await it.up.drain(at_once=True)
        answer = await it.admin.get("/readyz")
        assert (answer.status_code, answer.json()["status"]) == (503, "draining")
        assert answer.json()["owns"], "there is nobody who could take over"
