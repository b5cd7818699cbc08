"""One frame of the page: an inspection as a server-sent event, JSON with packed columns.

A frame is whole, so a viewer that misses some has lost nothing. `scheduler/page/page.js` reads it.
"""

from __future__ import annotations

import base64
import json
import sys
import zlib

from scheduler.core.block_map import BlockMap, Holder
from scheduler.inspection import ExecutorView, Inspection, Owner
from scheduler.outputs import ExecutorLoad, ExecutorState

COMPRESSION = 1  # of 9: columns are runs of equal numbers


def frame_of(seen: Inspection) -> bytes:
    """Names are shown where `seen` has them."""
    views = {view.target: view for view in seen.executors}
    message = {
        "seconds": seen.seconds,
        "model": seen.model,
        "draining": seen.load.draining,
        "queue": {
            "length": seen.load.queue_length,
            "limit": seen.load.queue_limit,
            "tokens": seen.load.queue_tokens,
            "waiting": [[w.num_requests, w.priority, w.tenant, w.reason] for w in seen.load.waiting],
        },
        "executors": [_executor(load, views.get(load.target)) for load in seen.load.executors],
    }
    return b"data: " + json.dumps(message, separators=(",", ":")).encode() + b"\n\n"


def _executor(load: ExecutorLoad, view: ExecutorView | None) -> dict[str, object]:
    """Without `blocks` where nobody has joined."""
    told: dict[str, object] = {"target": load.target, "state": load.state.value, "reason": load.reason}
    if view is None or load.state not in (ExecutorState.READY, ExecutorState.DRAINING):
        return told
    return told | {
        "waiting": load.num_waiting,
        "free": load.num_free_blocks,
        "prefix": [load.prefix_hits, load.prefix_queries],
        "preemptions": load.num_preemptions,
        "inFlight": load.plans_in_flight,
        "maxSeqs": view.max_num_seqs,
        "maxTokens": view.max_num_batched_tokens,
        "sampled": view.num_sampled_tokens,
        "blockSize": view.block_map.block_size,
        "blocks": view.block_map.num_blocks,
        "columns": _columns(view.block_map),
        "sequences": list(map(_sequence, view.block_map.holders, view.owners)),
        "steps": [[*step[:-1], None if step.seconds is None else round(step.seconds, 6)] for step in view.steps],
    }


def _columns(block_map: BlockMap) -> str:
    """Three columns, one after the other, deflated, in base64: holders and reference counts as little-endian uint16,
    filled slots as uint8."""
    holder_of, ref_cnt = block_map.holder_of[:], block_map.ref_cnt[:]
    if sys.byteorder == "big":
        holder_of.byteswap()
        ref_cnt.byteswap()
    packed = zlib.compress(holder_of.tobytes() + ref_cnt.tobytes() + block_map.num_filled, COMPRESSION)
    return base64.b64encode(packed).decode("ascii")


def _sequence(holder: Holder, owner: Owner | None) -> list[object]:
    return [
        holder.sequence_id,
        holder.output_ids[0],
        holder.priority,
        holder.num_prompt_tokens,
        holder.num_tokens,
        holder.num_computed_tokens,
        holder.num_cached_tokens,
        holder.num_blocks,
        holder.num_preemptions,
        owner.index if owner else 0,
        owner.request_id if owner else "",
        owner.tenant if owner else "",
    ]
