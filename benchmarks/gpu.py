"""What the CUDA kernels and the executor do on this machine's GPU: `python -m benchmarks.gpu [--json FILE]`.

One command, five minutes at most on an H200. In order: checks (every kernel compiled, the kernels' own test cases on
the device, compute-sanitizer where it is installed, graphs against the same steps without them), the two ceilings,
every kernel by graph replay over buffers that L2 cannot hold, and a model of Llama-3.1-8B's shape with random weights,
end to end, beside transformers' continuous batching on the same weights. Where there is no GPU it says so and ends with
code 1. docs/kernels.md says what the numbers are compared with.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from executor.backends.cuda import report as compile_report
from executor.backends.cuda.catalog import catalog
from executor.backends.cuda.compile import KernelCompiler
from executor.backends.cuda.device import Device, NoDevice, require_device

if TYPE_CHECKING:
    from benchmarks.on_gpu.table import Ceilings, KernelLine, ModelLine

PARTS = ("checks", "kernels", "model", "peer")
KERNEL_TESTS = tuple(
    f"test_{name}.py" for name in ("decode", "prefill", "rope", "norm", "activation", "sample", "cache_ops")
)
# Small cases of what has shared memory, copies in flight or atomics: the sanitizer slows a kernel down a hundredfold.
SANITIZED = (
    "test_decode.py::test_rows_scattered_among_other_tokens",
    "test_prefill.py::test_prefill_equals_float64[five heads]",
    "test_sample.py::test_forks_draw_from_the_row_of_their_parent",
    "test_norm.py::test_results_may_take_the_place_of_the_inputs",
)
_CHECK_SECONDS = 120
_ROOT = Path(__file__).resolve().parent.parent


@dataclass(slots=True)
class Report:
    """All that was found, for --json."""

    device: Device
    checks: dict[str, str] = field(default_factory=dict)  # what was checked: "passed", or what went wrong
    ceilings: Ceilings | None = None
    kernels: list[KernelLine] = field(default_factory=list)
    model: list[ModelLine] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return any(not found.startswith(("passed", "not run")) for found in self.checks.values())


def main(arguments: Sequence[str]) -> int:
    options = build_parser().parse_args(arguments)
    try:
        device = require_device()
    except NoDevice as missing:
        print(f"benchmarks.gpu: {str(missing).removeprefix('--device cuda: ')}; nothing is measured", file=sys.stderr)
        return 1
    began = time.perf_counter()
    report = Report(device)
    say(f"{device.name}: sm_{''.join(map(str, device.capability))}, {device.num_sms} multiprocessors")
    if "checks" in options.parts:
        run_checks(report)
    if "kernels" in options.parts:
        run_kernels(report)
    if "model" in options.parts:
        run_model(report, peer="peer" in options.parts)
    report.seconds = time.perf_counter() - began
    say(f"{report.seconds:.0f} s in all")
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    return 1 if report.failed else 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="Measures the kernels and the executor on this machine's GPU."
    )
    parser.add_argument(
        "--parts",
        type=_parts,
        default=PARTS,
        metavar="NAMES",
        help=f"of {','.join(PARTS)}; default all. The peer runs after the model, on the same weights",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    return parser


def _parts(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(PARTS)}")
    if "peer" in names and "model" not in names:
        raise argparse.ArgumentTypeError("the peer is compared with the model: name both")
    return names


def say(text: str) -> None:
    print(text, flush=True)


def kernel_test_command(tests: Sequence[str], mirror: str = "cuda") -> list[str]:
    """The kernels' own tests, by their names below tests/kernels, mirrored to the device."""
    pytest = [sys.executable, "-m", "pytest", "-p", "benchmarks.on_gpu.mirror", "--mirror", mirror]
    return [*pytest, "-p", "no:cacheprovider", *(f"tests/kernels/{test}" for test in tests)]


def sanitizer() -> str | None:
    """compute-sanitizer, if the machine has it."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def run_checks(report: Report) -> None:
    """Correctness on the device, in processes of their own: a kernel at fault takes its process's context with it."""
    report.checks["every kernel compiles for this GPU, none spills"] = _compiled(report.device)
    report.checks["the kernels' tests on the device"] = _passed(kernel_test_command(KERNEL_TESTS))
    found = sanitizer()
    if found is None:
        report.checks["compute-sanitizer"] = "not run: it is not installed"
    else:
        report.checks["compute-sanitizer"] = _passed([found, "--error-exitcode", "9", *kernel_test_command(SANITIZED)])
    for name, result in report.checks.items():
        say(f"{name}: {result}")


def _compiled(device: Device) -> str:
    """First, on all cores: what follows finds its cubins in the cache."""
    arch = "".join(map(str, device.capability))
    reports = compile_report.report(catalog(), [arch], KernelCompiler(), len(os.sched_getaffinity(0)))
    faults = [entry.kernel for entry in reports if entry.is_fault]
    return f"FAILED: {', '.join(faults)}" if faults else f"passed ({len(reports)} kernels)"


def _passed(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_CHECK_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"FAILED: not at its end after {_CHECK_SECONDS} s"
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    if done.returncode == 0:
        return f"passed ({last})"
    return f"FAILED with exit code {done.returncode}: {last}\n{done.stdout[-4000:]}{done.stderr[-1000:]}"


def run_kernels(report: Report) -> None:
    import torch

    from benchmarks.on_gpu import ceilings, kernels, table
    from benchmarks.on_gpu.timing import seconds_per_launch
    from executor.backends.cuda.launch import DeviceLauncher

    device = torch.device("cuda", torch.cuda.current_device())
    l2_bytes = int(torch.cuda.get_device_properties(device).L2_cache_size)
    report.ceilings = measured = ceilings.measure(device)
    copy, gemm = measured.copy_bytes_per_second, measured.gemm_flops_per_second
    say(f"ceilings: copy {copy / 1e9:.0f} GB/s, bf16 GEMM {gemm / 1e12:.0f} TFLOP/s; L2 {l2_bytes >> 20} MiB")
    place = kernels.Place(DeviceLauncher(device), device, report.device.num_sms, l2_bytes)
    for case in kernels.cases(place):
        seconds = seconds_per_launch(case.launches)
        other = None if case.torch_launches is None else seconds_per_launch(case.torch_launches)
        report.kernels.append(table.kernel_line(case.name, case.size, seconds, case.cost, measured, case.target, other))
        del case
        torch.cuda.empty_cache()
    say(table.kernel_table(report.kernels))


def run_model(report: Report, peer: bool) -> None:
    import torch

    from benchmarks.on_gpu import end_to_end, table
    from benchmarks.on_gpu.model import LLAMA_8B, RandomWeights
    from benchmarks.on_gpu.table import ModelLine
    from executor.backends.cuda.backend import CudaBackend
    from executor.backends.cuda.graphs import CudaGraphs, Rerun
    from executor.backends.cuda.launch import DeviceLauncher

    device = torch.device("cuda", torch.cuda.current_device())
    weights = RandomWeights(device, torch.bfloat16)
    load = end_to_end.Load()
    backend = CudaBackend(DeviceLauncher(device), device, torch.bfloat16, report.device.num_sms)
    with torch.inference_mode():
        decoder = end_to_end.build(LLAMA_8B, weights, backend, load)
        runner = end_to_end.runner_over(decoder, backend, load, CudaGraphs())
        for line in end_to_end.lines(runner, load):
            report.model.append(line)
        ours = end_to_end.whole_answers(runner, load)
        reruns = end_to_end.runner_over(decoder, backend, load, Rerun())
        different = end_to_end.replay_differs(runner, reruns)
    report.checks["graph replay equals the same step without a graph, 100 times"] = different or "passed"
    say(f"graph replay equals the same step without a graph: {different or 'passed, 100 replays'}")
    size = f"{load.peer_prompts} prompts of {load.peer_prompt_tokens}, {load.peer_new_tokens} new"
    report.model.append(ModelLine("answers", size, ours.tokens_per_second, None))
    if peer:
        del decoder, runner, reruns
        backend.release_kv_cache()
        torch.cuda.empty_cache()
        from benchmarks.on_gpu import peer as other

        model = other.build(LLAMA_8B, weights, device, torch.bfloat16)
        theirs = other.answer(model, load.peer_input(int(str(LLAMA_8B["vocab_size"]))), load.peer_new_tokens)
        report.model.append(ModelLine("answers, transformers", size, theirs.tokens_per_second, None))
    say(table.model_table(report.model))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
