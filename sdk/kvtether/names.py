"""Names of the wire, as the proxy reads them, and what it accepts as a name."""

import hashlib

LIFECYCLE_HEADER = "x-kv-lifecycle"
LIFECYCLE_ERROR_HEADER = "x-kv-lifecycle-error"
LIFECYCLE_BODY_FIELD = "kv_lifecycle"
CONTEXT_HEADER = "x-kv-context"
CALL_HEADER = "x-kv-call"
OPS_PATH = "/kv/v1/ops"

MAX_NAME_LENGTH = 256
"""Characters of a context id, of `agent`, `flow` and `tool`."""

MAX_HEADER_BYTES = 4 * 1024
MAX_RIDING_BYTES = 32 * 1024
"""Most that operations may take in the body of a call, as JSON."""

MIN_OPERATION_BYTES = 32
"""No operation is shorter."""

_DIGEST_LENGTH = 32


def context_id(text: str) -> str:
    """The id that stands for `text`: what may not be in an id is percent-encoded, too long a text hashed.

    An id stands for itself. Raises `ValueError` for an empty one.
    """
    if not text:
        raise ValueError("a context's name has at least one character")
    encoded = "".join(_encoded(c) if c == "/" or not c.isprintable() else c for c in text)
    return _shortened(encoded)


def label(text: str) -> str:
    """`text` as a label: unprintable characters become spaces, too long a text is hashed at its end."""
    return _shortened("".join(c if c.isprintable() else " " for c in text))


def _encoded(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))


def _shortened(text: str) -> str:
    if len(text) <= MAX_NAME_LENGTH:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]
    return f"{text[: MAX_NAME_LENGTH - _DIGEST_LENGTH - 1]}-{digest}"
