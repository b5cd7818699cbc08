"""Without a usable GPU, one sentence says what is missing; and a CPU executor never loads what belongs to a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from executor.backends.cuda.device import Findings, problem


@pytest.mark.parametrize(
    ("findings", "sentence"),
    [
        (Findings(driver=False), "this machine has no NVIDIA driver (libcuda.so.1 cannot be loaded)"),
        (Findings(driver_status=100, num_gpus=0), "the NVIDIA driver finds no GPU"),
        (Findings(num_gpus=0), "the NVIDIA driver finds no GPU"),
        (Findings(driver_status=999), "the NVIDIA driver does not start (cuInit returned 999)"),
        (Findings(torch_cuda=None), "the installed torch is a CPU build"),
        (Findings(has_cupy=False), "cupy is not installed; it comes with pip install 'octavo[cuda12]' (or cuda13)"),
        (Findings(torch_cuda="13.0", torch_sees_gpu=False), "torch, built for CUDA 13.0, cannot use the GPU"),
        (
            Findings(name="Tesla T4", capability=(7, 5)),
            "the GPU, Tesla T4, has compute capability 7.5; the kernels need 8.0 or later",
        ),
    ],
)
def test_what_is_missing_is_named(findings: Findings, sentence: str) -> None:
    found = problem(findings)
    assert found is not None
    assert found.startswith(f"--device cuda: {sentence}")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (12, 0)])
def test_ampere_and_later_will_do(capability: tuple[int, int]) -> None:
    assert problem(Findings(name="a GPU", capability=capability)) is None


def test_what_a_user_must_mend_first_comes_first() -> None:
    found = problem(Findings(driver=False, torch_cuda=None, has_cupy=False))
    assert found is not None
    assert "driver" in found
    assert "cupy" not in found


_NO_GPU = """
import ctypes, sys
try:
    ctypes.CDLL("libcuda.so.1")
except OSError:
    sys.exit(0)
sys.exit(1)
"""


def test_the_executor_says_so_and_ends_with_1() -> None:
    if subprocess.run([sys.executable, "-c", _NO_GPU]).returncode:
        pytest.skip("this machine has an NVIDIA driver")
    command = [sys.executable, "-P", "-m", "executor", "--device=cuda", "--port=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == (
        "octavo executor: --device cuda: this machine has no NVIDIA driver (libcuda.so.1 cannot be loaded)"
    )


def test_a_cpu_executor_loads_nothing_of_the_gpu() -> None:
    program = (
        "import sys; import executor.loading; from executor.backends.platform import open_platform; "
        "open_platform('cpu', 'float32', False); "
        "print([name for name in sys.modules if name.startswith('cupy') or name.startswith('executor.backends.cuda')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
