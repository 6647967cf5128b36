"""The events are those of the grammar, however the bytes were cut into chunks; rewriting touches only
data."""

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from proxy.sse import EventRewriter, EventSplitter, ServerEvent

line_ends = st.sampled_from([b"\n", b"\r\n", b"\r"])
words = st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), max_size=8).map(str.encode)


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[ServerEvent]]:
    """A stream and the events it holds by construction."""
    out: list[bytes] = [draw(st.sampled_from([b"", b"\xef\xbb\xbf"]))]
    events: list[ServerEvent] = []
    for _ in range(draw(st.integers(0, 4))):
        end = draw(line_ends)
        name = b""
        data: list[bytes] = []
        for kind in draw(st.lists(st.sampled_from(["data", "event", "id", "comment"]), max_size=4)):
            word = draw(words)
            if kind == "data":
                out += [b"data: ", word, end]
                data.append(word)
            elif kind == "event":
                out += [b"event: ", word, end]
                name = word
            else:
                out += [b": " if kind == "comment" else b"id:", word, end]
        out.append(end)
        if data:
            events.append(ServerEvent(name.decode(), b"\n".join(data)))
    return b"".join(out), events


def cut(stream: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(stream), *(c % (len(stream) + 1) for c in cuts)})
    return [stream[a:b] for a, b in pairwise(places)]


@given(streams(), st.lists(st.integers(0, 10_000)))
def test_any_cut_of_a_stream_gives_its_events(made: tuple[bytes, list[ServerEvent]], cuts: list[int]) -> None:
    stream, expected = made
    splitter = EventSplitter()
    events = [event for chunk in cut(stream, cuts) for event in splitter.feed(chunk)]
    assert events == expected
    assert splitter.close() == []


def test_an_event_without_its_last_line_end_is_not_lost() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\n\ndata: [DO") == [ServerEvent("", b"a")]
    assert splitter.feed(b"NE]") == []
    assert splitter.close() == [ServerEvent("", b"[DONE]")]


def test_an_event_of_five_megabytes_in_small_pieces() -> None:
    data = b"x" * 5_000_000
    splitter = EventSplitter()
    stream = b"data:" + data + b"\r\n\r\n"
    events = [e for i in range(0, len(stream), 1000) for e in splitter.feed(stream[i : i + 1000])]
    assert events == [ServerEvent("", data)]


@given(streams(), st.lists(st.integers(0, 10_000)))
@example((b"data: a\r\n\r\ndata: b\r\r", []), [8, 9, 10])
def test_rewriting_nothing_changes_no_byte(made: tuple[bytes, list[ServerEvent]], cuts: list[int]) -> None:
    stream, _ = made
    rewriter = EventRewriter(lambda data: data)
    assert b"".join([*map(rewriter.feed, cut(stream, cuts)), rewriter.close()]) == stream


@given(st.lists(st.tuples(words.filter(bool), line_ends), min_size=1), st.lists(st.integers(0, 10_000)))
def test_each_data_line_is_rewritten_once(events: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    stream = b"".join(b"event: n" + end + b"data: " + word + end + end for word, end in events)
    wanted = b"".join(b"event: n" + end + b"data: <" + word + b">" + end + end for word, end in events)
    rewriter = EventRewriter(lambda data: b"<" + data + b">")
    assert b"".join([*map(rewriter.feed, cut(stream, cuts)), rewriter.close()]) == wanted


def test_a_rewritten_event_leaves_as_soon_as_it_is_whole() -> None:
    rewriter = EventRewriter(lambda data: data)
    assert rewriter.feed(b"data: a\n\ndata: b") == b"data: a\n\n"
    assert rewriter.feed(b"\n\n") == b"data: b\n\n"
