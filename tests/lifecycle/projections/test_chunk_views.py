"""What the index tells of a chunk nobody knows, and of an empty namespace."""

from lifecycle.core.ids import Namespace
from lifecycle.projections.chunk_index import ChunkIndex
from lifecycle.projections.chunk_views import ChunkStats


def test_an_empty_index_counts_nothing_and_describes_nothing() -> None:
    index = ChunkIndex()
    assert index.stats(Namespace("m")) == ChunkStats()
    assert index.describe(Namespace("m"), bytes(32)) is None
