"""`kvtether`: serve, look, and switch off."""

import asyncio
import signal
from collections.abc import Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import httpx
import typer
import uvloop
from rich.console import Console
from rich.progress import Progress

from lifecycle.errors import LifecycleError
from lifecycle.vocabulary import Mode
from proxy.admin_client import DEFAULT_ADMIN, AdminError, AdminKey, AdminUrl, ask, headers
from proxy.backends_cli import backends_app
from proxy.config import DEFAULT_FILE, Config, InvalidConfig
from proxy.config_cli import config_app
from proxy.config_source import ConfigSource, load_config
from proxy.file_limit import raise_file_limit
from proxy.keys_cli import keys_app
from proxy.log_output import configure_logging
from proxy.malloc_arenas import bound_arenas
from proxy.setup_cli import setup

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(keys_app, name="keys")
app.add_typer(backends_app, name="backends")
app.add_typer(config_app, name="config")
app.command("setup")(setup)
console = Console()

ConfigFile = Annotated[Path | None, typer.Option("--config", help="Default: kvtether.yaml if it is there.")]


@app.command()
def serve(
    config: ConfigFile = None,
    upstream: Annotated[str | None, typer.Option(help="The engine's base URL.")] = None,
    model_path: Annotated[
        str | None, typer.Option(help="Directory with tokenizer and chat template of the served model.")
    ] = None,
    coordinator: Annotated[str | None, typer.Option(help="LMCache coordinator's URL.")] = None,
    events: Annotated[str | None, typer.Option(help="ZMQ endpoint of the engine's KV events.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the data listener.")] = None,
    admin_port: Annotated[int | None, typer.Option(help="Port of the admin listener.")] = None,
    mode: Annotated[Mode | None, typer.Option(help="observe (default), enforce or bypass.")] = None,
    holdout: Annotated[
        str | None, typer.Option(help="Share of contexts that stay in observe: 0.05 or 5%.")
    ] = None,
    embedded: Annotated[
        bool, typer.Option("--embedded", help="Bring an engine along: SIMULATED, in this process, enforced.")
    ] = False,
    script: Annotated[
        Path | None, typer.Option(help="What the embedded engine says: a YAML file of rules.")
    ] = None,
) -> None:
    """Forward calls, follow their lifecycle, and in enforce free what is dead."""
    if embedded and (upstream or coordinator or events):
        _fail("--embedded brings its own engine: leave out --upstream, --coordinator and --events")
    if embedded and mode is None:
        mode = Mode.ENFORCE
    overrides = {
        "upstream.url": upstream,
        "models": [{"path": model_path}] if model_path else None,
        "cache.driver": "lmcache_mp" if coordinator else None,
        "cache.coordinator_url": coordinator,
        "cache.events_endpoint": events,
        "data.port": port,
        "admin.port": admin_port,
        "mode": mode.value if mode else None,
        "holdout": _share(holdout),
    }
    file = _file(config)
    settings = _load(file, overrides)
    source = ConfigSource(partial(load_config, file, overrides), file)
    # Not above: it takes seconds to import, and the emergency switch must not wait for them, nor
    # whoever made a mistake in a setting.
    from proxy.app import serve_until_signalled

    configure_logging(settings.logging.level, settings.logging.format)
    raise_file_limit()
    bound_arenas()
    if embedded:
        _serve_embedded(settings, model_path, script, source)
        return
    try:
        uvloop.run(serve_until_signalled(settings, source))
    except InvalidConfig as error:
        _fail(str(error))


def _serve_embedded(
    settings: Config, model_path: str | None, script: Path | None, source: ConfigSource
) -> None:
    from engine_bridge.errors import Unmappable
    from proxy.embedded import serve_embedded

    try:
        uvloop.run(serve_embedded(settings, model_path, script, source))
    except (InvalidConfig, Unmappable, OSError, ValueError) as error:
        _fail(str(error))


class DemoEngine(StrEnum):
    """What the demo runs on."""

    EMBEDDED = "embedded"
    VLLM_CPU = "vllm-cpu"


@app.command()
def demo(
    trace: Annotated[
        Path | None, typer.Option(help="A recorded trace; without one a workload is made up.")
    ] = None,
    html: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("demo.html"),
    seed: Annotated[int, typer.Option(help="Of the workload that is made up.")] = 1,
    engine: Annotated[
        DemoEngine, typer.Option(help="The embedded one, SIMULATED; or real ones on this machine's CPU.")
    ] = DemoEngine.EMBEDDED,
) -> None:
    """The same agents before a cache left alone and one that is told what died: a table and a picture."""
    from engine_bridge.errors import BridgeError
    from proxy.demo.command import demo as play
    from proxy.demo.command import usual_plan

    configure_logging("warning")
    # Real engines are processes: they are stopped however this one is told to stop.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        uvloop.run(play(console, usual_plan(trace, html, seed, on_cpu=engine is DemoEngine.VLLM_CPU)))
    except (BridgeError, InvalidConfig, OSError) as error:
        _fail(str(error))


@app.command()
def doctor(
    config: ConfigFile = None,
    upstream: Annotated[str | None, typer.Option(help="The engine's base URL.")] = None,
    model_path: Annotated[str | None, typer.Option(help="Directory with tokenizer and template.")] = None,
    coordinator: Annotated[str | None, typer.Option(help="LMCache coordinator's URL.")] = None,
    events: Annotated[str | None, typer.Option(help="ZMQ endpoint of the engine's KV events.")] = None,
) -> None:
    """Say which level you have, what stands in the way, and how to mend it. Frees nothing."""
    from proxy.doctor import Finding, examine
    from proxy.surroundings import look_around

    overrides = {
        "upstream.url": upstream,
        "models": [{"path": model_path}] if model_path else None,
        "cache.driver": "lmcache_mp" if coordinator else None,
        "cache.coordinator_url": coordinator,
        "cache.events_endpoint": events,
    }
    settings = _load(config, overrides)

    async def everything() -> list[Finding]:
        return [*await examine(settings), *await look_around(settings)]

    findings = asyncio.run(everything())
    for finding in findings:
        mark = "[green]ok[/]  " if finding.ok else "[red]fix[/] "
        console.print(f"{mark} {finding.subject}: {finding.text}", soft_wrap=True, highlight=False)
    if not all(f.ok for f in findings):
        raise typer.Exit(1)


@app.command()
def bypass(
    off: Annotated[bool, typer.Option("--off", help="Go back to the configured modes.")] = False,
    admin: AdminUrl = DEFAULT_ADMIN,
    admin_key: AdminKey = "",
) -> None:
    """Make the proxy a plain byte pipe, at once; `--off` ends it."""
    answer = _ask("POST", f"{admin}/kv/v1/bypass", admin_key, params={"on": str(not off).lower()})
    console.print("bypass is", "on" if answer["bypass_all"] else "off")


@app.command(name="release-all")
def release_all(admin: AdminUrl = DEFAULT_ADMIN, admin_key: AdminKey = "") -> None:
    """Give back every pin, ours and those that the cache holds for us."""
    answer = _ask("POST", f"{admin}/kv/v1/release-all", admin_key)
    console.print(f"released {answer['pins']} pins, {answer['cache_holds']} holds in the cache")


@app.command()
def tail(
    after: Annotated[int | None, typer.Option(help="Log position to begin behind; default: now.")] = None,
    admin: AdminUrl = DEFAULT_ADMIN,
    admin_key: AdminKey = "",
) -> None:
    """Print events as they become true, one JSON document a line."""
    params = {} if after is None else {"after": after}
    try:
        with httpx.stream(
            "GET", f"{admin}/kv/v1/events", params=params, headers=headers(admin_key), timeout=None
        ) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: "):
                    console.print(line.removeprefix("data: "), soft_wrap=True, highlight=False, markup=False)
    except httpx.HTTPError as error:
        _fail(f"{admin}: {error}")
    except KeyboardInterrupt:
        pass


@app.command()
def rebuild(config: ConfigFile = None) -> None:
    """Make the SQL read models anew from the event log; the proxy may run meanwhile."""
    from proxy.read_models import rebuild as rebuilt

    settings = _load(config, {})
    with Progress(console=console) as bar:
        task = bar.add_task("events", total=None)
        try:
            done = asyncio.run(rebuilt(settings, lambda at, of: bar.update(task, completed=at, total=of)))
        except (InvalidConfig, LifecycleError) as error:
            _fail(str(error))
    console.print(f"rebuilt from {done.num_events} events, up to position {done.position}", highlight=False)
    if done.first_position > 1:
        console.print(
            f"the log begins at position {done.first_position}; {done.kept} rows from before were kept",
            highlight=False,
        )


@app.command()
def report(
    since: Annotated[str, typer.Option(help="How far back: 90s, 15m, 24h, 7d.")] = "24h",
    by: Annotated[str, typer.Option(help="tenant, agent, model, harness or arm.")] = "tenant",
    as_json: Annotated[bool, typer.Option("--json", help="The whole report as one JSON document.")] = False,
    admin: AdminUrl = DEFAULT_ADMIN,
    admin_key: AdminKey = "",
) -> None:
    """Say what the lifecycle was worth: dead KV seen and freed, regretted, held out against enforced."""
    from proxy.report_table import report_table

    document = _ask("GET", f"{admin}/kv/v1/report", admin_key, params={"since": since, "by": by})
    if as_json:
        console.print_json(data=document)
    else:
        console.print(report_table(document), highlight=False)


def _share(text: str | None) -> float | None:
    """A share as people write it: 0.05 or 5%."""
    if text is None:
        return None
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        _fail(f"--holdout {text}: a share like 0.05 or 5% is expected")


def _file(path: Path | None) -> Path | None:
    return DEFAULT_FILE if path is None and DEFAULT_FILE.exists() else path


def _load(path: Path | None, overrides: Mapping[str, Any]) -> Config:
    try:
        return load_config(_file(path), overrides)
    except InvalidConfig as error:
        _fail(str(error))


def _ask(method: str, url: str, key: str, params: Mapping[str, str] | None = None) -> dict[str, Any]:
    try:
        return ask(method, url, key, params)
    except AdminError as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    console.print(f"[red]error[/] {message}", soft_wrap=True, highlight=False)
    raise typer.Exit(2)


def main() -> None:
    """Entry point."""
    app()
