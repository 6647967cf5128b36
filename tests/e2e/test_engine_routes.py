"""The list of routes that we judged is the installed engine's own."""

import os
import subprocess
from pathlib import Path

from engine_bridge.stack.environment import EngineEnvironment
from tests.proxy.test_engine_admin import routes

NEED_THE_COHERE_PACKAGE = {("POST", "/cohere/v2/chat"), ("POST", "/cohere/v2/chat/render")}


def test_every_route_of_the_installed_vllm_was_judged() -> None:
    script = Path(__file__).with_name("engine_routes.py")
    done = subprocess.run(
        [EngineEnvironment().python, script],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("route ")]
    judged = {(route.method, route.path) for route in routes("vllm-0.32.0")}
    assert {(method, path) for _, method, path in lines} == judged - NEED_THE_COHERE_PACKAGE
