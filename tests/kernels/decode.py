"""Runs decode cases on the simulator under every schedule, and compares them with the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from executor.backends.cuda.attention_decode import DecodeAttention, DecodeShape
from executor.backends.cuda.launch import Argument, Dimensions, Launcher
from executor.backends.cuda.sources import KernelSource
from tests.kernels.factories import DecodeCase, DecodeInputs, decode_inputs
from tests.kernels.oracle import LSE_TOLERANCE, attention, attention_tolerance
from tests.kernels.schedules import EVERY_SCHEDULE
from tests.kernels.sim import SimulatorBuild, SimulatorLauncher


@dataclass(slots=True)
class RecordingLauncher:
    """Passes launches on, and keeps their arguments."""

    launcher: Launcher
    launches: list[tuple[KernelSource, Sequence[Argument]]] = field(default_factory=list)

    @property
    def shared_limit(self) -> int:
        return self.launcher.shared_limit

    def prepare(self, kernel: KernelSource, shared_bytes: int = 0) -> None:
        self.launcher.prepare(kernel, shared_bytes)

    def launch(
        self, kernel: KernelSource, grid: Dimensions, block: Dimensions, shared_bytes: int, args: Sequence[Argument]
    ) -> None:
        self.launcher.launch(kernel, grid, block, shared_bytes, args)
        self.launches.append((kernel, list(args)))


def decode_shape(case: DecodeCase) -> DecodeShape:
    return DecodeShape(
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_size=case.head_size,
        block_size=case.block_size,
        dtype=case.dtype,
        kv_dtype=case.cache_dtype,
    )


def run_decode(case: DecodeCase, inputs: DecodeInputs, launcher: Launcher) -> None:
    """Writes `inputs.out`."""
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


def check_decode(
    case: DecodeCase,
    build: SimulatorBuild | None = None,
    shared_limit: int = 227 << 10,
    inputs: DecodeInputs | None = None,
) -> DecodeInputs:
    """The case under every schedule: the same bits, right ones, no bank conflicts. Returns what went in and out."""
    inputs = inputs or decode_inputs(case)
    fresh = inputs.out.clone()
    first: bytes | None = None
    for schedule, eager in EVERY_SCHEDULE:
        inputs.out.copy_(fresh)
        simulator = SimulatorLauncher(schedule, eager, 7, build, shared_limit)
        recording = RecordingLauncher(simulator)
        run_decode(case, inputs, recording)
        assert simulator.bank_conflicts == 0
        bits = inputs.out.view(torch.uint8).numpy().tobytes()
        if first is None:
            check_output(case, inputs)
            check_partitions(case, inputs, recording)
            first = bits
        assert bits == first, f"{schedule.name}, {'eager' if eager else 'lazy'} copies: other bits"
    return inputs


def check_output(case: DecodeCase, inputs: DecodeInputs) -> None:
    """Every row is right; tokens that are no row of any length were not written."""
    tolerance = attention_tolerance(case.dtype, inputs.values)
    rows = {token: row for row, token in enumerate(inputs.tokens) if case.seq_lens[row] > 0}
    for token in range(inputs.out.shape[0]):
        got = inputs.out[token].double()
        if token not in rows:
            assert torch.isnan(got).all(), f"token {token} is no row and was written"
            continue
        row = rows[token]
        want, _ = attention(
            inputs.q[token : token + 1], inputs.keys[row], inputs.values[row], case.scale, case.window, case.softcap
        )
        error = float((got - want[0]).abs().max())
        assert error <= tolerance, f"row {row} of {case.seq_lens[row]} tokens is off by {error:.2e} > {tolerance:.2e}"


def check_partitions(case: DecodeCase, inputs: DecodeInputs, recording: RecordingLauncher) -> None:
    """Each slot holds its item's own attention and the logarithm of its sum."""
    _, arguments = recording.launches[0] if recording.launches else (None, [None] * 3)
    partial_out, partial_lse = arguments[1], arguments[2]
    for row, begin, end, slot in inputs.plan.items.tolist():
        if slot < 0:
            continue
        assert isinstance(partial_out, torch.Tensor)
        assert isinstance(partial_lse, torch.Tensor)
        if case.window is not None:
            begin = max(begin, case.seq_lens[row] - case.window)
        keys, values = inputs.keys[row][begin:end], inputs.values[row][begin:end]
        q = inputs.q[inputs.tokens[row]][None]
        want, lse = attention(q, keys, values, case.scale, None, case.softcap)
        assert float((partial_out[slot].double() - want[0]).abs().max()) <= attention_tolerance(case.dtype, [values])
        scale = max(1.0, float(lse.abs().max()) * 1e-3)  # a logit of 1e4 has no more digits
        assert float((partial_lse[slot].double() - lse[0]).abs().max()) <= LSE_TOLERANCE * scale
