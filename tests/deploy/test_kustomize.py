"""kubectl renders every choice of overlay and components, and to the same as the tests' own reader."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.kustomize import MERGE_KEYS, Unsupported, identity, render
from tests.deploy.manifests import CHOICES, write_choice

NO_KUBECTL = (
    "kubectl is not installed: deploy/kubernetes is checked as tests/deploy/kustomize.py reads it, and not compared "
    "with `kubectl kustomize`; where kubectl is, `pytest tests/deploy` does that"
)


def unordered(document: Any, field: str = "") -> Any:
    """With lists whose order says nothing in the order of their keys."""
    if isinstance(document, dict):
        return {key: unordered(value, key) for key, value in document.items()}
    if isinstance(document, list):
        items = [unordered(item) for item in document]
        key = MERGE_KEYS.get(field)
        return sorted(items, key=lambda item: str(item[key])) if key else items
    return document


@pytest.mark.skipif(shutil.which("kubectl") is None, reason=NO_KUBECTL)
@pytest.mark.parametrize(("overlay", "components"), CHOICES)
def test_kubectl_renders_what_these_tests_read(overlay: str, components: tuple[str, ...], tmp_path: Path) -> None:
    folder = write_choice(tmp_path, overlay, components)
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    rendered = {identity(document): unordered(document) for document in yaml.safe_load_all(done.stdout)}
    assert rendered == {identity(document): unordered(document) for document in render(folder)}
    assert ("Deployment", "octavo-scheduler") in rendered


@pytest.mark.parametrize(
    "fields",
    [{"namePrefix": "a-"}, {"images": [{"name": "octavo-executor", "digest": "sha256:0"}]}, {"kind": "List"}],
)
def test_what_the_reader_does_not_know_it_refuses(fields: dict[str, Any], tmp_path: Path) -> None:
    kustomization = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", **fields}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    with pytest.raises(Unsupported):
        render(tmp_path)
