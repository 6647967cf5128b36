"""One process on a log of its own is its owner, whatever happens."""

from lifecycle.store.alone import Alone


async def test_it_owns_the_log_to_the_end_and_everybody_else_is_dead() -> None:
    own = Alone("me")
    for step in (own.beat, own.resign, own.leave):
        assert own.holds
        assert own.owner == "me"
        await step()
    assert not own.shared
    assert await own.silent(["me", "", "an earlier run"]) == {"", "an earlier run"}
