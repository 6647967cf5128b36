"""Reads the engine's KV events into what is kept of them."""

from engine_bridge.cache_events import EventSubscriber
from engine_bridge.call_blocks import CallBlocks
from engine_bridge.placement_watch import PlacementWatch
from proxy.config import Config


class EventReading:
    """Feeds `blocks` and `placement`, and says by `blocks.live` whether it does."""

    def __init__(self, config: Config, blocks: CallBlocks, placement: PlacementWatch) -> None:
        self._config = config
        self._blocks = blocks
        self._placement = placement

    async def run(self) -> None:
        """For ever, if the engine has an endpoint for events."""
        endpoint = self._config.cache.events_endpoint
        if not endpoint:
            return
        replay = self._config.cache.replay_endpoint or None
        subscriber = EventSubscriber(endpoint, replay_endpoint=replay)
        self._blocks.live = True
        try:
            async for batch in subscriber.batches():
                self._blocks.take(batch)
                self._placement.take(batch)
        finally:
            self._blocks.live = False
