"""Runs a decode case on a launcher, and compares it with the oracle."""

from __future__ import annotations

import torch

from executor.backends.cuda.attention_decode import DecodeAttention, DecodeShape
from executor.backends.cuda.launch import Launcher
from tests.kernels.factories import DecodeCase, decode_inputs
from tests.kernels.oracle import attention, attention_tolerance


def decode_shape(case: DecodeCase) -> DecodeShape:
    return DecodeShape(
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_size=case.head_size,
        block_size=case.block_size,
        dtype=case.dtype,
        kv_dtype=case.cache_dtype,
    )


def run_decode(case: DecodeCase, launcher: Launcher) -> torch.Tensor:
    """The kernels' output, [num_tokens, num_heads, head_size]."""
    inputs = decode_inputs(case)
    DecodeAttention(launcher, decode_shape(case))(
        inputs.out,
        inputs.q,
        inputs.k_cache,
        inputs.v_cache,
        inputs.rows,
        case.scale,
        window=case.window,
        softcap=case.softcap,
        k_scale=case.k_scale,
        v_scale=case.v_scale,
    )
    return inputs.out


def check_decode(case: DecodeCase, out: torch.Tensor) -> None:
    """Every row is right; tokens that are no row were not written."""
    inputs = decode_inputs(case)
    tolerance = attention_tolerance(case.dtype, inputs.values)
    for row, token in enumerate(inputs.tokens):
        if case.seq_lens[row] == 0:
            continue
        want, _ = attention(
            inputs.q[token : token + 1], inputs.keys[row], inputs.values[row], case.scale, case.window, case.softcap
        )
        error = float((out[token].double() - want[0]).abs().max())
        assert error <= tolerance, f"row {row} of {case.seq_lens[row]} tokens is off by {error:.2e} > {tolerance:.2e}"
    untouched = [t for t in range(out.shape[0]) if t not in inputs.tokens]
    assert torch.isnan(out[untouched].float()).all()
