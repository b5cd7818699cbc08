"""compose.yaml and the Dockerfiles, read without an engine: variables at their defaults, stages by name."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import yaml

from tests.compose.stack import FILES, ROOT

SCHEDULER_DOCKERFILE = "deploy/Dockerfile.scheduler"
EXECUTOR_DOCKERFILE = "deploy/Dockerfile.executor"
SERVERS = ("scheduler", "executor", "executor-cuda")
TASKS = ("model", "client")  # that end of themselves

Service = dict[str, Any]


@cache
def stack() -> dict[str, Any]:
    """compose.yaml, as it is where no variable is set."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", FILES[0].read_text())
    assert "$" not in text
    parsed: dict[str, Any] = yaml.safe_load(text)
    return parsed


def service(name: str) -> Service:
    found: Service = stack()["services"][name]
    return found


def overridden() -> list[str]:
    """The executors' command under test."""
    command: list[str] = yaml.safe_load(FILES[1].read_text())["services"]["executor"]["command"]
    return command


def seconds(duration: str) -> float:
    """Of "45s" or "10m"."""
    return float(duration[:-1]) * {"s": 1, "m": 60}[duration[-1]]


def lines(dockerfile: str) -> list[str]:
    """Its instructions, each on one line, without comments."""
    text = re.sub(r"^#.*\n", "", (ROOT / dockerfile).read_text(), flags=re.MULTILINE)
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def stages(dockerfile: str) -> dict[str, list[str]]:
    """The instructions of each stage with those of the stages that it builds on; the last one may have no name."""
    found: dict[str, list[str]] = {}
    for line in lines(dockerfile):
        if match := re.fullmatch(r"FROM (\S+)(?: AS (\S+))?", line):
            name = match[2] or ""
            found[name] = [*found.get(match[1], [line])]
        else:
            found[name].append(line)
    return found


def image(dockerfile: str, target: str = "") -> list[str]:
    return stages(dockerfile)[target]


def last(instructions: list[str], word: str) -> str:
    """What the last such instruction says."""
    return [line.removeprefix(f"{word} ") for line in instructions if line.startswith(f"{word} ")][-1]


def words(instructions: list[str], word: str) -> list[str]:
    """Of its exec form."""
    found: list[str] = json.loads(last(instructions, word))
    return found


def health_command(instructions: list[str]) -> list[str]:
    found: list[str] = json.loads(last(instructions, "HEALTHCHECK").partition(" CMD ")[2])
    return found


def image_of(server: str) -> list[str]:
    """The instructions that its image is made by."""
    build = service(server)["build"]
    return image(build["dockerfile"], build.get("target", ""))
