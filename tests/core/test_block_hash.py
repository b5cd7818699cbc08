"""Hashes of blocks: known answers, the chain, and roots that never mix."""

from __future__ import annotations

import hashlib

import pytest

from scheduler.core.block_hash import block_hash, extend_chain, hash_chain, root_hash


def by_hand(parent: bytes, token_ids: list[int]) -> bytes:
    data = b"".join(token_id.to_bytes(4, "little") for token_id in token_ids)
    return hashlib.blake2b(parent + data, digest_size=16).digest()


def test_a_hash_covers_its_parent_and_its_tokens_as_little_endian_uint32():
    parent = bytes(range(16))
    assert block_hash(parent, [1, 256, 2**32 - 1]) == by_hand(parent, [1, 256, 2**32 - 1])


def test_a_known_answer():
    digest = hashlib.blake2b(b"\x00" * 16 + b"\x01\x00\x00\x00\x02\x00\x00\x00", digest_size=16).hexdigest()
    assert block_hash(b"\x00" * 16, [1, 2]).hex() == digest == "5755319e7435b6b328396542a9e681c9"


def test_a_chain_links_every_full_block_and_leaves_out_the_rest():
    token_ids = list(range(100, 111))
    first = by_hand(root_hash("", ""), token_ids[:4])
    assert hash_chain(token_ids, 4) == (first, by_hand(first, token_ids[4:8]))


def test_extending_a_chain_adds_only_what_is_missing():
    token_ids = list(range(12))
    chain = list(hash_chain(token_ids[:7], 4))
    extend_chain(chain, root_hash("", ""), token_ids, 4)
    assert tuple(chain) == hash_chain(token_ids, 4)
    extend_chain(chain, root_hash("", ""), token_ids, 4)
    assert len(chain) == 3


def test_a_change_in_one_token_changes_every_later_hash():
    one, other = hash_chain(range(16), 4), hash_chain([0, 1, 2, 3, 4, 99, *range(6, 16)], 4)
    assert one[0] == other[0]
    assert not set(one[1:]) & set(other[1:])


def test_the_same_string_as_salt_and_as_adapter_makes_two_roots():
    assert root_hash("x", "") != root_hash("", "x")
    assert hash_chain(range(8), 4, cache_salt="x")[0] != hash_chain(range(8), 4, adapter="x")[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("ab", "c"), ("a", "bc")),
        (("", ""), (" ", "")),
        (("a", "a"), ("aa", "")),
        (("", "x"), ("", "y")),
        (("x", ""), ("y", "")),
    ],
)
def test_no_two_pairs_of_salt_and_adapter_share_a_root(one, other):
    assert root_hash(*one) != root_hash(*other)


def test_a_salt_adapter_tag_in_a_salt_forges_no_adapter():
    forged = "x" + "adapter" + "\x01" + "\x00" * 7 + "y"
    assert root_hash(forged, "") != root_hash("x", "y")
