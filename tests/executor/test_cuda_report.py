"""`octavo kernels`: its table, its JSON, and the exit code where a kernel is at fault."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from executor.backends.cuda.compile import KernelCompiler
from executor.backends.cuda.report import KernelReport, build_parser, main, report, summary, table
from executor.backends.cuda.sources import kernel

FINE = KernelReport("norm[SCALAR=bf16]", "90", 40, 0, 128, 5000)
SPILLING = KernelReport("prefill", "120", 255, 16, 0, 90_000)
BROKEN = KernelReport("sample", "80", 0, 0, 0, 0, "sample.cu(3): error")
MERGE = kernel("merge_states", "merge_states.cu", SCALAR="bf16", HEAD_SIZE=64)


def test_the_table_has_a_line_for_each_kernel_and_architecture() -> None:
    assert table([FINE, SPILLING, BROKEN]).splitlines() == [
        "kernel             arch         registers  spills  shared  cubin",
        "norm[SCALAR=bf16]    90                40       0     128   5000",
        "prefill             120               255      16       0  90000",
        "sample               80  does not compile",
    ]


def test_the_summary_has_a_line_for_each_function_and_architecture() -> None:
    other = KernelReport("norm[SCALAR=fp32]", "90", 50, 0, 128, 6000)
    assert summary([FINE, other, SPILLING]).splitlines() == [
        "function  arch  variants  registers  spills  shared         cubin",
        "norm        90         2   40 to 50       0     128  5000 to 6000",
        "prefill    120         1        255      16       0         90000",
    ]


def test_json_rows_have_the_keys_that_were_promised() -> None:
    assert FINE.row() == {
        "kernel": "norm[SCALAR=bf16]",
        "arch": "90",
        "registers": 40,
        "spill_bytes": 0,
        "shared_bytes": 128,
        "cubin_bytes": 5000,
    }
    assert BROKEN.row()["failure"] == "sample.cu(3): error"


@pytest.mark.parametrize(("entry", "fault"), [(FINE, False), (SPILLING, True), (BROKEN, True)])
def test_spills_and_failures_are_faults(entry: KernelReport, fault: bool) -> None:
    assert entry.is_fault is fault


def test_kernels_are_compiled_without_a_device(tmp_path: Path) -> None:
    first, second = report([MERGE], ["80", "120"], KernelCompiler(tmp_path))
    assert (first.kernel, first.arch, second.arch) == ("merge_states[SCALAR=bf16,HEAD_SIZE=64]", "80", "120")
    assert all(entry.registers > 0 and entry.spill_bytes == 0 and entry.cubin_bytes > 1000 for entry in (first, second))


def test_a_kernel_that_does_not_compile_is_reported_with_the_log(tmp_path: Path) -> None:
    (entry,) = report(
        [kernel("merge_states", "merge_states.cu", SCALAR="bf16", HEAD_SIZE=63)], ["90"], KernelCompiler(tmp_path)
    )
    assert entry.failure is not None
    assert "four elements a thread" in entry.failure


def test_the_command_prints_json_and_ends_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "merge_states[SCALAR=fp32,HEAD_SIZE=64]"
    assert main(["--arch", "90", "--kernel", name, "--json", "--cache", str(tmp_path)]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["kernel"], row["arch"], row["spill_bytes"]) == (name, "90", 0)


def test_an_unknown_kernel_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kernel", "no such"]) == 1
    assert capsys.readouterr().err == "octavo kernels: no kernel's name holds 'no such'\n"


def test_all_architectures_are_compiled_unless_told_otherwise() -> None:
    assert build_parser().parse_args([]).arch == ("80", "86", "89", "90", "100", "120")
    assert build_parser().parse_args(["--arch", "sm_90a, 80"]).arch == ("90a", "80")


def test_a_wrong_architecture_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(["--arch", "hopper"])
    assert ended.value.code == 2
    assert "'hopper' is no architecture; write it as 90" in capsys.readouterr().err


def test_the_octavo_command_hands_over(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "octavo.cli", "kernels", "--arch", "80", "--kernel", MERGE.name, "--cache"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("kernel ")
    assert f"\n{MERGE.name}    80 " in done.stdout
