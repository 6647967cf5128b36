"""The scripts by themselves, on a real server: what they answer, and that a refusal writes nothing."""

import pytest
from redis import Redis

from lifecycle.store.redis_scripts import APPEND, FORGET, OPEN, TRIM
from tests.lifecycle.store.redis_process import shared_redis

META, FEED, STREAM = "{scripts}:meta", "{scripts}:feed", "{scripts}:stream:a"
OTHER, TRIMMED = "{scripts}:stream:b", "{scripts}:trimmed"


@pytest.fixture
def client():
    with Redis(port=shared_redis().port) as client:
        client.delete(META, FEED, STREAM, OTHER, TRIMMED)
        assert client.eval(OPEN, 2, META, FEED, "1", "epoch") == [b"1", b"epoch"]
        yield client


def append(client, *payloads, expected=0, mark="mark", seen=(0, ""), epoch="epoch", term=""):
    events = [part for payload in payloads for part in (payload, "7")]
    return client.eval(
        APPEND, 4, META, FEED, STREAM, TRIMMED, epoch, *seen, expected, mark, "a", term, *events
    )


def everything(client):
    return client.hgetall(META), client.xrange(FEED), client.xrange(STREAM)


def test_a_log_is_begun_once(client):
    assert client.eval(OPEN, 2, META, FEED, "9", "another") == [b"1", b"epoch"]


def test_half_a_log_is_not_begun(client):
    append(client, "x")
    for lost in (["HDEL", META, "epoch"], ["HDEL", META, "format"], ["DEL", META]):
        client.execute_command(*lost)
        before = everything(client)
        assert client.eval(OPEN, 2, META, FEED, "1", "another") == []
        assert everything(client) == before


def test_a_batch_is_one_entry_of_the_feed_and_one_of_the_stream_for_each_event(client):
    assert append(client, "x", "y", mark="m1") == [b"ok", b"0"]
    assert append(client, "z", mark="m2", expected=2, seen=(2, "m1")) == [b"ok", b"2"]
    meta, feed, stream = everything(client)
    assert meta[b"head"] == b"3"
    assert feed == [
        (b"2-0", {b"m": b"m1", b"s": b"a", b"v": b"1", b"n": b"2"}),
        (b"3-0", {b"m": b"m2", b"s": b"a", b"v": b"3", b"n": b"1"}),
    ]
    assert stream == [
        (b"%d-0" % n, {b"p": b"%d" % n, b"e": payload, b"c": b"7"})
        for n, payload in enumerate((b"x", b"y", b"z"), 1)
    ]


def test_the_same_batch_again_is_answered_as_before_and_lands_once(client):
    append(client, "w", mark="m0")
    assert append(client, "x", "y", mark="m1", expected=1) == [b"ok", b"1"]
    append(client, "z", mark="m2", expected=3)
    before = everything(client)
    assert append(client, "x", "y", mark="m1", expected=1) == [b"ok", b"1"]
    assert append(client, "x", "y", mark="other", expected=1) == [b"conflict", b"4"]
    assert everything(client) == before


@pytest.mark.parametrize("expected", [-1, 0, 1, 3, 2**60, 2**70])
def test_another_version_is_a_conflict_and_writes_nothing(client, expected):
    append(client, "x", "y", mark="m1")
    before = everything(client)
    assert append(client, "z", mark="m2", expected=expected) == [b"conflict", b"2"]
    assert everything(client) == before


@pytest.mark.parametrize("known", [{"epoch": "other"}, {"seen": (3, "m1")}, {"seen": (2, "other")}])
def test_another_history_is_refused_and_nothing_written(client, known):
    append(client, "x", "y", mark="m1")
    before = everything(client)
    assert append(client, "z", mark="m2", expected=2, **known) == [b"other", b"epoch", b"2"]
    assert everything(client) == before


def test_a_count_that_is_not_the_feeds_is_refused(client):
    append(client, "x", mark="m1")
    client.hset(META, "head", 5)
    assert append(client, "z", mark="m2", expected=1) == [b"torn", b"1", b"5"]
    assert client.xlen(STREAM) == 1


def trim(client, so_far, through, version, epoch="epoch", term="0"):
    keys = (META, FEED, TRIMMED, STREAM)
    ends = (so_far, through, through + 1, "a", version, version + 1)
    return client.eval(TRIM, len(keys), *keys, epoch, "2", *ends[:3], term, *ends[3:])


def test_a_trim_takes_batches_off_feed_and_stream_and_says_how_far_it_went(client):
    append(client, "x", "y", mark="m1")
    append(client, "z", mark="m2", expected=2)
    assert trim(client, 0, 2, 2) == [b"ok", b"2"]
    meta, feed, stream = everything(client)
    assert (meta[b"trimmed"], meta[b"format"], meta[b"head"]) == (b"2", b"2", b"3")
    assert [entry_id for entry_id, _ in feed] == [entry_id for entry_id, _ in stream] == [b"3-0"]
    assert client.hgetall(TRIMMED) == {b"a": b"2"}
    before = everything(client)
    assert trim(client, 0, 2, 2) == [b"ok", b"2"], "sent twice it lands once"
    assert trim(client, 2, 3, 3, epoch="another") == [b"other", b"epoch"]
    assert everything(client) == before


def test_a_stream_without_events_keeps_its_version_until_it_is_forgotten(client):
    append(client, "x", "y", mark="m1")
    client.eval(APPEND, 4, META, FEED, OTHER, TRIMMED, "epoch", 0, "", 0, "m2", "b", "", "x", "7")
    trim(client, 0, 2, 2)
    assert client.exists(STREAM) == 0
    assert append(client, "z", mark="m3") == [b"conflict", b"2"]
    assert client.eval(FORGET, 2, TRIMMED, STREAM, "a") == 1
    assert append(client, "z", mark="m3") == [b"ok", b"3"]
    assert client.eval(FORGET, 2, TRIMMED, STREAM, "a") == 0


def test_a_process_whose_last_batch_was_trimmed_is_told_by_the_epoch_alone(client):
    append(client, "x", mark="m1")
    append(client, "y", mark="m2", expected=1)
    trim(client, 0, 1, 1)
    assert append(client, "z", mark="m3", expected=2, seen=(1, "m1")) == [b"ok", b"2"]
    assert append(client, "z", mark="m4", expected=3, seen=(9, "m9"))[0] == b"other"
