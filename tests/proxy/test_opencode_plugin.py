"""The plugin for opencode, run by node before a server that keeps what it is told."""

import json
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from proxy.opencode_hooks import opencode_fact

PLUGIN = Path(__file__).parents[2] / "proxy" / "opencode_plugin.js"
TEXT = "a title that nobody else is to see"
CALLS = {
    "created": [
        "event",
        {"event": {"type": "session.created", "properties": {"info": {"id": "ses_1", "title": TEXT}}}},
    ],
    "child": [
        "event",
        {"event": {"type": "session.created", "properties": {"info": {"id": "ses_2", "parentID": "ses_1"}}}},
    ],
    "before": [
        "tool.execute.before",
        {"tool": "task", "sessionID": "ses_1", "callID": "c"},
        {"args": {"prompt": TEXT}},
    ],
    "after": ["tool.execute.after", {"tool": "task", "sessionID": "ses_1", "callID": "c"}, {"output": TEXT}],
    "compacting": ["experimental.session.compacting", {"sessionID": "ses_1"}, {"context": []}],
    "compacted": ["event", {"event": {"type": "session.compacted", "properties": {"sessionID": "ses_1"}}}],
    "asked": [
        "event",
        {"event": {"type": "permission.asked", "properties": {"id": "p", "sessionID": "ses_1"}}},
    ],
    "message": ["event", {"event": {"type": "message.updated", "properties": {"info": {"text": TEXT}}}}],
    "idle": ["event", {"event": {"type": "session.idle", "properties": {"sessionID": "ses_1"}}}],
    "deleted": ["event", {"event": {"type": "session.deleted", "properties": {"info": {"id": "ses_1"}}}}],
}

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")


class Listener(BaseHTTPRequestHandler):
    """Keeps path, key and body of what is posted."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.told.append((self.path, self.headers.get("authorization"), body))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *arguments):
        """Not on the console."""


@pytest.fixture
def listener():
    with ThreadingHTTPServer(("127.0.0.1", 0), Listener) as server:
        server.told = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run(config, calls, tmp_path):
    """What the hooks leave in their second argument."""
    (tmp_path / "plugin.mjs").write_bytes(PLUGIN.read_bytes())
    (tmp_path / "run.mjs").write_text(
        f"""
        import {{ KVTether }} from "./plugin.mjs"
        const hooks = await KVTether({{}})
        await hooks.config({json.dumps(config)})
        const left = []
        for (const [name, first, second] of {json.dumps(calls)}) {{
          await hooks[name](first, second)
          left.push(second ?? null)
        }}
        console.log(JSON.stringify(left))
        """
    )
    done = subprocess.run(
        ["node", "run.mjs"],
        cwd=tmp_path,
        env={"PATH": str(Path(shutil.which("node")).parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout)


def provider(url, key=""):
    return {"provider": {"kvtether": {"options": {"baseURL": f"{url}/v1", "apiKey": key}}}}


@needs_node
def test_events_reach_the_proxy_in_order_and_without_text(listener, tmp_path):
    url = f"http://127.0.0.1:{listener.server_port}"
    run(provider(url, "secret"), list(CALLS.values()), tmp_path)
    assert [body["type"] for _, _, body in listener.told] == [
        "session.created",
        "session.created",
        "tool.execute.before",
        "tool.execute.after",
        "session.compacting",
        "session.compacted",
        "permission.asked",
        "session.idle",
        "session.deleted",
    ]
    assert {(path, key) for path, key, _ in listener.told} == {("/kv/v1/hooks/opencode", "Bearer secret")}
    assert TEXT not in json.dumps([body for _, _, body in listener.told])


@needs_node
def test_each_event_is_one_that_the_proxy_reads(listener, tmp_path):
    run(provider(f"http://127.0.0.1:{listener.server_port}"), list(CALLS.values()), tmp_path)
    first, *others = [body for _, _, body in listener.told]
    assert not opencode_fact(first)
    assert all(opencode_fact(body) for body in others)


@needs_node
@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ("build", 'agent="build"'),
        ("title", 'agent="title", one_off'),
        ("compaction", 'agent="compaction", one_off'),
        ('say "hé"', 'agent="say \\"h?\\""'),
    ],
)
def test_a_call_says_whose_it_is(agent, said, tmp_path):
    asked = {"sessionID": "ses_1", "agent": agent, "model": {"providerID": "kvtether"}}
    assert run({}, [["chat.headers", asked, {"headers": {}}]], tmp_path) == [
        {"headers": {"x-kv-lifecycle": said}}
    ]


@needs_node
def test_other_providers_are_told_nothing(tmp_path):
    asked = {"sessionID": "ses_1", "agent": "build", "model": {"providerID": "other"}}
    assert run({}, [["chat.headers", asked, {"headers": {}}]], tmp_path) == [{"headers": {}}]


@needs_node
def test_a_proxy_that_is_away_holds_nothing_up(listener, tmp_path):
    port = listener.server_port
    listener.shutdown()
    listener.server_close()
    assert run(provider(f"http://127.0.0.1:{port}"), [CALLS["idle"]], tmp_path) == [None]
