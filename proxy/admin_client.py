"""Asks a running proxy's admin listener, for the commands that steer one."""

from collections.abc import Mapping
from typing import Annotated, Any

import httpx
import typer

from proxy.config import ADMIN_KEY_VARIABLE

DEFAULT_ADMIN = "http://127.0.0.1:8701"
ASK_SECONDS = 30.0

AdminUrl = Annotated[str, typer.Option("--admin", help="The proxy's admin listener.")]
AdminKey = Annotated[
    str, typer.Option("--admin-key", envvar=ADMIN_KEY_VARIABLE, help="API key with the admin scope.")
]


class AdminError(Exception):
    """The proxy did not answer, or refused; the message says where and why."""


def ask(method: str, url: str, key: str, params: Mapping[str, str] | None = None) -> dict[str, Any]:
    """One request, its answer decoded. Raises `AdminError`."""
    try:
        response = httpx.request(method, url, params=params, headers=headers(key), timeout=ASK_SECONDS)
        response.raise_for_status()
    except httpx.HTTPStatusError as error:
        raise AdminError(f"{url}: {_detail(error.response) or error}") from error
    except httpx.HTTPError as error:
        raise AdminError(f"{url}: {error}") from error
    answer: dict[str, Any] = response.json()
    return answer


def headers(key: str) -> dict[str, str]:
    """What a request with this key carries."""
    return {"authorization": f"Bearer {key}"} if key else {}


def _detail(response: httpx.Response) -> str:
    """What a refusal says in words; empty if it does not."""
    try:
        return f"{response.status_code} {response.json()['detail']}"
    except (ValueError, LookupError, TypeError):
        return ""
