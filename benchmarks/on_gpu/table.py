"""What was measured, as lines for people and as rows for programs. Knows nothing of how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.on_gpu.costs import Cost


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this GPU did in this run, with nothing in the way."""

    copy_bytes_per_second: float  # read plus written
    gemm_flops_per_second: float  # bf16


@dataclass(frozen=True, slots=True)
class KernelLine:
    """One kernel at one size."""

    name: str
    size: str
    microseconds: float
    gigabytes_per_second: float | None  # of what memory bounds
    teraflops: float | None  # of what tensor cores bound
    share_of_ceiling: float
    target: str  # of docs/kernels.md; "" where there is none
    torch_microseconds: float | None  # scaled_dot_product_attention or torch's own op, on contiguous data


@dataclass(frozen=True, slots=True)
class ModelLine:
    """One way of running the whole model."""

    name: str
    size: str
    tokens_per_second: float
    milliseconds_per_step: float | None


def kernel_line(
    name: str,
    size: str,
    seconds: float,
    cost: Cost,
    ceilings: Ceilings,
    target: str = "",
    torch_seconds: float | None = None,
) -> KernelLine:
    """Rates by whichever ceiling bounds it: operations where there are any, else bytes."""
    if cost.num_flops:
        rate = cost.num_flops / seconds
        gigabytes, teraflops, share = None, rate / 1e12, rate / ceilings.gemm_flops_per_second
    else:
        rate = cost.num_bytes / seconds
        gigabytes, teraflops, share = rate / 1e9, None, rate / ceilings.copy_bytes_per_second
    other = None if torch_seconds is None else torch_seconds * 1e6
    return KernelLine(name, size, seconds * 1e6, gigabytes, teraflops, share, target, other)


def kernel_table(lines: Sequence[KernelLine]) -> str:
    rows = [
        (
            line.name,
            line.size,
            f"{line.microseconds:.1f}",
            f"{line.teraflops:.0f} TFLOP/s" if line.teraflops is not None else f"{line.gigabytes_per_second:.0f} GB/s",
            f"{line.share_of_ceiling:.0%}",
            "" if line.torch_microseconds is None else f"{line.torch_microseconds:.1f}",
            line.target,
        )
        for line in lines
    ]
    return aligned([("kernel", "size", "µs", "rate", "of ceiling", "torch µs", "target"), *rows])


def model_table(lines: Sequence[ModelLine]) -> str:
    rows = [
        (
            line.name,
            line.size,
            f"{line.tokens_per_second:.0f}",
            "" if line.milliseconds_per_step is None else f"{line.milliseconds_per_step:.2f}",
        )
        for line in lines
    ]
    return aligned([("run", "size", "tokens/s", "ms a step"), *rows])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns two spaces apart; the first two to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column < 2 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def as_rows(lines: Sequence[KernelLine | ModelLine]) -> list[dict[str, object]]:
    """For --json."""
    return [asdict(line) for line in lines]
