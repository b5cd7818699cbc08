"""Chained hashes that name the contents of full KV blocks.

A block's hash covers its own tokens, all tokens before them, and the root: the cache salt and the adapter under which
they were computed. Equal hashes mean equal K/V. 128 bits of BLAKE2b: no two blocks collide by accident or by intent.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_SIZE = 16  # bytes


def root_hash(cache_salt: str, adapter: str) -> bytes:
    """The parent of a sequence's first block. Each field is tagged and carries its length, so that equal strings in
    different fields never make equal roots."""
    root = blake2b(digest_size=DIGEST_SIZE, person=b"octavo/root")
    for tag, value in ((b"salt", cache_salt.encode()), (b"adapter", adapter.encode())):
        root.update(tag + struct.pack("<Q", len(value)) + value)
    return root.digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of one full block: its parent's hash, then its token ids as little-endian uint32."""
    return blake2b(parent + struct.pack(f"<{len(token_ids)}I", *token_ids), digest_size=DIGEST_SIZE).digest()


def extend_chain(chain: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int) -> None:
    """Appends the hashes that `chain` lacks of the full blocks of `token_ids`."""
    for start in range(len(chain) * block_size, len(token_ids) - block_size + 1, block_size):
        chain.append(block_hash(chain[-1] if chain else root, token_ids[start : start + block_size]))


def hash_chain(token_ids: Sequence[int], block_size: int, cache_salt: str = "", adapter: str = "") -> tuple[bytes, ...]:
    """The hashes of all full blocks of a prompt."""
    chain: list[bytes] = []
    extend_chain(chain, root_hash(cache_salt, adapter), token_ids, block_size)
    return tuple(chain)
