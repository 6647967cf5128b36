"""Who carries a key is answered, the latest first, and nothing stays of those who do not any more."""

from proxy.postings import Postings


def test_the_latest_carriers_come_first() -> None:
    postings = Postings()
    for name in ("a", "b", "c"):
        postings.add("key", name)
    assert postings.get("key") == ("c", "b", "a")
    assert postings.get("key", 2) == ("c", "b")
    assert postings.get("another") == ()


def test_what_nobody_carries_is_gone() -> None:
    postings = Postings()
    postings.add("key", "a")
    postings.remove("key", "never there")
    assert len(postings) == 1
    postings.remove("key", "a")
    postings.remove("key", "a")
    assert len(postings) == 0
