"""What the folder deploy/kubernetes stands for: every overlay with every choice of components."""

from __future__ import annotations

import itertools
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.kustomize import Document, identity, render

DEPLOY = Path(__file__).resolve().parent.parent.parent / "deploy"
OVERLAYS = ("cpu", "gpu")
COMPONENTS = ("keda", "monitoring")
CHOICES = [
    (overlay, chosen)
    for overlay in OVERLAYS
    for count in range(len(COMPONENTS) + 1)
    for chosen in itertools.combinations(COMPONENTS, count)
]


def write_choice(scratch: Path, overlay: str, components: tuple[str, ...]) -> Path:
    """A copy of the folder with an overlay of one's own in it, as docs/operations.md shows; returns its folder."""
    shutil.copytree(DEPLOY, scratch / "deploy")
    folder = scratch / "deploy" / "kubernetes" / "mine"
    folder.mkdir()
    fields: Document = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "octavo",
        "resources": [f"../overlays/{overlay}"],
        "components": [f"../components/{name}" for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(fields))
    return folder


@cache
def everything(overlay: str) -> dict[tuple[str, str], Document]:
    """An overlay with all components, by kind and name: to read."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as scratch:
        return {identity(found): found for found in render(write_choice(Path(scratch), overlay, COMPONENTS))}


def deployment(overlay: str, component: str) -> Document:
    return everything(overlay)["Deployment", f"octavo-{component}"]


def pod(overlay: str, component: str) -> Document:
    spec: Document = deployment(overlay, component)["spec"]["template"]["spec"]
    return spec


def container(overlay: str, component: str) -> Document:
    [only] = pod(overlay, component)["containers"]
    return dict(only)


def arguments(overlay: str, component: str) -> list[str]:
    """The process's own, after `python -P -m NAME`."""
    found = container(overlay, component)
    assert found["command"][:4] == ["python", "-P", "-m", component]
    return [*found["command"][4:], *found.get("args", [])]


def values_of(document: Any, key: str) -> list[Any]:
    """All values of a key, wherever in the document it stands."""
    if isinstance(document, dict):
        own = [document[key]] if key in document else []
        return own + [value for each in document.values() for value in values_of(each, key)]
    if isinstance(document, list):
        return [value for each in document for value in values_of(each, key)]
    return []
