"""Distance in units of the last place: how far a rounded result may be from the exact one."""

from __future__ import annotations

import torch

_DIGITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8, torch.float8_e4m3fn: 4}  # of the significand
_SMALLEST = {torch.float32: 2.0**-126, torch.float16: 2.0**-14, torch.bfloat16: 2.0**-126, torch.float8_e4m3fn: 2.0**-6}
_LARGEST_FP8 = 448.0


def assert_within_ulps(got: torch.Tensor, want: torch.Tensor, ulps: float, floor: float = 0.0) -> None:
    """got, in its format, is within so many ulps of want (float64). `floor`: an absolute error allowed besides, for
    results of cancellation, whose own ulp says nothing of what went in."""
    if got.dtype == torch.float8_e4m3fn:
        want = want.clamp(-_LARGEST_FP8, _LARGEST_FP8)
    exponent = torch.frexp(want.abs().clamp(min=_SMALLEST[got.dtype])).exponent
    unit = torch.ldexp(torch.ones_like(want), exponent - _DIGITS[got.dtype])
    excess = (got.double() - want).abs() - (ulps * unit + floor)
    assert not got.double().isnan().any(), "a result is NaN"
    assert float(excess.max()) <= 0, f"off by {float(((got.double() - want).abs() / unit).max()):.2f} ulps"
