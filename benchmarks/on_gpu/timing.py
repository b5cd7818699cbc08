"""How long a launch takes on the device: graphs of many launches over buffers that L2 cannot hold, timed by events.

Launch cost of the host is no part of it. Each graph goes once through every set of buffers; the median over replays is
what one launch takes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

REPLAYS = 20
_LEAST_LAUNCHES = 10  # in one graph, so that the graph's own cost is spread


def seconds_per_launch(launches: Sequence[Callable[[], object]], replays: int = REPLAYS) -> float:
    """launches: the same work over different buffers, each already run once or cheap to run first."""
    rounds = max(1, -(-_LEAST_LAUNCHES // len(launches)))
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for launch in launches:
                launch()
    graph.replay()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times) / (rounds * len(launches))
