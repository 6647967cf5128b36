"""An answer's head leaves with the first bytes of its body: a system call, and a waking of the client, less.

uvicorn writes the head by itself, and every write goes to the socket at once.
"""

import asyncio
from typing import Any

_STATUS_LINE = b"HTTP/1.1 "
_INTERIM = b"HTTP/1.1 1"


class JoinedWrites:
    """Stands before `inner`, the client's transport. A head that nothing follows leaves a turn later."""

    def __init__(self, inner: asyncio.Transport) -> None:
        self.inner = inner
        self._head: bytes | None = None

    def write(self, data: bytes) -> None:
        """Write, or keep the head of an answer back until the next write."""
        if self._head is not None:
            head, self._head = self._head, None
            # Not by `writelines`: from Python 3.12 on an empty piece stays unsent and keeps the loop busy.
            self.inner.write(head + data)
        elif data.startswith(_STATUS_LINE) and not data.startswith(_INTERIM):
            self._head = data
            asyncio.get_running_loop().call_soon(self.flush)
        else:
            self.inner.write(data)

    def flush(self) -> None:
        """Write a head that was kept back."""
        head, self._head = self._head, None
        if head is not None and not self.inner.is_closing():
            self.inner.write(head)

    def close(self) -> None:
        """Write what was kept back, and close."""
        self.flush()
        self.inner.close()

    def write_eof(self) -> None:
        """Write what was kept back, and say that nothing follows."""
        self.flush()
        self.inner.write_eof()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
