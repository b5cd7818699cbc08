"""What the README shows works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent.parent / "README.md"


def test_the_client_example_runs(server: str) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert "127.0.0.1:50051" in example
    script = example.replace("127.0.0.1:50051", server)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" or three-digit LENGTH 4\n")
    assert "ravity" in done.stdout
