"""What both processes print on stderr: one form, whoever logs, and no variables of a failed function."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CONFIGURE = ["scheduler.logs import configure_logs", "executor.log import configure_log as configure_logs"]

PROGRAM = """
import logging, structlog
from {configure}
configure_logs("{form}", "info")
logging.getLogger("some.library").warning("it is %s", "late")
logging.getLogger("some.library").info("of no interest")
try:
    prompt = "what the client wrote".upper()
    int("x")
except ValueError:
    structlog.get_logger("server").exception("it failed")
"""


def logged(configure: str, form: str) -> str:
    program = PROGRAM.format(configure=configure, form=form)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize("configure", CONFIGURE)
def test_libraries_log_in_the_same_form(configure: str) -> None:
    first, second = (json.loads(line) for line in logged(configure, "json").splitlines())
    assert {key: first[key] for key in ("event", "level", "logger")} == {
        "event": "it is late",
        "level": "warning",
        "logger": "some.library",
    }
    assert second["event"] == "it failed"


@pytest.mark.parametrize("form", ["console", "json"])
@pytest.mark.parametrize("configure", CONFIGURE)
def test_a_traceback_shows_no_variables(configure: str, form: str) -> None:
    """They may be a prompt."""
    text = logged(configure, form)
    assert "invalid literal for int()" in text
    assert "WHAT THE CLIENT WROTE" not in text


@pytest.mark.parametrize("configure", CONFIGURE)
def test_a_line_that_finds_no_place_is_lost_and_nothing_else(configure: str) -> None:
    """A full disk under the log ended the executor and kept the scheduler's streams from their end."""
    program = PROGRAM.format(configure=configure, form="json") + "\nprint('it goes on')"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=full, text=True, check=False
        )
    assert done.stdout == "it goes on\n"
