"""The shared library: where it lies, which instruction sets of it this CPU runs, and its structs as ctypes sees them.

Owns the mirror of interface.h, field by field, and nothing of tensors. The library has no state: the level and the
threads go in with each call. Its threads are those of torch's own OpenMP, reached through GOMP_parallel, so that the
two never wait for each other's cores; where torch has no such OpenMP, it computes on the calling thread.
"""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch


class Level(enum.IntEnum):
    """Instruction sets, each containing those before it."""

    BASELINE = 0
    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 3


class Format(enum.IntEnum):
    FLOAT32 = 0
    BFLOAT16 = 1


class Runtime(ctypes.Structure):
    _fields_ = (
        ("level", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("parallel", ctypes.c_void_p),
    )


class Batch(ctypes.Structure):
    _fields_ = (
        ("num_seqs", ctypes.c_int32),
        ("num_tokens", ctypes.c_int32),
        ("max_blocks", ctypes.c_int32),
        ("query_start_loc", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("slot_mapping", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
    )


class Cache(ctypes.Structure):
    _fields_ = (
        ("format", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("head_size", ctypes.c_int32),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
    )


class AttentionArguments(ctypes.Structure):
    _fields_ = (
        ("num_heads", ctypes.c_int32),
        ("sliding_window", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("may_split", ctypes.c_int32),
        ("queries", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


class RopeArguments(ctypes.Structure):
    _fields_ = (
        ("num_heads", ctypes.c_int32),
        ("norm_eps", ctypes.c_float),
        ("qkv", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("queries", ctypes.c_void_p),
    )


class NormArguments(ctypes.Structure):
    _fields_ = (
        ("format", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("x", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("total", ctypes.c_void_p),
    )


class SiluArguments(ctypes.Structure):
    _fields_ = (
        ("format", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("gate_up", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


class LargestArguments(ctypes.Structure):
    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("rows", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
    )


class QuantizedArguments(ctypes.Structure):
    _fields_ = (
        ("format", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("in_features", ctypes.c_int32),
        ("out_features", ctypes.c_int32),
        ("x", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class Library:
    """The library, opened."""

    calls: ctypes.CDLL
    levels: tuple[Level, ...]  # what this CPU runs, lowest first
    parallel: int | None  # address of GOMP_parallel


class NoLibrary(Exception):
    """The native kernels cannot be used; the message says why."""


def open_library() -> Library:
    """Raises NoLibrary where it was not built or does not load."""
    path = _find()
    try:
        calls = ctypes.CDLL(str(path))
    except OSError as error:
        raise NoLibrary(f"{path} does not load: {error}") from error
    calls.octavo_supports.argtypes = (ctypes.c_int32,)
    for name, arguments in (
        ("octavo_attention", (Runtime, Batch, Cache, AttentionArguments)),
        ("octavo_rope", (Runtime, Batch, Cache, RopeArguments)),
        ("octavo_norm", (Runtime, NormArguments)),
        ("octavo_silu_mul", (Runtime, SiluArguments)),
        ("octavo_largest", (Runtime, LargestArguments)),
        ("octavo_quantized_linear", (Runtime, QuantizedArguments)),
    ):
        call = calls[name]
        call.argtypes = tuple(ctypes.POINTER(argument) for argument in arguments)
        call.restype = None
    levels = tuple(level for level in Level if calls.octavo_supports(level))
    return Library(calls, levels, _openmp_of_torch())


def _find() -> Path:
    folder = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"_kernels{suffix}"
        if path.is_file():
            return path
    raise NoLibrary("the native kernels were not built: the install found no C++ compiler")


def _openmp_of_torch() -> int | None:
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        # Already loaded, by torch: this finds that very library, and with it torch's team of threads.
        return ctypes.cast(ctypes.CDLL(str(path)).GOMP_parallel, ctypes.c_void_p).value
    return None
