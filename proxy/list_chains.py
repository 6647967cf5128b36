"""Message lists as chains of digests: how much two of them have in common is one binary search."""

from collections.abc import Sequence
from hashlib import blake2b

from lifecycle.core.ids import DIGEST_BYTES
from proxy.followed_call import MessageShape

HEAD_ROLES = ("system", "developer")


def digests_of(messages: Sequence[MessageShape]) -> bytes:
    """The messages' digests, one after the other."""
    return b"".join([message.fact.digest for message in messages])


def split_digests(run: bytes) -> list[bytes]:
    """A run of digests cut into digests."""
    return [run[at : at + DIGEST_BYTES] for at in range(0, len(run), DIGEST_BYTES)]


def cumulative(digests: bytes, known: bytes = b"", known_chain: bytes = b"") -> bytes:
    """For each message the digest of the list up to it, one after the other.

    `known` are digests whose chain is at hand: what both lists begin with is taken from it.
    """
    num_shared = shared_digests(digests, known) if known else 0
    chain = bytearray(known_chain[: num_shared * DIGEST_BYTES])
    link = bytes(chain[-DIGEST_BYTES:])
    for at in range(len(chain), len(digests), DIGEST_BYTES):
        link = blake2b(link + digests[at : at + DIGEST_BYTES], digest_size=DIGEST_BYTES).digest()
        chain += link
    return bytes(chain)


def shared_digests(first: bytes, second: bytes) -> int:
    """How many messages two runs of digests have in common at their beginning."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length // DIGEST_BYTES
    low, high = 0, length
    while low < high:  # the runs agree up to `low`, and not up to beyond `high`
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low // DIGEST_BYTES


def shared_messages(first: bytes, second: bytes) -> int:
    """How many messages two cumulative chains have in common at their beginning, in O(log n)."""
    low, high = 0, min(len(first), len(second)) // DIGEST_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if link(first, middle) == link(second, middle):
            low = middle
        else:
            high = middle - 1
    return low


def link(chain: bytes, length: int) -> bytes:
    """The digest of the chain's first `length` messages."""
    return chain[max(0, length - 1) * DIGEST_BYTES : length * DIGEST_BYTES]


def num_head(messages: Sequence[MessageShape]) -> int:
    """How many system and developer messages a list begins with."""
    return next((i for i, m in enumerate(messages) if m.fact.role not in HEAD_ROLES), len(messages))
