"""The table of flags says what both processes' --help says, and the README prints that table."""

from __future__ import annotations

import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from octavo.cli.flags import EXECUTOR, SCHEDULER, Flag, given, served, table
from octavo.cli.parser import build_parser

README = Path(__file__).resolve().parent.parent / "README.md"
TABLES = {"executor": EXECUTOR, "scheduler": SCHEDULER}


def help_by_flag(process: str) -> dict[str, str]:
    """What the process says about each of its flags, in the order in which it does."""
    command = [sys.executable, "-P", "-m", process, "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    parts = re.split(r"^  (--[a-z-]+)", text, flags=re.MULTILINE)[1:]
    return {name: " ".join(words.split()) for name, words in zip(parts[::2], parts[1::2], strict=True)}


@pytest.mark.parametrize("process", TABLES)
def test_the_table_has_the_flags_of_the_process(process: str) -> None:
    assert sorted(flag.name for flag in TABLES[process]) == sorted(help_by_flag(process))


@pytest.mark.parametrize("process", TABLES)
def test_the_table_has_the_defaults_of_the_process(process: str) -> None:
    told = help_by_flag(process)
    wrong = [
        flag.name
        for flag in TABLES[process]
        if flag.default is not None and not re.search(rf"default:? {re.escape(flag.default)}(\W|$)", told[flag.name])
    ]
    assert wrong == []


@pytest.mark.parametrize("process", TABLES)
def test_the_readme_prints_the_table(process: str) -> None:
    assert table(TABLES[process]) in README.read_text()


def test_what_serve_is_given_goes_to_each_process_that_knows_it() -> None:
    values = build_parser("0").parse_args(
        ["serve", "--model", "m", "--deterministic", "--port", "1", "--log-level", "debug", "--pipeline-depth", "3"]
    )
    assert given(EXECUTOR, values) == ["--model=m", "--deterministic", "--log-level=debug"]
    assert given(SCHEDULER, values) == ["--port=1", "--pipeline-depth=3", "--log-level=debug"]


def test_what_serve_is_not_given_goes_nowhere() -> None:
    values = build_parser("0").parse_args(["serve"])
    assert given(EXECUTOR, values) == given(SCHEDULER, values) == []


def test_an_empty_value_is_passed_on_for_the_process_to_refuse() -> None:
    assert given(EXECUTOR, Namespace(model="")) == ["--model="]


def test_serve_takes_every_flag_but_those_it_sets_itself() -> None:
    everything = {flag.name for flag in (*EXECUTOR, *SCHEDULER)}
    own = {"--executors", "--fingerprint", "--exit-with-parent", "--exit-on-executor-loss", "--scheduler-name"}
    own |= {f"--executor-tls-{what}" for what in ("ca", "cert", "key", "name")}  # its two processes share a machine
    assert {flag.name for flag in served()} == everything - own


def test_a_switch_takes_no_value_in_the_table() -> None:
    assert table([Flag("--fast", None, None, "be fast")]).splitlines()[-1] == "| `--fast` |  | be fast |"
