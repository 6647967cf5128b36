"""What an answer means for what was sent, whoever it is that answers."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvtether.connection import Connection, Verdict

OPS = [{"op": "close", "seq": 1, "ctx": "c"}]


@pytest.fixture
def connection(server) -> Iterator[Connection]:
    connection = Connection(server.url, "key")
    yield connection
    connection.close()


def test_operations_are_taken(server, connection):
    answer = connection.post("s", OPS)
    assert answer.verdict is Verdict.TAKEN
    assert answer.results == [{"status": "applied", "seq": 1, "ctx": "c"}]
    assert server.requests == [{"path": "/kv/v1/ops", "source": "s", "ops": OPS}]
    assert server.keys == {"Bearer key"}


def test_a_question_is_one(server, connection):
    connection.post("s", OPS, dry_run=True)
    assert server.requests[0]["path"] == "/kv/v1/ops?dry_run=1"


def test_a_prefix_is_kept(server):
    connection = Connection(f"{server.url}/team/", "")
    connection.post("s", OPS)
    connection.close()
    assert server.requests[0]["path"] == "/team/kv/v1/ops"
    assert server.keys == {""}


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        (404, Verdict.ABSENT),
        (405, Verdict.ABSENT),
        (401, Verdict.ABSENT),
        (307, Verdict.ABSENT),
        (429, Verdict.AGAIN),
        (500, Verdict.AGAIN),
        (503, Verdict.AGAIN),
        (400, Verdict.REFUSED),
        (413, Verdict.REFUSED),
    ],
)
def test_what_a_status_means(server, connection, status, verdict):
    server.status = status
    answer = connection.post("s", OPS)
    assert answer.verdict is verdict
    assert str(status) in answer.detail


@pytest.mark.parametrize("results", [[], [1], {"a": 1}, None])
def test_success_that_is_not_a_proxys(server, connection, results):
    server.verdicts = lambda source, ops: results
    assert connection.post("s", OPS).verdict is Verdict.ABSENT


@pytest.mark.parametrize(("said", "seconds"), [("7", 7.0), ("1e9", 60.0), ("Wed", 0.0), ("-1", 0.0)])
def test_how_long_to_wait(server, connection, said, seconds):
    server.status, server.headers = 503, {"retry-after": said}
    assert connection.post("s", OPS).retry_after == seconds


def test_nobody_is_there():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    connection = Connection(f"http://127.0.0.1:{port}", "")
    assert connection.post("s", OPS).verdict is Verdict.AGAIN


@contextmanager
def answering(*answers: bytes) -> Iterator[str]:
    """A server that gives each connection one answer, whatever was asked, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                peer, _ = listener.accept()
                with peer:
                    peer.recv(65536)
                    peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"])
def test_what_answers_is_no_server(answer):
    with answering(answer) as url:
        connection = Connection(url, "")
        assert connection.post("s", OPS).verdict is Verdict.AGAIN
        connection.close()


def test_a_kept_connection_may_have_been_given_up():
    body = b'{"results": [{"status": "applied"}]}'
    good = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    with answering(good, good) as url:
        connection = Connection(url, "")
        assert connection.post("s", OPS).verdict is Verdict.TAKEN
        assert connection.post("s", OPS).verdict is Verdict.TAKEN
        connection.close()


@pytest.mark.parametrize("url", ["", "proxy:8700", "ftp://proxy", "http://", "http://proxy:x"])
def test_what_is_no_url(url):
    with pytest.raises(ValueError):
        Connection(url, "")
