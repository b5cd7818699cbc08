"""`python requirements.py pyproject.toml [EXTRA …]`: what the project needs at run time, one requirement a line.

The images install this before the project itself, so that a layer of gigabytes stays the same while the code changes.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path


def requirements(pyproject: Path, extras: Sequence[str]) -> list[str]:
    """The dependencies and those of the extras, with the extras that an extra names of the project itself."""
    project = tomllib.loads(pyproject.read_text())["project"]
    own = re.compile(rf"{project['name']}\[(.+)\]")

    def of(extra: str) -> Iterator[str]:
        for requirement in project["optional-dependencies"][extra]:
            match own.fullmatch(requirement):
                case None:
                    yield requirement
                case named:
                    yield from of(named[1])

    return [*project["dependencies"], *(requirement for extra in extras for requirement in of(extra))]


if __name__ == "__main__":
    print(*requirements(Path(sys.argv[1]), sys.argv[2:]), sep="\n")
