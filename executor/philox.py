"""Philox4x32-10: random numbers as a pure function of (key, counter), so that a draw never depends on the batch.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Octavo's use of it, which a kernel must
reproduce bit for bit:

    key     = (seed & 0xffffffff, seed >> 32)
    counter = (output position, sample index, draw, 0)
    uniform = (word 0 of the result + 0.5) * 2**-32, in float64: exact, and strictly between 0 and 1

`draw` counts the numbers one token takes; a token takes one, so it is 0 today.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]  # 32-bit words, kept in 64 bits for the products

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(key: tuple[Words, Words], counter: tuple[Words, Words, Words, Words]) -> tuple[Words, ...]:
    """Four random words for each counter; all arrays [n] uint64 holding 32-bit values."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        p0 = _MULTIPLIERS[0] * c0
        p1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0 = (k0 + _WEYL[0]) & _LOW
        k1 = (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(
    seeds: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.int64],
    sample_indices: npt.NDArray[np.int64],
    draw: int = 0,
) -> npt.NDArray[np.float64]:
    """One number in (0, 1) for each row: seeds [n], output positions [n], sample indices [n]."""
    position = positions.astype(np.uint64)
    counter = (
        position,
        sample_indices.astype(np.uint64),
        np.full_like(position, draw),
        np.zeros_like(position),
    )
    words = philox4x32((seeds & _LOW, seeds >> _32), counter)
    uniform: npt.NDArray[np.float64] = (words[0].astype(np.float64) + 0.5) * 2.0**-32
    return uniform
