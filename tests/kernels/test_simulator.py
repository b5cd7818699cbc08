"""The simulator finds what it is for: each test runs a small kernel with one fault, or with one thing to compute."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from executor.backends.cuda.launch import Argument
from executor.backends.cuda.sources import KernelSource
from tests.kernels.sim import Schedule, SimulatedFault, SimulatorBuild, SimulatorLauncher, guarded

PROBE = KernelSource("probe", "probe.cu")


def run(
    body: str,
    args: Sequence[Argument],
    parameters: str = "float* x, int n",
    grid: tuple[int, int, int] = (1, 1, 1),
    threads: int = 32,
    shared_bytes: int = 0,
    schedule: Schedule = Schedule.FORWARD,
    eager: bool = False,
) -> None:
    """Launches a kernel of these statements."""
    text = f'#include "common.cuh"\nextern "C" __global__ void probe({parameters}) {{\n{body}\n}}\n'
    launcher = SimulatorLauncher(schedule, eager, build=SimulatorBuild(replaced={PROBE.file: text}))
    launcher.launch(PROBE, grid, (threads, 1, 1), shared_bytes, args)


def floats(count: int) -> torch.Tensor:
    return guarded(torch.zeros(count))


def fault_of(body: str, threads: int = 32, count: int = 64, shared_bytes: int = 0, eager: bool = False) -> str:
    """What the launch of these statements is refused with."""
    with pytest.raises(SimulatedFault) as caught:
        run(body, [floats(count), np.int32(count)], threads=threads, shared_bytes=shared_bytes, eager=eager)
    return str(caught.value)


def test_a_fault_names_kernel_block_and_thread() -> None:
    x = floats(64)
    with pytest.raises(SimulatedFault, match=r"^probe, block \(2, 1, 0\), thread \(5, 0, 0\) \(warp 0, lane 5\)"):
        run(
            "if (blockIdx.x == 2 && blockIdx.y == 1 && threadIdx.x == 5) x[n] = 1.0f;",
            [x, np.int32(64)],
            grid=(3, 2, 1),
        )


def test_a_read_past_the_end_names_the_argument() -> None:
    assert fault_of("x[0] = x[n + 1];").endswith("4 bytes past the end of argument 0")


def test_a_fault_leaves_the_process_able_to_launch() -> None:
    fault_of("x[n] = 1.0f;")
    x = floats(32)
    run("x[threadIdx.x] = float(n);", [x, np.int32(7)])
    assert x.tolist() == [7.0] * 32


def test_a_thread_that_ends_before_a_barrier_of_its_block() -> None:
    fault = fault_of("if (threadIdx.x == 3) return; __syncthreads();", threads=64)
    assert "deadlock: thread 0 at __syncthreads at probe.cu:3, thread 3 at its end" in fault


def test_threads_at_different_barriers() -> None:
    assert "meet at different barriers" in fault_of(
        "if (threadIdx.x < 32)\n__syncthreads();\nelse\n__syncthreads();", 64
    )


def test_a_shuffle_that_half_of_its_mask_never_reaches() -> None:
    assert "a lane in the mask has ended" in fault_of("if (threadIdx.x >= 16) x[0] = __shfl_xor_sync(~0u, x[1], 1);")


def test_a_lane_outside_its_own_mask() -> None:
    assert "not in its own mask" in fault_of("x[0] = __shfl_xor_sync(0xffu, x[1], 1);")


def test_lanes_that_name_different_masks() -> None:
    assert "different masks" in fault_of("__syncwarp(threadIdx.x == 0 ? 0x7fffffffu : ~0u);")


def test_lanes_at_different_operations() -> None:
    body = "if (threadIdx.x < 16) __syncwarp(); else x[0] = __shfl_xor_sync(~0u, x[1], 1);"
    assert "different operations" in fault_of(body)


def test_a_shuffle_that_reads_outside_its_mask() -> None:
    assert "outside its mask" in fault_of("if (threadIdx.x < 16) x[0] = __shfl_sync(0xffffu, x[1], 20);")


def test_lanes_that_do_not_exist() -> None:
    assert "does not exist" in fault_of("__syncwarp();", threads=16)


def test_dynamic_shared_memory_ends_at_a_page_that_faults() -> None:
    assert "outside of an allocation" in fault_of("DYN_SMEM(float, s); s[n] = 1.0f;", shared_bytes=256)


def test_ldmatrix_of_a_row_not_aligned() -> None:
    body = "DYN_SMEM(char, s); uint32_t r[4]; ptx::ldmatrix_x4(r, s + 8); x[0] = float(r[0]);"
    assert "last at ldmatrix: address in shared memory not aligned" in fault_of(body, shared_bytes=512)


def test_ldmatrix_of_memory_that_is_not_shared() -> None:
    body = "uint32_t r[4]; ptx::ldmatrix_x4(r, x); x[0] = float(r[0]);"
    assert "outside of the block's shared memory" in fault_of(body)


def test_a_thread_that_ends_with_copies_under_way() -> None:
    body = "DYN_SMEM(float, s); ptx::cp_async16(s + threadIdx.x * 4, x); ptx::cp_async_commit();"
    assert "copies under way" in fault_of(body, shared_bytes=512)


COPY = """DYN_SMEM(float, s);
ptx::cp_async16(s + threadIdx.x * 4, x + threadIdx.x * 4, threadIdx.x != 1);
ptx::cp_async_commit();
const float early = s[threadIdx.x * 4];
ptx::cp_async_wait<0>();
x[threadIdx.x * 4] = early;
x[threadIdx.x * 4 + 1] = s[threadIdx.x * 4];"""


def copied(eager: bool) -> torch.Tensor:
    x = guarded(torch.full((128,), 5.0))
    run(COPY, [x, np.int32(0)], shared_bytes=512, eager=eager)
    return x.view(32, 4)


def test_lazy_copies_land_when_waited_for() -> None:
    x = copied(eager=False)
    assert torch.isnan(x[:, 0]).all()
    assert x[:, 1].tolist() == [5.0, 0.0] + [5.0] * 30  # what is not valid becomes zeros


def test_eager_copies_land_when_issued() -> None:
    assert copied(eager=True)[:, 0].tolist() == [5.0, 0.0] + [5.0] * 30


def test_shared_memory_is_poisoned_before_each_block() -> None:
    x = floats(4)
    body = """__shared__ float s[1];
    DYN_SMEM(float, d);
    x[blockIdx.x * 2] = s[0];
    x[blockIdx.x * 2 + 1] = d[0];
    s[0] = d[0] = 1.0f;"""
    run(body, [x, np.int32(0)], grid=(2, 1, 1), threads=1, shared_bytes=128)
    assert torch.isnan(x).all()


def test_results_show_the_order_that_a_missing_barrier_leaves_open() -> None:
    seen = set()
    for schedule in Schedule:
        x = floats(1)
        run("x[0] = float(threadIdx.x);", [x, np.int32(0)], threads=64, schedule=schedule)
        seen.add(float(x[0]))
    assert {63.0, 0.0} <= seen


@pytest.mark.parametrize("schedule", list(Schedule))
def test_barriers_hold_under_every_schedule(schedule: Schedule) -> None:
    x = floats(96)
    body = """__shared__ int s[96];
    s[threadIdx.x] = threadIdx.x;
    __syncthreads();
    x[threadIdx.x] = float(s[95 - threadIdx.x] + 100 * __syncthreads_count(threadIdx.x < 40));"""
    run(body, [x, np.int32(0)], threads=96, schedule=schedule)
    assert x.tolist() == [4000.0 + 95 - i for i in range(96)]


def test_ldmatrix_and_mma_multiply_matrices() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).to(torch.float16) for shape in ((16, 16), (8, 16)))
    d = floats(128)
    body = """DYN_SMEM(fp16, s);
    for (int i = threadIdx.x; i < 256; i += 32) s[i] = a[i];
    for (int i = threadIdx.x; i < 128; i += 32) s[256 + i] = b[i];
    __syncwarp();
    uint32_t fa[4], fb[2];
    float fd[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const int lane = threadIdx.x;
    ptx::ldmatrix_x4(fa, s + lane % 16 * 16 + lane / 16 * 8);
    ptx::ldmatrix_x2(fb, s + 256 + lane % 8 * 16 + lane / 8 % 2 * 8);
    ptx::mma_m16n8k16<fp16>(fd, fa, fb[0], fb[1]);
    for (int e = 0; e < 4; e++) d[(lane / 4 + e / 2 * 8) * 8 + lane % 4 * 2 + e % 2] = fd[e];"""
    run(body, [d, guarded(a), guarded(b)], "float* d, const fp16* a, const fp16* b", shared_bytes=1024)
    torch.testing.assert_close(d.view(16, 8), a.float() @ b.float().T, rtol=1e-6, atol=1e-5)


def test_fp8_of_every_bf16() -> None:
    x = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    x = x[~torch.isnan(x)]
    codes = guarded(torch.zeros(len(x), dtype=torch.float8_e4m3fn))
    body = "for (int i = threadIdx.x; i < n; i += 32) codes[i] = from_float<fp8>(to_float(x[i]));"
    run(body, [codes, guarded(x), np.int32(len(x))], "fp8* codes, const bf16* x, int n")
    want = x.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(codes.view(torch.uint8), want.view(torch.uint8))


def test_floats_of_every_fp8() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    y = floats(256)
    body = "for (int i = threadIdx.x; i < 256; i += 32) y[i] = to_float(codes[i]);"
    run(body, [y, guarded(codes)], "float* y, const fp8* codes")
    real = ~torch.isnan(codes.float())
    assert torch.equal(y[real], codes.float()[real])


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_formats_round_as_torch_does(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 5, 4096)
    y = guarded(torch.zeros(4096, dtype=dtype))
    body = f"for (int i = threadIdx.x; i < 4096; i += 32) y[i] = from_float<{name}>(x[i]);"
    run(body, [y, guarded(x)], f"{name}* y, const float* x")
    assert torch.equal(y.view(torch.int16), x.to(dtype).view(torch.int16))


@pytest.mark.parametrize(("pitch", "conflicts"), [(8, 7), (9, 0)])
def test_rows_of_ldmatrix_on_the_same_banks_are_counted(pitch: int, conflicts: int) -> None:
    text = """#include "ptx.cuh"
    extern "C" __global__ void probe(float* x, int pitch) {
        DYN_SMEM(uint4, s);
        uint32_t r[2];
        ptx::ldmatrix_x2(r, s + threadIdx.x % 8 * pitch);
    }"""
    launcher = SimulatorLauncher(build=SimulatorBuild(replaced={PROBE.file: text}))
    launcher.launch(PROBE, (1, 1, 1), (32, 1, 1), 2048, [floats(1), np.int32(pitch)])
    assert launcher.bank_conflicts == 2 * conflicts  # two matrices of the same rows


def test_an_empty_grid_launches_nothing() -> None:
    run("x[n] = 1.0f;", [floats(1), np.int32(1)], grid=(0, 1, 1))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([floats(1)], "takes 2 arguments, 1 given"),
        ([np.int32(1), np.int32(1)], r"argument 0 is int, its parameter float\*"),
        ([floats(1).int(), np.int32(1)], r"argument 0 is int\*, its parameter float\*"),
        ([floats(1), np.float32(1)], "argument 1 is float, its parameter int"),
        ([floats(1), np.int64(1)], "argument 1 is long long, its parameter int"),
        ([floats(1), None], "argument 1 is null, its parameter int"),
    ],
)
def test_arguments_are_checked_against_the_signature(args: Sequence[Argument], message: str) -> None:
    with pytest.raises(SimulatedFault, match=message):
        run("x[0] = float(n);", args)


def test_a_plain_number_is_refused() -> None:
    with pytest.raises(TypeError, match="argument 1 is a int"):
        run("x[0] = float(n);", [floats(1), 1])  # type: ignore[list-item]


@pytest.mark.parametrize("limit", ["threads", "shared memory", "both kinds of shared memory", "grid"])
def test_what_no_device_launches(limit: str) -> None:
    x: list[Argument] = [floats(1), np.int32(1)]
    shared_bytes = {"shared memory": 228 << 10, "both kinds of shared memory": 226 << 10}.get(limit, 0)
    with pytest.raises(SimulatedFault):
        run(
            "__shared__ volatile float s[512]; s[threadIdx.x] = x[0];" if limit.startswith("both") else "",
            x,
            threads=1025 if limit == "threads" else 32,
            shared_bytes=shared_bytes,
            grid=(1, 65536, 1) if limit == "grid" else (1, 1, 1),
        )


def test_the_sanitizer_traps_undefined_behaviour() -> None:
    text = 'extern "C" __global__ void probe(int* x, int n) { x[0] = x[0] << n; }\n'
    build = SimulatorBuild(replaced={PROBE.file: text}, sanitize=True)
    x = torch.ones(1, dtype=torch.int32)
    with pytest.raises(SimulatedFault, match="undefined behaviour"):
        SimulatorLauncher(build=build).launch(PROBE, (1, 1, 1), (1, 1, 1), 0, [x, np.int32(40)])
