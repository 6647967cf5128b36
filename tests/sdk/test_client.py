"""Where the proxy is, whether it is there, and that nothing of it is felt where it is not."""

import os
import signal
import socket
import subprocess
import sys
import textwrap

import pytest

from kvtether import Client, Context
from kvtether.client import default_client, origin_of
from tests.architecture.deployment import REPOSITORY
from tests.sdk.ops_server import SECONDS

URL = "http://proxy:8700/v1/chat/completions"


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://proxy:8700/v1", "http://proxy:8700"),
        ("http://proxy:8700/v1/", "http://proxy:8700"),
        ("http://proxy:8700/", "http://proxy:8700"),
        ("https://host/team/v1/chat/completions", "https://host/team"),
        ("https://host/team", "https://host/team"),
        ("proxy:8700", ""),
        ("", ""),
        ("http://[", ""),
    ],
)
def test_where_operations_go(url, origin):
    assert origin_of(url) == origin


@pytest.mark.parametrize(
    ("environment", "origin"),
    [
        ({}, ""),
        ({"OPENAI_BASE_URL": "http://a/v1"}, "http://a"),
        ({"OPENAI_BASE_URL": "http://a/v1", "KVTETHER_URL": "http://b"}, "http://b"),
        ({"KVTETHER_URL": "nonsense"}, ""),
    ],
)
def test_the_environment_says_where(monkeypatch, caplog, environment, origin):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Client().origin == origin
    assert bool(caplog.records) == (bool(environment) and not origin)


def test_a_url_that_is_none_is_said():
    with pytest.raises(ValueError, match="http URL"):
        Client("proxy:8700")


def test_the_first_proxy_seen_is_the_one(server):
    client = Client()
    ctx = Context("c", client=client)
    ctx.headers()
    ctx.append()
    assert client.flush(SECONDS)
    client.saw(URL, {})
    assert not client.present
    client.saw(f"{server.url}/v1/chat/completions", {"x-kv-context": "c"}, "Bearer seen")
    assert client.present
    assert client.origin == server.url
    client.saw(URL, {"x-kv-context": "c"})
    ctx.headers()
    ctx.append()
    assert client.flush(SECONDS)
    assert server.kinds() == ["append"]
    assert server.keys == {"Bearer seen"}
    client.close()


def test_a_proxy_that_is_gone_is_not_there():
    client = Client("http://proxy:8700/v1")
    client.saw(URL, {"x-kv-context": "c"})
    assert client.present
    client.saw("http://other/v1/chat/completions", {})
    assert client.present
    client.saw(URL, {})
    assert not client.present


def test_only_its_own_server_is_served():
    client = Client("http://proxy:8700/v1")
    assert client.serves(URL)
    assert not client.serves("http://proxy:87001/v1/chat/completions")
    assert Client().serves(URL)


def test_calls_that_are_never_answered_are_forgotten():
    client = Client("http://proxy:8700/v1")
    ctx = Context("c", client=client)
    for n in range(5000):
        client.rides(f"call-{n}", ctx._ledger, "s", n)
    assert len(client._calls) <= 1024


def test_contexts_share_one_client():
    assert Context("a").client is Context("b").client is default_client()


async def test_flushing_from_a_coroutine(server, client):
    ctx = Context("c", client=client)
    ctx.headers()
    ctx.append()
    assert await client.aflush(SECONDS)
    assert server.kinds() == ["append"]


# -- processes -------------------------------------------------------------------------------------------

AGENT = """
import os, sys
from kvtether import Client, Context
client = Client(sys.argv[1])
ctx = Context("c", client=client)
ctx.headers()
ctx.append()
"""


def run(script: str, url: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "sdk")}
    command = [sys.executable, "-W", "error", "-c", AGENT + textwrap.dedent(script), url]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def test_what_was_recorded_is_sent_before_the_process_ends(server):
    done = run("ctx.close()", server.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert server.kinds() == ["append", "close"]


def test_a_forked_process_has_a_source_of_its_own(server):
    done = run(
        """
        pid = os.fork()
        if not pid:
            ctx.append()   # counted from a list that the proxy does not know
            ctx.headers()
            ctx.waiting("tool")
            client.flush(20.0)
            os._exit(0)
        os.waitpid(pid, 0)
        ctx.resumed()
        """,
        server.url,
    )
    assert (done.returncode, done.stderr) == (0, "")
    sources = {r["source"] for r in server.requests}
    assert len(sources) == 2
    assert sorted(server.kinds()) == ["append", "resumed", "waiting"]
    first = {r["source"]: r["ops"][0]["seq"] for r in reversed(server.requests)}
    assert set(first.values()) == {1}


def test_a_process_does_not_outlive_its_server(server):
    server.answer.clear()  # and it hangs until the process is over
    assert run("", server.url).returncode == 0


def test_an_interrupted_agent_ends_at_once(server):
    # Whoever starts tests in the background may have them ignore the signal, and so their children.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    script = heard + AGENT + "print('up', flush=True); import time; time.sleep(100)"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "sdk")}
    command = [sys.executable, "-c", script, server.url]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"up\n"
        agent.send_signal(signal.SIGINT)
        agent.communicate(timeout=SECONDS)
    assert server.kinds() == ["append"]


FOREIGN = """
import sys
sys.path.insert(0, sys.argv[1])
before = set(sys.modules)
import kvtether, kvtether.http
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(loaded - sys.stdlib_module_names - {"kvtether"}))
"""


def test_nothing_but_the_standard_library_is_imported():
    command = [sys.executable, "-S", "-I", "-c", FOREIGN, str(REPOSITORY / "sdk")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    assert done.stdout == "[]\n"


# -- no proxy --------------------------------------------------------------------------------------------


def nobody() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"http://127.0.0.1:{free.getsockname()[1]}/v1"


def test_a_dead_port_is_felt_by_nobody(caplog):
    client = Client(nobody())
    with Context("c", client=client) as ctx:
        for n in range(1000):
            ctx.messages.append({"n": n})
            assert ctx.call()["extra_body"] is None
        client.flush(0.2)
        assert ctx.before_edit(0, 5) is None
    assert len([r for r in caplog.records if r.name == "kvtether"]) == 1
    client.close()
