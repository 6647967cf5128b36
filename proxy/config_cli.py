"""`kvtether config`: what a configuration says and what is wrong with it, before a proxy runs on it."""

import os
import re
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import yaml
from rich.console import Console

from proxy.auth import Authenticator
from proxy.config import DEFAULT_FILE, Config, InvalidConfig, api_key, json_schema
from proxy.config_source import read_config, told_warnings
from proxy.key_watch import KeyWatch, refuse_strangers

config_app = typer.Typer(no_args_is_help=True, help="Check, show and describe the configuration.")
console = Console()

ConfigFile = Annotated[Path | None, typer.Option("--config", help="Default: kvtether.yaml if it is there.")]

_PASSWORD = re.compile(r"(?<=://)([^:@/\s]*):[^@/\s]*@")


@config_app.command()
def validate(config: ConfigFile = None) -> None:
    """Check file and environment as a start would, and name every problem with its place. Starts nothing."""
    read, problems = read_config(_file(config))
    found = [str(problem) for problem in problems]
    if read is not None:
        found += _start_problems(read)
        for warning in told_warnings(read, os.environ):
            console.print(f"[yellow]note[/] {warning}", soft_wrap=True, highlight=False)
    for problem in found:
        console.print(f"[red]fix[/]  {problem}", soft_wrap=True, highlight=False)
    if found:
        raise typer.Exit(1)
    console.print(f"[green]ok[/]   {_file(config) or 'no file: defaults and environment'}", highlight=False)


@config_app.command()
def show(config: ConfigFile = None) -> None:
    """Print every setting in force, from file, environment and defaults, as YAML. Passwords are left out."""
    read, problems = read_config(_file(config))
    if read is None:
        for problem in problems:
            console.print(f"[red]fix[/]  {problem}", soft_wrap=True, highlight=False)
        raise typer.Exit(1)
    text = yaml.safe_dump(shown(read), sort_keys=False, allow_unicode=True)
    console.print(text, soft_wrap=True, highlight=False, markup=False, end="")


@config_app.command()
def schema() -> None:
    """Print the JSON schema of kvtether.yaml."""
    console.print_json(data=json_schema())


def shown(config: Config) -> dict[str, object]:
    """The configuration without the passwords that stand in its URLs, as plain values."""
    document = msgspec.json.encode(config).decode()
    plain: dict[str, object] = msgspec.json.decode(_PASSWORD.sub(r"\1:***@", document))
    return plain


def _start_problems(config: Config) -> list[str]:
    """What would stop a start on this machine: keys that are not there, doors that would stand open."""
    found = []
    keys = []
    for key in config.api_keys:
        try:
            keys.append(api_key(key, os.environ))
        except InvalidConfig as error:
            found.append(str(error))
    auth = Authenticator(keys)
    try:
        KeyWatch(config, auth.take).begin()
        if not found:
            refuse_strangers(config, auth)
    except InvalidConfig as error:
        found.append(str(error))
    return found


def _file(config: Path | None) -> Path | None:
    return DEFAULT_FILE if config is None and DEFAULT_FILE.exists() else config
