"""API keys of two tenants and of who operates, as a test tool."""

import hashlib

from proxy.config import KeyConfig

KEYS = {"KEY_A": "secret-a", "KEY_B": "secret-b", "KEY_ADMIN": "secret-admin"}


def sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def keys() -> tuple[KeyConfig, ...]:
    return (
        KeyConfig(tenant="a", key_sha256=sha("secret-a")),
        KeyConfig(tenant="b", key_sha256=sha("secret-b")),
        KeyConfig(tenant="ops", key_sha256=sha("secret-admin"), admin=True),
    )


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer secret-{name}"}
