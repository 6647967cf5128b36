"""Chunk keys against their definition and, with an engine environment, against LMCache's own hasher."""

import json
import struct
import subprocess
from array import array
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.chunk_keys import chunk_keys, extend_keys

ENGINE_PYTHON = Path(__file__).resolve().parents[2] / ".engine" / "venv" / "bin" / "python"
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def by_definition(ids: list[int], chunk_tokens: int) -> bytes:
    parent = blake3(struct.pack(">qI", 0, 0)).digest()
    keys = b""
    for at in range(0, len(ids) - chunk_tokens + 1, chunk_tokens):
        parent = blake3(parent + struct.pack(f">{chunk_tokens}I", *ids[at : at + chunk_tokens])).digest()
        keys += parent
    return keys


@given(tokens, st.integers(1, 9))
def test_every_full_chunk_has_the_key_of_the_definition(ids, chunk_tokens):
    assert chunk_keys(array("I", ids), chunk_tokens) == by_definition(ids, chunk_tokens)


@given(tokens, tokens, tokens, st.integers(1, 9))
def test_extending_from_a_kept_prefix_equals_starting_anew(shared, old, new, chunk_tokens):
    keys = bytearray(chunk_keys(array("I", shared + old), chunk_tokens))
    extend_keys(keys, array("I", shared + new), len(shared), chunk_tokens)
    assert keys == by_definition(shared + new, chunk_tokens)


@pytest.mark.e2e
def test_the_cache_servers_own_hasher_gives_the_same_keys():
    ids = [(at * 7919) % 151_936 for at in range(1000)]
    script = (
        "import json, sys\n"
        "from lmcache.v1.multiprocess.token_hasher import TokenHasher\n"
        "keys = TokenHasher(256, 'blake3').compute_chunk_hashes(json.load(sys.stdin))\n"
        "print('KEYS', b''.join(keys).hex())\n"
    )
    done = subprocess.run(
        [ENGINE_PYTHON, "-c", script],
        input=json.dumps(ids),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("KEYS "))
    assert line.split()[1] == chunk_keys(array("I", ids)).hex()
