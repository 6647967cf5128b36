"""Reads the KV events of every engine into what is kept of them."""

import asyncio
from collections.abc import Callable, Sequence

from engine_bridge.cache_events import EventBatch, EventSubscriber
from engine_bridge.call_blocks import CallBlocks
from engine_bridge.placement_watch import PlacementWatch
from proxy.backends import Backend, Backends


class EventReading:
    """Feeds `blocks` and `placement`, tells `heard`, and says by `blocks.live` whether it hears everybody."""

    def __init__(
        self,
        backends: Backends,
        blocks: CallBlocks,
        placement: PlacementWatch,
        heard: Callable[[Backend, EventBatch], None],
    ) -> None:
        self._backends = backends
        self._blocks = blocks
        self._placement = placement
        self._heard = heard

    @property
    def silent(self) -> list[Backend]:
        """Engines that have no endpoint for events."""
        return [backend for backend in self._backends.all if not backend.config.events_endpoint]

    async def run(self) -> None:
        """For ever, if any engine has an endpoint for events."""
        heard = [backend for backend in self._backends.all if backend.config.events_endpoint]
        if not heard:
            return
        self._blocks.live = not self.silent
        try:
            async with asyncio.TaskGroup() as tasks:
                for backend in heard:
                    tasks.create_task(self._read(backend))
        finally:
            self._blocks.live = False

    async def _read(self, backend: Backend) -> None:
        replay = backend.config.replay_endpoint or None
        subscriber = EventSubscriber(backend.config.events_endpoint, replay_endpoint=replay)
        async for batch in subscriber.batches():
            self._blocks.take(batch, backend.name)
            self._placement.take(batch)
            self._heard(backend, batch)


def no_events(names: Sequence[str]) -> str:
    """What it means that the events of these engines are not read, and the fix."""
    several = [name for name in names if name]
    return (
        f"no KV events {'of ' + ', '.join(several) + ' ' if several else ''}are read, so what calls generate "
        "stays in the cache: start the engine with --kv-events-config and set "
        f"{'upstreams[].events_endpoint' if several else 'cache.events_endpoint'}"
    )
