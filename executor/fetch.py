"""`octavo fetch`: a model into the cache, so that executors with a cache that they may only read start from it.

Fetches and converts what an executor's start would, remembers the hash of the tensors, and prints the model's
directory. Run again, it finds all of it there.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from executor.config import DEFAULT_MODEL, default_cache_dir


@dataclass(frozen=True, slots=True)
class FetchConfig:
    model: str
    cache_dir: Path


def parse_arguments(arguments: Sequence[str], environment: Mapping[str, str]) -> FetchConfig:
    """Exits with code 2 and a sentence on stderr if an argument is wrong. The environment names the cache directory."""
    parser = argparse.ArgumentParser(
        prog="octavo fetch",
        description="Puts a model into the cache of executors, and prints its directory. Nothing is started.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default=DEFAULT_MODEL, help=f"as for executors; default {DEFAULT_MODEL}"
    )
    parser.add_argument("--cache-dir", metavar="DIR", type=Path, default=None, help="as for executors")
    values = parser.parse_args(arguments)
    return FetchConfig(values.model, (values.cache_dir or default_cache_dir(environment)).expanduser())


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    config = parse_arguments(arguments, environment)

    from executor.model.errors import BrokenModel, ModelError
    from executor.model.fingerprint import tensors_digest
    from executor.model.resolve import resolve_model

    def tell(line: str) -> None:
        print(f"octavo fetch: {line}", file=sys.stderr, flush=True)

    try:
        resolved = resolve_model(config.model, config.cache_dir, tell)
        try:
            tensors_digest(resolved.directory, config.cache_dir)
        except BrokenModel as error:
            tell(resolved.complaint(error))
            return 1
    except ModelError as error:
        tell(str(error))
        return 1
    print(resolved.directory)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
