"""The GPU benchmark, as far as it goes without one: formulas, tables, flags, its refusal; and each kernel's case and
the end-to-end runs at small sizes, in the simulator."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import KERNEL_TESTS, PARTS, SANITIZED, build_parser, kernel_test_command
from benchmarks.on_gpu import costs, end_to_end, kernels
from benchmarks.on_gpu.costs import AttentionShape, Cost
from benchmarks.on_gpu.model import LLAMA_8B, RandomWeights
from benchmarks.on_gpu.steps import Session
from benchmarks.on_gpu.table import Ceilings, ModelLine, as_rows, kernel_line, kernel_table, model_table
from executor.backends.cuda.graphs import Rerun
from executor.launched import Finished
from executor.plan import BatchPlan, StepResult
from tests.executor.factories import create_limits
from tests.executor.simulated import SimulatedBackend
from tests.kernels.sim.launcher import SimulatorLauncher

ROOT = Path(__file__).resolve().parents[2]
LLAMA = AttentionShape(num_heads=32, num_kv_heads=8, head_size=128, item_bytes=2, kv_item_bytes=2)
CEILINGS = Ceilings(copy_bytes_per_second=4e12, gemm_flops_per_second=800e12)


def test_decode_reads_every_key_and_value_once() -> None:
    assert costs.decode(LLAMA, [4096] * 64) == Cost(64 * 4096 * 4096 + 64 * 2 * 32 * 128 * 2)


def test_causal_prefill_counts_visible_pairs_alone() -> None:
    assert costs.prefill(LLAMA, [(0, 3)]).num_flops == 4 * 32 * 128 * (1 + 2 + 3)
    assert costs.prefill(LLAMA, [(10, 2)]).num_flops == 4 * 32 * 128 * (11 + 12)


def test_a_square_product_costs_two_operations_for_each_pair() -> None:
    assert costs.gemm(8, 8, 8, 2) == Cost(3 * 64 * 2, 1024)


@pytest.mark.parametrize(("num_bytes", "copies"), [(1, 64), (50 << 20, 3), (200 << 20, 2), (1 << 40, 2)])
def test_buffers_taken_in_turn_are_beyond_l2(num_bytes: int, copies: int) -> None:
    assert costs.copies_beyond(50 << 20, num_bytes) == copies


def test_a_kernel_is_measured_against_the_ceiling_that_bounds_it() -> None:
    bound_by_memory = kernel_line("norm", "4096", 1e-3, Cost(3_600_000_000), CEILINGS, "≥ 88 %")
    assert (bound_by_memory.gigabytes_per_second, bound_by_memory.teraflops) == (3600.0, None)
    assert bound_by_memory.share_of_ceiling == pytest.approx(0.9)
    bound_by_products = kernel_line("prefill", "8192", 1e-3, Cost(1, 400_000_000_000), CEILINGS, torch_seconds=2e-3)
    assert bound_by_products.share_of_ceiling == pytest.approx(0.5)
    assert kernel_table([bound_by_memory, bound_by_products]).splitlines() == [
        "kernel   size      µs         rate  of ceiling  torch µs  target",
        "norm     4096  1000.0    3600 GB/s         90%            ≥ 88 %",
        "prefill  8192  1000.0  400 TFLOP/s         50%    2000.0",
    ]


def test_runs_of_the_model_are_a_table_and_rows() -> None:
    lines = [ModelLine("decode", "batch 1", 151.4, 6.604), ModelLine("answers", "64 prompts", 9000, None)]
    assert model_table(lines).splitlines() == [
        "run      size        tokens/s  ms a step",
        "decode   batch 1          151       6.60",
        "answers  64 prompts      9000",
    ]
    assert as_rows(lines)[0]["tokens_per_second"] == 151.4


def test_all_parts_run_unless_told_otherwise() -> None:
    assert build_parser().parse_args([]).parts == PARTS
    assert build_parser().parse_args(["--parts", "kernels"]).parts == ("kernels",)


@pytest.mark.parametrize(("parts", "sentence"), [("kernel", "'kernel' is none of"), ("peer", "name both")])
def test_a_wrong_part_is_refused(parts: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(["--parts", parts])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def test_the_kernels_tests_that_are_mirrored_exist() -> None:
    command = kernel_test_command(KERNEL_TESTS)
    assert command[3:7] == ["-p", "benchmarks.on_gpu.mirror", "--mirror", "cuda"]
    assert all((ROOT / file).is_file() for file in command[-len(KERNEL_TESTS) :])


def test_without_a_gpu_it_refuses_with_a_sentence() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("benchmarks.gpu: ")
    assert done.stderr.endswith("; nothing is measured\n")
    assert len(done.stderr.splitlines()) == 1


def test_mirrored_launches_write_what_the_simulator_writes() -> None:
    """Of each kind of case one: what a case asks of its launcher, the mirror must have too."""
    little_memory = "test_prefill.py::test_a_device_with_too_little_shared_memory_is_named"
    command = kernel_test_command([*SANITIZED, little_memory], mirror="simulated")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


SMALL = kernels.Sizes(
    context=70,
    batch=3,
    prompt=40,
    chunk=9,
    num_heads=4,
    many_heads=8,
    num_kv_heads=2,
    head_size=64,
    tokens=5,
    hidden=64,
    inner=96,
    vocab=200,
    blocks_to_copy=2,
    layers_to_copy=2,
)


def test_every_case_launches_its_kernel() -> None:
    place = kernels.Place(SimulatorLauncher(), torch.device("cpu"), num_sms=4, l2_bytes=1)
    names = []
    for case in kernels.cases(place, SMALL):
        names.append(case.name)
        assert case.cost.num_bytes > 0
        for launch in (case.launches[0], *(case.torch_launches or [])[:1]):
            launch()
    assert names == [
        *["decode"] * 3,
        "decode_simt",
        "merge_states",
        *["prefill"] * 2,
        *["rope_kv_write"] * 2,
        "rms_norm",
        "silu_mul",
        "sample",
        "copy_blocks",
        "gather_rows",
    ]


@pytest.mark.parametrize("index", [0, 5, 6])
def test_torch_beside_a_kernel_does_the_same_work(index: int) -> None:
    """Its keys lie in one piece, so results are other; their shapes are the same."""
    place = kernels.Place(SimulatorLauncher(), torch.device("cpu"), num_sms=4, l2_bytes=1)
    case = list(kernels.cases(place, SMALL))[index]
    assert case.torch_launches is not None
    attended = case.torch_launches[0]()
    assert isinstance(attended, torch.Tensor)
    assert attended.numel() == {0: 3 * 8 * 64, 5: 40 * 4 * 64, 6: 9 * 4 * 64}[index]


TINY = {
    **LLAMA_8B,
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
TINY_LOAD = end_to_end.Load(
    batches=(1, 3),
    context=20,
    decode_steps=2,
    prompts=(24, 10),
    budget=16,
    mixed_batch=2,
    mixed_chunk=5,
    mixed_steps=2,
    peer_prompts=2,
    peer_prompt_tokens=9,
    peer_new_tokens=3,
)


def test_the_whole_end_to_end_run_on_a_tiny_shape() -> None:
    backend = SimulatedBackend(torch.float32)
    decoder = end_to_end.build(TINY, RandomWeights(torch.device("cpu"), torch.float32), backend, TINY_LOAD)
    runner = end_to_end.runner_over(decoder, backend, TINY_LOAD, Rerun())
    lines = list(end_to_end.lines(runner, TINY_LOAD))
    assert [(line.name, line.size) for line in lines] == [
        ("decode", "batch 1 at 20"),
        ("decode", "batch 3 at 20"),
        ("prefill", "1 x 24"),
        ("prefill", "1 x 10"),
        ("mixed", "2 at 20 + chunk 5"),
    ]
    assert end_to_end.whole_answers(runner, TINY_LOAD).num_tokens == 6
    again = end_to_end.runner_over(decoder, backend, TINY_LOAD, Rerun())
    assert end_to_end.replay_differs(runner, again, num_replays=3) is None


def test_weights_are_the_same_for_the_peer() -> None:
    first, second = (RandomWeights(torch.device("cpu"), torch.float32) for _ in range(2))
    assert torch.equal(first.take("a", (3, 4)), second.take("a", (3, 4)))
    assert not torch.equal(first.take("a", (3, 4)), first.take("b", (3, 4)))


class AnyRunner:
    """Takes every plan."""

    def __init__(self) -> None:
        self.limits = create_limits(num_blocks=200)
        self.plans: list[BatchPlan] = []

    def reset(self) -> None:
        self.plans.clear()

    def can_follow(self, plan: BatchPlan) -> bool:
        return True

    def launch(self, plan: BatchPlan) -> Finished:
        self.plans.append(plan)
        return Finished(StepResult(plan.step_id))


def test_plans_are_counted_and_timed() -> None:
    ticks = iter([10.0, 12.0])
    runner = AnyRunner()
    measured = Session(runner, clock=lambda: next(ticks)).decode(batch=4, context=9, num_steps=5, warm_steps=1)
    assert (measured.num_tokens, measured.num_steps, measured.seconds) == (20, 5, 2.0)
    assert (measured.tokens_per_second, measured.milliseconds_per_step) == (10.0, 400.0)
    assert [plan.step_id for plan in runner.plans] == [1, 2, 3, 4, 5, 6, 7]
    assert [len(plan.new) for plan in runner.plans] == [4, 0, 0, 0, 0, 0, 0]
