"""A process that appends: `python -m tests.lifecycle.store.appender URL STREAM NUMBER COUNT`.

Appends `COUNT` batches of three equal numbers to one stream against whoever else does, and prints the
position of each batch after its append returned.
"""

import asyncio
import sys

from lifecycle.core.events import ListGrown
from lifecycle.errors import VersionConflict
from lifecycle.store.sql import SqlEventLog


async def main(url: str, stream: str, number: int, count: int) -> None:
    """Append, and say so."""
    log = await SqlEventLog.open(url)
    version = done = 0
    while done < count:
        try:
            recorded = await log.append(stream, [ListGrown(at_ns=1, num_new=number)] * 3, version)
        except VersionConflict as conflict:
            version = conflict.actual
        else:
            version = recorded[-1].version
            done += 1
            print(recorded[0].position, flush=True)
    await log.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
