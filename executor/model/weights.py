"""Tensors of a model, by name, from the safetensors files of a Hugging Face directory.

Owns which file holds which tensor (one file, or shards by their index) and checks names and shapes; knows nothing of
layers. Files are mapped, so a tensor costs memory only while it is looked at or kept. A converted GGUF file has the
blocks of its quantized tensors beside their values, in files of their own, whose metadata tell each tensor's kind.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from executor.backends.base import BlockWeight
from executor.model.errors import BrokenModel

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
BLOCKS = "blocks"  # the stem of files of blocks


class Weights:
    """A reader of tensors. Every `take` is remembered, so that what nobody took can be told."""

    def __init__(self, directory: Path) -> None:
        self._files = {path: _open(path) for path in weight_files(directory)}
        self._places = {name: path for path, file in self._files.items() for name in _names(file)}
        self._taken: set[str] = set()
        self._blocks = {
            name: (file, kinds[name])
            for file in map(_open, sorted(directory.glob(f"{BLOCKS}-*.safetensors")))
            for kinds in [_metadata(file)]
            for name in _names(file)
        }
        self.directory = directory

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        """Names of all tensors, sorted."""
        return iter(sorted(self._places))

    def read(self, name: str) -> torch.Tensor:
        """The tensor as stored. Raises BrokenModel if there is none of the name."""
        if name not in self._places:
            raise BrokenModel(f"{self.directory} holds no tensor {name!r}")
        tensor: torch.Tensor = self._files[self._places[name]].get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor, known to be of this shape. Raises BrokenModel naming both shapes."""
        tensor = self.read(name)
        if tuple(tensor.shape) != shape:
            raise BrokenModel(f"tensor {name!r} is {list(tensor.shape)}, but the config makes it {list(shape)}")
        if not tensor.is_floating_point():
            raise BrokenModel(f"tensor {name!r} is {tensor.dtype}; only floating-point weights can be read")
        self._taken.add(name)
        return tensor

    def kinds(self, *names: str) -> set[str | None]:
        """Kinds of the blocks that there are of these tensors, None for one without; of all blocks if none is named."""
        return {self._blocks[name][1] if name in self._blocks else None for name in names or self._blocks}

    def take_blocks(self, name: str, shape: tuple[int, int]) -> BlockWeight:
        """The tensor's blocks, where `kinds` tells one; its values are known to be of this shape."""
        self.take(name, shape)
        file, kind = self._blocks[name]
        return BlockWeight(kind, file.get_tensor(name), shape[1])  # type: ignore[no-untyped-call]

    def left(self) -> list[str]:
        """Names of tensors never taken."""
        return [name for name in self if name not in self._taken]


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model, sorted. Raises BrokenModel where one is missing."""
    index = directory / INDEX_FILE
    if index.exists():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise BrokenModel(f"cannot read {index}: {error!r}") from error
    else:
        names = {SINGLE_FILE}
    missing = sorted(name for name in names if not (directory / name).is_file())
    if missing:
        raise BrokenModel(f"{directory} holds no {', '.join(missing)}")
    return sorted(directory / name for name in names)


def _names(file: safe_open) -> list[str]:
    names: list[str] = file.keys()  # type: ignore[no-untyped-call]
    return names


def _metadata(file: safe_open) -> dict[str, str]:
    metadata: dict[str, str] = file.metadata()  # type: ignore[no-untyped-call]
    return metadata


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise BrokenModel(f"cannot read {path}: {error}") from error
