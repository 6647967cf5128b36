"""What the chunk index tells of chunks."""

import msgspec


class ChunkDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk in the books. `dead_ns` is 0 for a live one; `directives` are those without an outcome."""

    key: bytes
    references: int
    flags: tuple[str, ...]
    dead_ns: int
    retry_ns: int
    directives: tuple[str, ...]


class ChunkStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one namespace's books, in chunks but for `runs` and `directives`."""

    live: int = 0
    dead: int = 0
    verified: int = 0
    pending: int = 0
    runs: int = 0
    directives: int = 0
    unknown_confirmed: int = 0
