"""`python -m harnesses.record_plain DIR [--seeds N] [--only NAME…]`: recordings of the plain agents."""

import argparse
import asyncio
import zlib
from collections.abc import Sequence
from pathlib import Path

from harnesses.engine import MODEL_NAME
from harnesses.model_server import scripted_model
from harnesses.plain import BEHAVIOURS, behave
from harnesses.recording import write_recording
from harnesses.truth import true_requests


async def record(folder: Path, names: Sequence[str], num_seeds: int) -> None:
    """Each behaviour under seeds from 1 on, in a file each."""
    for name in names:
        for seed in range(1, num_seeds + 1):
            async with scripted_model() as model:
                await behave(name, zlib.crc32(f"{name} {seed}".encode()), model.url, MODEL_NAME)
                print(write_recording(folder, f"plain-{name}", true_requests(model.exchanges)), flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=sorted(BEHAVIOURS), default=sorted(BEHAVIOURS))
    given = parser.parse_args()
    asyncio.run(record(given.folder, given.only, given.seeds))


if __name__ == "__main__":
    main()
