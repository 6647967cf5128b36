"""Tells a KVTether proxy what an agent does with its contexts. Without a proxy nothing of it is felt."""

from kvtether.arguments import Result, Span, WaitKind
from kvtether.client import Client
from kvtether.compaction import Compaction
from kvtether.context import Context, current
from kvtether.message_list import MessageList

__all__ = ["Client", "Compaction", "Context", "MessageList", "Result", "Span", "WaitKind", "current"]
