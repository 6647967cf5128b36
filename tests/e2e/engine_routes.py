"""Prints every route of vLLM's API server, one a line: method and path.

Run by the engine's own Python; builds the server's application as the server does, without an engine. What
only some models, flags or variables switch on is switched on. `test_engine_routes` compares the list.
"""

import os
from types import SimpleNamespace
from typing import Any

os.environ["VLLM_SERVER_DEV_MODE"] = "1"
os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"

from starlette.routing import Route, WebSocketRoute
from vllm.config import ProfilerConfig
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

GENERATING = ("generate", "transcription", "realtime", "render")
POOLING = ("embed", "classify", "token_embed", "token_classify")


class PoolingModel(SimpleNamespace):
    """As much of a model's configuration as decides on routes."""

    def get_pooling_task(self, tasks: object) -> str:
        return "embed"


def main() -> None:
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--enable-fault-tolerance"])
    args.enable_tokenizer_info_endpoint = True
    args.profiler_config = ProfilerConfig(profiler="torch", torch_profiler_dir="/nowhere")
    found: set[tuple[str, str]] = set()
    for tasks, model in ((GENERATING, None), (POOLING, PoolingModel())):
        app: Any = build_app(args, tasks, model)
        for route in app.routes:
            if isinstance(route, WebSocketRoute):
                found.add((route.path, "WEBSOCKET"))
            elif isinstance(route, Route):
                found.update((route.path, method) for method in route.methods or ())
    for path, method in sorted(found):
        print("route", method, path)


if __name__ == "__main__":
    main()
