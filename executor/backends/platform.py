"""A device that executors run on: which backend it takes, how many K/V blocks it holds, what a step goes through.

Each device is a package of this one with a module `platform` that has `open_platform`; only the one that was asked for
is imported, so that a CPU executor never loads what belongs to a GPU. Nothing outside knows which it is.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from executor.backends.base import Backend
from executor.plan import Limits

if TYPE_CHECKING:
    from executor.model.loader import LoadedModel
    from executor.runner import Decoder

DEVICES = ("cpu", "cuda")


class PlatformError(Exception):
    """The device is not there, or cannot do what was asked; the message is a sentence for the user."""


@dataclass(frozen=True, slots=True)
class CacheWish:
    """What the user said of the K/V cache: one of the first two or neither."""

    memory: int | None = None  # bytes
    num_blocks: int | None = None
    device_share: float | None = (
        None  # of the device's memory, for everything; a device without such a notion ignores it
    )


class Platform(Protocol):
    """A device, opened."""

    @property
    def name(self) -> str:
        """Kind and name, as "cpu (AMD EPYC)"."""

    @property
    def survives_failed_steps(self) -> bool:
        """Whether the device can be used on once a step raised as a whole."""

    @property
    def backend(self) -> Backend: ...

    def num_blocks(self, model: LoadedModel, limits: Limits, wish: CacheWish) -> int:
        """Blocks that the cache may have; those of `limits` count for nothing. Raises OutOfMemory."""

    def decoder(self, model: LoadedModel, limits: Limits, progress: Callable[[str], None]) -> Decoder:
        """What the runner calls, with the cache allocated; everything that a first step would wait for is done."""


def open_platform(device: str, dtype: str, deterministic: bool, quantization: str = "none") -> Platform:
    """device: one of DEVICES. dtype: "auto", or a format's name. quantization: "none", "int8" or "gguf", of weights.
    Raises PlatformError."""
    assert device in DEVICES
    module = importlib.import_module(f"executor.backends.{device}.platform")
    platform: Platform = module.open_platform(dtype, deterministic, quantization)
    return platform
