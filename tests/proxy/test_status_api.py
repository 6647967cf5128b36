"""One page says what runs, on which configuration, and what is wrong."""

from pathlib import Path

from proxy.status_api import own_version
from tests.proxy.whole_proxy import lifecycle, user, whole_proxy


async def test_the_status_tells_what_an_operator_asks_first(tmp_path: Path) -> None:
    async with whole_proxy(tmp_path) as it:
        await it.chat([user("hi")], lifecycle(ctx="a"))
        status = (await it.admin.get("/kv/v1/status")).json()
        ready = (await it.admin.get("/readyz")).json()
        assert status["version"] == own_version()
        assert status["uptime_seconds"] >= 0
        assert status["log_position"] > 0
        assert (status["log_waiting"], status["calls_under_way"]) == (0, 0)
        assert status["config"] == {"file": "", "problem": "", "needs_restart": []}
        for name in ("mode", "holdout", "bypass_all", "control", "level", "problems", "warnings"):
            assert status[name] == ready[name]
