"""How one of several engines is reached, by whoever asks it something beside the calls."""

import hashlib
import re
from collections.abc import Mapping

import httpx
import msgspec

SOCKET_SCHEME = "unix:"


def socket_path(url: str) -> str:
    """The Unix socket that a URL like `unix:/run/vllm.sock` or `unix:///run/vllm.sock` names; empty for any
    other. Raises `ValueError` for a path that does not begin at the root, or cannot be one."""
    url = url.strip()
    if not url.startswith(SOCKET_SCHEME):
        return ""
    path = url.removeprefix(SOCKET_SCHEME).removeprefix("//")
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise ValueError(f"not the whole path of a Unix socket: {url!r}")
    return path


class EngineAddress(msgspec.Struct, frozen=True):
    """`url` is the base URL, with or without `/v1`, or names a Unix socket; `name` what people call the
    engine, empty for the only one; `key` the engine's own key, empty for none."""

    url: str
    name: str = ""
    key: str = ""

    @property
    def base(self) -> str:
        """The URL that paths stand behind, without `/v1` and without a slash.

        A socket has none: there it is a stand-in, which `mounts` leads to the socket.
        """
        socket = socket_path(self.url)
        if socket:
            name = re.sub("[^a-z0-9]+", "-", socket.lower())[-40:].strip("-")
            return f"http://{name}-{hashlib.blake2b(socket.encode(), digest_size=4).hexdigest()}.socket"
        return self.url.strip().rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def headers(self) -> Mapping[str, str]:
        """What every request carries."""
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    @property
    def mounts(self) -> Mapping[str, httpx.AsyncBaseTransport]:
        """What an `httpx.AsyncClient` needs to reach it; each client its own."""
        socket = socket_path(self.url)
        return {self.base: httpx.AsyncHTTPTransport(uds=socket)} if socket else {}

    def named(self, text: str) -> str:
        """The text as one about this engine, where there are several."""
        return f"engine {self.name}: {text}" if self.name else text
