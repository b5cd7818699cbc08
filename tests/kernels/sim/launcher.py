"""The simulator's launcher: the same call as a device's, on CPU tensors.

Checks what a device takes on trust: the number of arguments, that each is a tensor or a scalar of the parameter's own
type, and (in the runtime) everything that runtime.cpp's header lists. A fault comes back as SimulatedFault.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch

from executor.backends.cuda.launch import Argument, Dimensions
from executor.backends.cuda.sources import KernelSource
from tests.kernels.sim.build import SimulatorBuild

_ERROR_BYTES = 2048
_PAGE = 4096
_MAX_PARAMETERS = 64

_TENSOR_NAMES = {
    torch.float32: "float",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.int32: "int",
    torch.int64: "long long",
    torch.uint8: "unsigned char",
    torch.bool: "bool",
}
_SCALAR_NAMES: dict[type, tuple[str, ...]] = {
    np.int32: ("int", "unsigned"),
    np.int64: ("long long", "long", "unsigned long long"),
    np.float32: ("float",),
}
_ALIASES = {"long": "long long", "unsigned": "int", "unsigned long long": "long long"}


class Schedule(IntEnum):
    """The order in which a block's warps, and a warp's lanes, run."""

    FORWARD = 0
    REVERSE = 1
    RANDOM = 2


class SimulatedFault(Exception):
    """A kernel did what a device would not forgive, or would leave to luck: says where and what."""


class Parameter(NamedTuple):
    """One parameter of a kernel's signature."""

    type_name: str
    is_pointer: bool


class _Dim3(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]


class _Launch(ctypes.Structure):
    """struct Launch of cusim.h."""

    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("grid", _Dim3),
        ("block", _Dim3),
        ("shared_bytes", ctypes.c_size_t),
        ("order", ctypes.c_int),
        ("eager", ctypes.c_int),
        ("seed", ctypes.c_uint64),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("error", ctypes.c_char_p),
        ("error_size", ctypes.c_size_t),
        ("fault_address", ctypes.POINTER(ctypes.c_size_t)),
        ("bank_conflicts", ctypes.POINTER(ctypes.c_uint64)),
    ]


@dataclass(frozen=True, slots=True)
class _Loaded:
    library: ctypes.CDLL
    parameters: tuple[Parameter, ...]


class SimulatorLauncher:
    """Runs kernels at once, on the calling thread. One launch at a time in a process."""

    def __init__(
        self,
        schedule: Schedule = Schedule.FORWARD,
        eager_copies: bool = False,
        seed: int = 1,
        build: SimulatorBuild | None = None,
        shared_limit: int = 227 << 10,
    ) -> None:
        self._schedule = schedule
        self._eager_copies = eager_copies
        self._seed = seed
        self._build = build or SimulatorBuild()
        self._shared_limit = shared_limit
        self._loaded: dict[KernelSource, _Loaded] = {}
        self._loading = threading.Lock()
        self.bank_conflicts = 0  # of ldmatrix, over all launches

    @property
    def shared_limit(self) -> int:
        return self._shared_limit

    def prepare(self, kernel: KernelSource, shared_bytes: int = 0) -> None:
        self._load(kernel)

    def launch(
        self,
        kernel: KernelSource,
        grid: Dimensions,
        block: Dimensions,
        shared_bytes: int,
        args: Sequence[Argument],
    ) -> None:
        loaded = self._load(kernel)
        _check_arguments(kernel, loaded.parameters, args)
        if shared_bytes > self._shared_limit:
            raise SimulatedFault(
                f"{kernel.name} asks for {shared_bytes} bytes of shared memory of {self._shared_limit}"
            )
        if 0 in grid:
            return
        values = [_boxed(argument) for argument in args]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        fault_address, bank_conflicts = ctypes.c_size_t(0), ctypes.c_uint64(0)
        what = _Launch(
            kernel.name.encode(),
            _Dim3(*grid),
            _Dim3(*block),
            shared_bytes,
            int(self._schedule),
            int(self._eager_copies),
            self._seed,
            addresses,
            ctypes.cast(error, ctypes.c_char_p),
            _ERROR_BYTES,
            ctypes.pointer(fault_address),
            ctypes.pointer(bank_conflicts),
        )
        if loaded.library.cusim_launch(ctypes.byref(what)) != 0:
            near = _nearest(fault_address.value, args) if fault_address.value else ""
            raise SimulatedFault(error.value.decode(errors="replace") + near)
        self.bank_conflicts += bank_conflicts.value

    def _load(self, kernel: KernelSource) -> _Loaded:
        with self._loading:
            if kernel not in self._loaded:
                library = ctypes.CDLL(str(self._build.kernel(kernel)))
                names = (ctypes.c_char_p * _MAX_PARAMETERS)()
                pointers = (ctypes.c_int * _MAX_PARAMETERS)()
                count = library.cusim_describe(names, pointers, _MAX_PARAMETERS)
                parameters = tuple(Parameter((names[i] or b"?").decode(), bool(pointers[i])) for i in range(count))
                self._loaded[kernel] = _Loaded(library, parameters)
            return self._loaded[kernel]


def _check_arguments(kernel: KernelSource, parameters: Sequence[Parameter], args: Sequence[Argument]) -> None:
    if len(args) != len(parameters):
        raise SimulatedFault(f"{kernel.name} takes {len(parameters)} arguments, {len(args)} given")
    for position, (parameter, argument) in enumerate(zip(parameters, args, strict=True)):
        if isinstance(argument, torch.Tensor):
            given = _TENSOR_NAMES[argument.dtype]
            fits = parameter.is_pointer and _ALIASES.get(parameter.type_name, parameter.type_name) in (given, "?")
            given += "*"
        elif argument is None:
            given, fits = "null", parameter.is_pointer
        else:
            if type(argument) not in _SCALAR_NAMES:
                raise TypeError(
                    f"{kernel.name}: argument {position} is a {type(argument).__name__}, not np.int32 or alike"
                )
            names = _SCALAR_NAMES[type(argument)]
            given, fits = names[0], not parameter.is_pointer and parameter.type_name in names
        if not fits:
            wanted = parameter.type_name + ("*" if parameter.is_pointer else "")
            raise SimulatedFault(f"{kernel.name}: argument {position} is {given}, its parameter {wanted}")


def _boxed(argument: Argument) -> ctypes.c_void_p | ctypes.c_int32 | ctypes.c_int64 | ctypes.c_float:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if argument is None:
        return ctypes.c_void_p(None)
    if isinstance(argument, np.int32):
        return ctypes.c_int32(int(argument))
    if isinstance(argument, np.int64):
        return ctypes.c_int64(int(argument))
    return ctypes.c_float(float(argument))


def _nearest(address: int, args: Sequence[Argument]) -> str:
    """Says which argument an address is just outside of, if any."""
    for position, argument in enumerate(args):
        if isinstance(argument, torch.Tensor):
            storage = argument.untyped_storage()
            begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
            if end <= address < end + _PAGE:
                return f", {address - end} bytes past the end of argument {position}"
            if begin - _PAGE <= address < begin:
                return f", {begin - address} bytes before argument {position}"
    return ""
