"""Identities: who a context is, which KV its tokens can share, what a chunk is called."""

import msgspec

KEY_BYTES = 32
"""Length of one chunk key: LMCache's BLAKE3 chain hash."""

DIGEST_BYTES = 16
"""Length of a message digest: a keyed hash of the message's canonical form."""


class ContextKey(msgspec.Struct, frozen=True, order=True):
    """Identity of a context: unique per tenant. `uid` names it in URLs and streams and is minted by us."""

    tenant: str
    context_id: str

    def __str__(self) -> str:
        return f"{self.tenant}/{self.context_id}"


class Namespace(msgspec.Struct, frozen=True, order=True):
    """KV identity: tokens share KV only inside one namespace.

    `fingerprint` covers engine, tokenizer, template and KV configuration; `salt` is the cache salt sent
    with the call, empty for the shared one.
    """

    model: str
    salt: str = ""
    fingerprint: str = ""

    @property
    def cache(self) -> "Namespace":
        """The part that chunks are shared by: keys of equal tokens are equal, whoever mapped them how."""
        return Namespace(self.model, self.salt)

    def stream(self) -> str:
        """Name of the stream that carries this namespace's facts."""
        return f"ns/{self.model}/{self.salt}/{self.fingerprint}"


def context_stream(uid: str) -> str:
    """Name of the stream that carries one context's events."""
    return f"ctx/{uid}"


def split_keys(run: bytes) -> list[bytes]:
    """Cut a run of concatenated chunk keys into keys."""
    return [run[i : i + KEY_BYTES] for i in range(0, len(run), KEY_BYTES)]
