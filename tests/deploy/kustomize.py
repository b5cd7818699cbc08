"""Renders the kustomizations of this project without kubectl: the few features that they use, and no others.

What is not known here raises, so a kustomization never means more than these tests see. Where kubectl is installed,
test_kustomize.py compares the two.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]

# Lists whose items a patch names by one of their fields; of all others a patch gives the whole list.
MERGE_KEYS = {"containers": "name", "volumes": "name", "env": "name", "volumeMounts": "mountPath"}


class Unsupported(Exception):
    """A feature of kustomize that this module does not know."""


def render(folder: Path) -> list[Document]:
    """The documents that the kustomization in a folder stands for."""
    return _accumulate(folder, [])


def identity(document: Document) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


def _accumulate(folder: Path, given: list[Document]) -> list[Document]:
    fields = yaml.safe_load((folder / "kustomization.yaml").read_text())
    kind = fields.pop("kind")
    fields.pop("apiVersion")
    if kind not in ("Kustomization", "Component") or (given and kind != "Component"):
        raise Unsupported(f"{folder}: a {kind} here")
    documents = list(given)
    for resource in fields.pop("resources", []):
        path = folder / resource
        documents += render(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    documents += [_config_map(folder, wish) for wish in fields.pop("configMapGenerator", [])]
    for component in fields.pop("components", []):
        documents = _accumulate(folder / component, documents)
    for patch in fields.pop("patches", []):
        _patch(documents, yaml.safe_load((folder / patch["path"]).read_text()))
    for transform in (_set_namespace, _add_labels, _set_images):
        transform(documents, fields)
    if fields:
        raise Unsupported(f"{folder}: {', '.join(fields)}")
    names = [identity(document) for document in documents]
    assert len(set(names)) == len(names), f"{folder}: a resource is there twice"
    return documents


def _config_map(folder: Path, wish: Document) -> Document:
    if set(wish) != {"name", "files", "options"} or set(wish["options"]) != {"disableNameSuffixHash", "labels"}:
        raise Unsupported(f"{folder}: configMapGenerator of {wish}")
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": wish["name"], "labels": wish["options"]["labels"]},
        "data": {Path(name).name: (folder / name).read_text() for name in wish["files"]},
    }


def _patch(documents: list[Document], patch: Document) -> None:
    [index] = [i for i, document in enumerate(documents) if identity(document) == identity(patch)]
    documents[index] = _merged(documents[index], patch, "")


def _merged(old: Any, new: Any, field: str) -> Any:
    """A strategic merge patch."""
    if isinstance(old, dict) and isinstance(new, dict):
        result = dict(old)
        for key, value in new.items():
            if value is None:
                result.pop(key, None)
            else:
                result[key] = _merged(old[key], value, key) if key in old else copy.deepcopy(value)
        return result
    if isinstance(old, list) and field in MERGE_KEYS:
        key = MERGE_KEYS[field]
        items = {item[key]: item for item in old}
        for item in new:
            items[item[key]] = _merged(items.get(item[key], {}), item, "")
        return list(items.values())
    return copy.deepcopy(new)


def _set_namespace(documents: list[Document], fields: Document) -> None:
    namespace = fields.pop("namespace", None)
    for document in documents if namespace else []:
        if document["kind"] == "Namespace":
            document["metadata"]["name"] = namespace
        else:
            document["metadata"]["namespace"] = namespace


def _add_labels(documents: list[Document], fields: Document) -> None:
    for wish in fields.pop("labels", []):
        if set(wish) != {"pairs"}:
            raise Unsupported(f"labels of {wish}")
        for document in documents:
            document["metadata"].setdefault("labels", {}).update(wish["pairs"])


def _set_images(documents: list[Document], fields: Document) -> None:
    for wish in fields.pop("images", []):
        if set(wish) != {"name", "newTag"}:
            raise Unsupported(f"images of {wish}")
        for document in documents:
            for container in document.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
                if container["image"] == wish["name"]:
                    container["image"] = f"{wish['name']}:{wish['newTag']}"
