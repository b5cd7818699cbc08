"""Where draws lie: on the device, for the step that follows, and in page-locked memory, for whoever collects them.

Owns one buffer on the device, whose address graphs read, and two on the host that take turns, so that the draws of a
step reach the host while those of the step before it are still to be collected. On the device the order of the stream
is enough: a step's draws are copied to the host and fed to the step behind it before that one draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from executor.backends.cuda.sampling import BYTES_PER_DRAW, Drawn, drawn_in
from executor.sampler import SamplerOutput

_MAX_DRAWS = 1024  # at first


@dataclass(frozen=True, slots=True)
class PendingDraws:
    """Draws on their way to the host; see executor.sampler.Draws."""

    host: torch.Tensor  # uint8, page-locked
    copied: torch.cuda.Event | None  # None where the device is the host
    report: Callable[[Drawn], SamplerOutput]

    def is_ready(self) -> bool:
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]

    def collect(self) -> SamplerOutput:
        if self.copied is not None:
            self.copied.synchronize()
        return self.report(drawn_in(self.host.clone(), None))  # a copy: the buffer's next turn comes


class DrawBuffers:
    """Of one backend, and so of one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._turn = 0
        self.reserve(_MAX_DRAWS)

    def reserve(self, max_draws: int) -> None:
        """Room for so many draws a step. Comes before any graph is captured: the addresses change."""
        on_gpu = self._device.type == "cuda"
        num_bytes = BYTES_PER_DRAW * max_draws
        self._drawn = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        self._hosts = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]

    @property
    def token_ids(self) -> torch.Tensor:
        """[..] int64: at d the token of draw d of the step that drew last."""
        return self._drawn.view(torch.int64)

    def next(self, num_draws: int) -> torch.Tensor:
        """Where the next step's draws go: [BYTES_PER_DRAW * num_draws] uint8, token ids first."""
        num_bytes = BYTES_PER_DRAW * num_draws
        assert num_bytes <= len(self._drawn), f"{num_draws} draws in a buffer of {len(self._drawn)} bytes"
        return self._drawn[:num_bytes]

    def fetch(self, drawn: torch.Tensor, report: Callable[[Drawn], SamplerOutput]) -> PendingDraws:
        """Has what `next` gave, once it is drawn, copied to the host; `report` says what it means."""
        self._turn = 1 - self._turn
        host = self._hosts[self._turn][: len(drawn)]
        host.copy_(drawn, non_blocking=True)
        copied = None
        if self._device.type == "cuda":
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream())
        return PendingDraws(host, copied, report)


class DeviceMark:
    """A moment on the GPU's own clock; see executor.backends.base.Mark."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream())

    def ns_since(self, earlier: DeviceMark) -> int:
        self._event.synchronize()
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return round(milliseconds * 1e6)
