"""The generator against its authors' known answers, and the numbers that Octavo makes of it."""

from __future__ import annotations

import numpy as np
import pytest

from executor.philox import philox4x32, uniforms

# Known answers of the Random123 distribution (kat_vectors): counter, key, result.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[np.ndarray]:
    return [np.array([int(word, 16)], np.uint64) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), VECTORS)
def test_known_answers(counter: str, key: str, result: str) -> None:
    k0, k1 = words(key)
    c0, c1, c2, c3 = words(counter)
    assert [f"{int(word[0]):08x}" for word in philox4x32((k0, k1), (c0, c1, c2, c3))] == result.split()


def test_the_uniform_number_is_the_first_word_of_position_and_sample_index() -> None:
    seed, position, sample_index = 0x299F31D0A4093822, 0x243F6A88, 0x85A308D3
    zero = np.zeros(1, np.uint64)
    counter = (np.array([position], np.uint64), np.array([sample_index], np.uint64), zero, zero)
    word = philox4x32((np.array([0xA4093822], np.uint64), np.array([0x299F31D0], np.uint64)), counter)[0]
    uniform = uniforms(np.array([seed], np.uint64), np.array([position]), np.array([sample_index]))
    assert uniform[0] == (int(word[0]) + 0.5) / 2**32


def test_uniform_numbers_lie_strictly_between_0_and_1_and_fill_it() -> None:
    count = 100_000
    drawn = uniforms(np.full(count, 7, np.uint64), np.arange(count), np.zeros(count, np.int64))
    assert 0 < drawn.min() < 1e-4
    assert 1 - 1e-4 < drawn.max() < 1
    assert drawn.mean() == pytest.approx(0.5, abs=0.005)
    assert len(np.unique(drawn)) > count - 10


def test_seed_position_and_sample_index_each_change_the_number() -> None:
    seeds, positions, samples = np.meshgrid([1, 2, 2**40], [0, 1], [0, 1], indexing="ij")
    drawn = uniforms(seeds.ravel().astype(np.uint64), positions.ravel(), samples.ravel())
    assert len(np.unique(drawn)) == 12
