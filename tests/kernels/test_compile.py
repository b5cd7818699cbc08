"""Compiling without a device: every architecture, no spills, cubins whole and cached by all that goes into them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from executor.backends.cuda import nvrtc
from executor.backends.cuda.attention_decode import DecodeShape, decode_launch
from executor.backends.cuda.catalog import catalog
from executor.backends.cuda.compile import ARCHITECTURES, KernelCompiler, Resources, parse_resources
from executor.backends.cuda.launch import boxed, shared_limit
from executor.backends.cuda.sources import KernelSource, inlined, kernel, source_directory

MERGE = kernel("merge_states", "merge_states.cu", SCALAR="bf16", HEAD_SIZE=64)
PREFERRED = (("SCALAR", "bf16"), ("KV", "bf16"), ("HEAD_SIZE", 128), ("BLOCK_SIZE", 16))


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> KernelCompiler:
    return KernelCompiler(tmp_path_factory.mktemp("cubins"))


def representative() -> list[KernelSource]:
    """Of each function in the catalogue the specialisation nearest to what most models take."""
    best: dict[str, KernelSource] = {}
    for source in catalog():
        fits = sum(constant in source.defines for constant in PREFERRED)
        kept = best.get(source.function)
        if kept is None or fits > sum(constant in kept.defines for constant in PREFERRED):
            best[source.function] = source
    return list(best.values())


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("source", representative(), ids=lambda source: source.function)
def test_compiles_without_spills(source: KernelSource, arch: str, compiler: KernelCompiler) -> None:
    compiled = compiler.compile(source, arch)
    assert compiled.resources.spill_bytes == 0
    assert 0 < compiled.resources.registers <= 255
    assert compiled.resources.shared_bytes <= 48 << 10


@pytest.mark.full
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("source", catalog(), ids=lambda source: source.name)
def test_the_whole_catalogue_compiles_without_spills(source: KernelSource, arch: str, compiler: KernelCompiler) -> None:
    assert compiler.compile(source, arch).resources.spill_bytes == 0


def test_a_cubin_is_whole_to_its_last_byte(compiler: KernelCompiler) -> None:
    cubin = compiler.compile(MERGE, "90").path.read_bytes()
    assert cubin[:4] == b"\x7fELF"
    section_headers, program_headers = struct.unpack_from("<Q", cubin, 40)[0], struct.unpack_from("<Q", cubin, 32)[0]
    program_size, program_count, section_size, section_count = struct.unpack_from("<HHHH", cubin, 54)
    ends = (section_headers + section_size * section_count, program_headers + program_size * program_count)
    assert len(cubin) == max(ends)


def test_a_kernel_is_compiled_once(compiler: KernelCompiler) -> None:
    first = compiler.compile(MERGE, "80")
    modified = first.path.stat().st_mtime_ns
    again = compiler.compile(MERGE, "80")
    assert again == first
    assert again.path.stat().st_mtime_ns == modified


def test_an_edited_header_is_another_cubin(compiler: KernelCompiler) -> None:
    text = (source_directory() / "common.cuh").read_text()
    edited = compiler.compile(MERGE, "80", {"common.cuh": text.replace("LN2 = 0.69", "LN2 = 0.70")})
    assert edited.path != compiler.compile(MERGE, "80").path


def test_a_constant_and_an_architecture_are_part_of_a_cubins_name(compiler: KernelCompiler) -> None:
    other = kernel("merge_states", "merge_states.cu", SCALAR="fp16", HEAD_SIZE=64)
    compiled = [compiler.compile(source, arch).path for source in (MERGE, other) for arch in ("80", "90")]
    assert len(set(compiled)) == 4


def test_a_source_that_does_not_compile_says_where(compiler: KernelCompiler) -> None:
    text = (source_directory() / MERGE.file).read_text().replace("const int row = ", "const int row == ")
    with pytest.raises(nvrtc.NvrtcError, match=r"merge_states\.cu\(\d+\): error"):
        compiler.compile(MERGE, "90", {MERGE.file: text})


def test_headers_are_inlined_once_and_lines_keep_their_numbers() -> None:
    text = inlined("a.cu", {"a.cu": '#include "b.cuh"\n#include "b.cuh"\nlast\n', "b.cuh": "#pragma once\nfirst\n"})
    assert text.splitlines() == ['#line 1 "a.cu"', '#line 1 "b.cuh"', "", "first", '#line 2 "a.cu"', "", "last"]


def test_resources_are_read_from_the_log() -> None:
    log = """ptxas info    : Function properties for decode
    8 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 105 registers, used 1 barriers, 2080 bytes smem, 480 bytes cmem[0]"""
    assert parse_resources(log) == Resources(registers=105, spill_bytes=32, shared_bytes=2080)


def test_a_log_without_resources_is_an_error() -> None:
    with pytest.raises(nvrtc.NvrtcError):
        parse_resources("ptxas info    : 0 bytes gmem")


def test_the_catalogue_names_each_kernel_once() -> None:
    names = [source.name for source in catalog()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 16, 32])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_catalogue_lists_what_decode_asks_for(arch: str, heads: int) -> None:
    shape = DecodeShape(2 * heads, 2, 128, 16, torch.bfloat16, torch.bfloat16)
    assert decode_launch(shape, shared_limit(arch)).source in catalog()


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_block_of_decode_fits_the_architecture(arch: str, kv_dtype: torch.dtype, head_size: int) -> None:
    launch = decode_launch(DecodeShape(8, 2, head_size, 16, torch.bfloat16, kv_dtype), shared_limit(arch))
    assert launch.shared_bytes <= shared_limit(arch)


def test_plain_numbers_are_no_kernel_arguments() -> None:
    with pytest.raises(TypeError, match="argument 1 is a int"):
        boxed([torch.zeros(1), 3])  # type: ignore[list-item]


def test_cuda_is_no_python_package() -> None:
    """From the repository's root it would shadow NVIDIA's own package `cuda`."""
    assert not (Path(source_directory()) / "__init__.py").exists()
