"""Which GPU there is, and if none can be used, the one sentence that says why.

Owns the questions to the driver (libcuda by ctypes, so that they can be asked with no CUDA package installed), to torch
and to cupy, and the order in which answers matter: what a user must mend first comes first. Imports neither torch nor
cupy before it knows that there is a driver.
"""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import dataclass

from executor.backends.platform import PlatformError

MIN_CAPABILITY = (8, 0)  # cp.async, bf16 mma
_INSTALL = "pip install 'octavo[cuda12]' (or cuda13), in an environment without the other one"


class NoDevice(PlatformError):
    """There is no GPU that the kernels can run on; the message is a sentence for the user."""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU that can be used."""

    name: str
    capability: tuple[int, int]
    num_sms: int
    total_memory: int  # bytes


@dataclass(frozen=True, slots=True)
class Findings:
    """What was asked, in order. A field is meaningless where an earlier one is the problem."""

    driver: bool = True  # libcuda.so.1 can be loaded
    driver_status: int = 0  # what cuInit returned, 0 is success
    num_gpus: int = 1
    torch_cuda: str | None = "12.8"  # CUDA version that torch was built for; None: a CPU build
    torch_sees_gpu: bool = True
    has_cupy: bool = True
    name: str = ""
    capability: tuple[int, int] = MIN_CAPABILITY


_NO_DEVICE_STATUS = 100  # CUDA_ERROR_NO_DEVICE


def problem(findings: Findings) -> str | None:
    """Why the CUDA backend cannot run here, in a sentence; None if it can."""
    if not findings.driver:
        return "--device cuda: this machine has no NVIDIA driver (libcuda.so.1 cannot be loaded)"
    if findings.driver_status == _NO_DEVICE_STATUS or (findings.driver_status == 0 and findings.num_gpus == 0):
        return "--device cuda: the NVIDIA driver finds no GPU (is CUDA_VISIBLE_DEVICES empty?)"
    if findings.driver_status:
        return f"--device cuda: the NVIDIA driver does not start (cuInit returned {findings.driver_status})"
    if findings.torch_cuda is None:
        return f"--device cuda: the installed torch is a CPU build; a CUDA build comes with {_INSTALL}"
    if not findings.has_cupy:
        return f"--device cuda: cupy is not installed; it comes with {_INSTALL}"
    if not findings.torch_sees_gpu:
        return (
            f"--device cuda: torch, built for CUDA {findings.torch_cuda}, cannot use the GPU; the NVIDIA driver is "
            "probably older than that"
        )
    if findings.capability < MIN_CAPABILITY:
        return (
            f"--device cuda: the GPU, {findings.name}, has compute capability {_dotted(findings.capability)}; the "
            f"kernels need {_dotted(MIN_CAPABILITY)} or later"
        )
    return None


def require_device() -> Device:
    """The GPU to run on. Raises NoDevice."""
    sentence = problem(_ask())
    if sentence is not None:
        raise NoDevice(sentence)
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Device(
        properties.name,
        (properties.major, properties.minor),
        properties.multi_processor_count,
        properties.total_memory,
    )


def _ask() -> Findings:
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Findings(driver=False)
    status = libcuda.cuInit(0)
    count = ctypes.c_int(0)
    if status == 0:
        status = libcuda.cuDeviceGetCount(ctypes.byref(count))
    if status or count.value == 0:
        return Findings(driver_status=status, num_gpus=count.value)
    import torch

    found = Findings(
        num_gpus=count.value,
        torch_cuda=torch.version.cuda,
        has_cupy=importlib.util.find_spec("cupy") is not None,
        torch_sees_gpu=torch.cuda.is_available(),
    )
    if not found.torch_sees_gpu:
        return found
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Findings(
        num_gpus=found.num_gpus,
        torch_cuda=found.torch_cuda,
        has_cupy=found.has_cupy,
        name=properties.name,
        capability=(properties.major, properties.minor),
    )


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
