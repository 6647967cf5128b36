"""Lists that another process took in, and our own of before a restart, are known by what the log tells."""

from pathlib import Path

from tests.lifecycle.store.redis_process import place_in_shared_redis
from tests.proxy.whole_proxy import Message, assistant, system, user, whole_proxy

BEGIN = [system("you are one of several toys"), user("begin, please")]
ON = [*BEGIN, assistant("ok"), user("go on")]


async def heads(it: object, *lists: list[Message]) -> list[str]:
    return [(await it.chat(each)).headers["x-kv-context"] for each in lists]  # type: ignore[attr-defined]


async def test_after_a_restart_a_list_goes_on_with_its_context(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'log.db'}"
    async with whole_proxy(tmp_path, log_url=url) as it:
        (first,) = await heads(it, BEGIN)
        (other,) = await heads(it, [BEGIN[0], user("something else")])
    async with whole_proxy(tmp_path, log_url=url) as it:
        lineage = it.runtime.tracking.lineage
        await lineage.recall()
        assert await heads(it, ON) == [first]
        assert await heads(it, [BEGIN[0], user("something else"), assistant("ok"), user("on")]) == [other]


async def test_an_answer_that_another_process_gave_is_known_when_it_comes_back(tmp_path: Path) -> None:
    url = await place_in_shared_redis(tmp_path)
    async with whole_proxy(tmp_path, log_url=url) as one, whole_proxy(tmp_path, log_url=url) as two:
        one.toy.answer = lambda body: "an answer of its own kind"
        (first,) = await heads(one, BEGIN)
        await two.runtime.tracker.catch_up()
        # The beginning was rewritten: only the answer ties the list to its context.
        edited = [BEGIN[0], user("in short: it began"), assistant("an answer of its own kind"), user("go on")]
        assert await heads(two, edited) == [first]
