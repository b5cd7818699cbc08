"""compose.yaml as a stack that runs: what one does to it with `docker`, and what the engine says of it.

Every command has a limit. The stack has a project name and a port of its own, so that one in use stays as it is.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = (ROOT / "compose.yaml", Path(__file__).parent / "deterministic.yaml")
IMAGES = ("octavo-scheduler:0.1.0", "octavo-executor:0.1.0-cpu")
BASE_IMAGE = "python:3.11-slim"
SHOWN = 4000  # characters of what a failed command printed


class CommandFailed(Exception):
    """A docker command ended with an error, or did not end; the message has what it said."""


def engine_answers() -> bool:
    """There is a docker with compose, and its engine is up."""
    if shutil.which("docker") is None:
        return False
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        try:
            done = subprocess.run(command, capture_output=True, timeout=30, check=False)
        except subprocess.TimeoutExpired:
            return False
        if done.returncode:
            return False
    return True


class Stack:
    """Of one project; the ports are the scheduler's on this machine."""

    def __init__(self, project: str, port: int, http_port: int) -> None:
        self.port = port
        self.http_port = http_port
        self._project = project

    async def compose(self, *words: str, limit: float) -> str:
        """What the command printed on stdout."""
        files = [word for path in FILES for word in ("-f", str(path))]
        command = ["docker", "compose", "--ansi=never", "-p", self._project, *files, *words]
        return await _run(command, limit, OCTAVO_PORT=str(self.port), OCTAVO_HTTP_PORT=str(self.http_port))

    async def up(self, executors: int, limit: float) -> None:
        """So many executors, all of it healthy; what runs goes on."""
        await self.compose("up", "-d", "--wait", "--no-build", f"--scale=executor={executors}", limit=limit)

    async def containers(self, service: str) -> list[str]:
        """Their ids."""
        return (await self.compose("ps", "-a", "-q", service, limit=60)).split()

    async def everything(self) -> list[str]:
        """Ids of all containers of the project."""
        return (
            await _run(["docker", "ps", "-aq", f"--filter=label=com.docker.compose.project={self._project}"])
        ).split()

    async def logs(self) -> str:
        return await self.compose("logs", "--no-color", "--tail=40", limit=60)

    async def down(self, limit: float) -> None:
        """No container and no volume is left."""
        await self.compose("--profile", "client", "down", "--volumes", "--remove-orphans", limit=limit)


async def kill_processes(container: str) -> None:
    """kill -9 from the inside, as a crash: the engine then starts the container anew, which `docker kill` would not."""
    await _run(["docker", "exec", container, "sh", "-c", "kill -KILL -1"], ends_well=False)


async def restart(container: str, limit: float) -> None:
    """SIGTERM, the stack's own grace period, and a start."""
    await _run(["docker", "restart", container], limit)


async def inspect(thing: str, template: str) -> str:
    return (await _run(["docker", "inspect", "-f", template, thing])).strip()


async def addresses(container: str) -> set[str]:
    """In the networks of the stack."""
    return set((await inspect(container, "{{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}")).split())


async def image_bytes(image: str) -> int:
    return int((await _run(["docker", "image", "inspect", "-f", "{{.Size}}", image])).strip())


async def _run(command: Sequence[str], limit: float = 60.0, ends_well: bool = True, **environment: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
        cwd=ROOT,
    )
    try:
        async with asyncio.timeout(limit):
            stdout, stderr = (part.decode(errors="replace") for part in await process.communicate())
    except TimeoutError:
        raise CommandFailed(f"`{' '.join(command)}` did not end within {limit:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode and ends_well:
        raise CommandFailed(f"`{' '.join(command)}` ended with {process.returncode}: {(stdout + stderr)[-SHOWN:]}")
    return stdout
