"""`python -m tests.compose`: compose.yaml on a real docker engine, from build to down, with streams compared by token.

Builds the images, starts the stack with the demo model, and changes it under load: scales executors up and down, kills
one, restarts all of them one by one, and takes everything down in the middle of answers. Prints the images' sizes and a
row for each step; exits with 1 when a stream was lost, a token is another than in the undisturbed run, or a step did
not come about within its limit. Takes about ten minutes on two cores, and the time to build.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from tests.chaos.processes import free_ports
from tests.compose.run import Scenario, print_report
from tests.compose.stack import Stack, engine_answers


def log(line: str) -> None:
    print(line, flush=True)


async def run(build: bool, seconds: float) -> bool:
    """Whether all went well."""
    scenario = Scenario(Stack(f"octavo-test-{os.getpid()}", *free_ports(2)), log)
    try:
        async with asyncio.timeout(seconds):
            await scenario.run(build=build)
    except TimeoutError:
        log(f"not done within {seconds:g} s")
        return False
    finally:
        print_report(scenario.report)
    return scenario.report.ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-build", action="store_true", help="take the images that are there")
    parser.add_argument("--seconds", type=float, default=3000.0, help="give up after so long (default 3000)")
    arguments = parser.parse_args()
    if not engine_answers():
        print("no docker engine answers, or docker has no compose", file=sys.stderr)
        return 1
    return 0 if asyncio.run(run(not arguments.no_build, arguments.seconds)) else 1


if __name__ == "__main__":
    sys.exit(main())
