"""Children start, are waited for, die loudly and are stopped with all their children."""

import asyncio
import os
import socket
import sys
from pathlib import Path

import pytest

from engine_bridge.stack.processes import Process, StackError, free_ports

SERVER = (
    "import http.server as h,sys;h.test(h.SimpleHTTPRequestHandler,port=int(sys.argv[1]),bind='127.0.0.1')"
)
FAMILY = (
    "import subprocess,sys;child=subprocess.Popen([sys.executable,'-c','import time;time.sleep(600)']);"
    "open('child.pid','w').write(str(child.pid));" + SERVER
)


def process(folder: Path, code: str, port: int) -> Process:
    command = [sys.executable, "-c", code, str(port)]
    return Process("thing", command, {}, folder / "thing.log", f"http://127.0.0.1:{port}/")


def is_running(pid: int) -> bool:
    """False for a process that is gone or only waits to be reaped."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


async def test_a_child_that_dies_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    child = process(tmp_path, "import sys;sys.exit('no such flag')", 1)
    child.start()
    with pytest.raises(StackError, match="ended with code 1") as caught:
        await child.wait_ready(30)
    assert "no such flag" in str(caught.value)
    await child.stop()


async def test_a_child_that_never_serves_is_given_up(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    child = process(tmp_path, "import time;print('still loading',flush=True);time.sleep(600)", port)
    child.start()
    with pytest.raises(StackError, match="not ready"):
        await child.wait_ready(0.5)
    await child.stop()
    assert not child.is_alive()


async def test_stop_ends_the_grandchildren_too_and_twice_changes_nothing(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    child = process(tmp_path, FAMILY, port)
    child.start()
    await child.wait_ready(30)
    parent, grandchild = child.pid, int((tmp_path / "child.pid").read_text())
    assert parent is not None
    assert parent != os.getpid()
    assert is_running(grandchild)
    await child.stop()
    await child.stop()
    assert not is_running(parent)
    for _ in range(100):  # it is killed, and the system takes it away in its own time
        if not is_running(grandchild):
            break
        await asyncio.sleep(0.05)
    assert not is_running(grandchild)


async def test_a_stopped_child_starts_again_and_its_log_goes_on(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    child = process(tmp_path, "print('began',flush=True);" + SERVER, port)
    for _ in range(2):
        child.start()
        await child.wait_ready(30)
        await child.stop()
    assert child.log.read_text().count("began") == 2


def test_free_ports_differ_and_can_be_bound() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    for port in ports:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", port))


async def test_shared_memory_named_after_a_child_is_given_back(tmp_path: Path) -> None:
    named = "open(f'/dev/shm/lmcache_kv_{child.pid}_0','w').close();"
    (port,) = free_ports(1)
    child = process(tmp_path, FAMILY.replace("open('child.pid'", named + "open('child.pid'"), port)
    child.start()
    await child.wait_ready(30)
    grandchild = int((tmp_path / "child.pid").read_text())
    segment = f"lmcache_kv_{grandchild}_0"
    assert segment in os.listdir("/dev/shm")
    await child.stop()
    assert segment not in os.listdir("/dev/shm")


async def test_kill_asks_nobody_and_the_process_can_start_again(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    deaf = "import signal;signal.signal(signal.SIGTERM,signal.SIG_IGN);" + FAMILY
    child = process(tmp_path, deaf, port)
    await child.kill()
    for _ in range(2):
        child.start()
        await child.wait_ready(30)
        parent, grandchild = child.pid, int((tmp_path / "child.pid").read_text())
        assert parent is not None
        await child.kill()
        assert not is_running(parent)
        assert not is_running(grandchild)
    await child.stop()
