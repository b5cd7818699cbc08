"""The committed protobuf stubs are what protoc makes of the .proto files today."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("octavo") / "v1"


def generate(into: Path) -> dict[str, str]:
    """Regenerates the stubs in a folder of their own; the command is that of docs and README, but for the folder."""
    protos = sorted((ROOT / "proto" / PACKAGE).glob("*.proto"))
    (into / PACKAGE).mkdir(parents=True)
    for proto in protos:
        shutil.copy(proto, into / PACKAGE)
    outputs = [f"--{kind}_out={into}" for kind in ("python", "pyi", "grpc_python")]
    names = [str(PACKAGE / proto.name) for proto in protos]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", *outputs, *names]
    subprocess.run(command, cwd=into, check=True, timeout=60)
    return read_stubs(into / PACKAGE)


def read_stubs(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.glob("*_pb2*.py*"))}


def test_committed_stubs_equal_freshly_generated_ones(tmp_path: Path) -> None:
    committed = read_stubs(ROOT / "proto" / PACKAGE)
    fresh = generate(tmp_path)
    assert sorted(committed) == sorted(fresh)
    assert [name for name in fresh if fresh[name] != committed[name]] == []
