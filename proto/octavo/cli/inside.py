"""The inside of a scheduler as lines of a terminal: executors, steps, the map of KV blocks, sequences, the queue.

Pure: an inspection and the size of the terminal give the lines. A line is a list of pieces, each a text and its style;
whether styles are written, the terminal decides.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.blocks import BlockMap, Inspection, RunningSequence
from octavo.client import ExecutorLoad

Piece = tuple[str, str]  # text, and the parameters of an SGR sequence: "" for none
Line = list[Piece]

PLAIN, BOLD, DIM = "", "1", "2"
# Of a 256-colour terminal, told apart on dark and on light ground.
HUES = (33, 208, 35, 170, 37, 166, 99, 142, 31, 205, 71, 130, 63, 173, 29, 134)
LEVELS = "▁▂▃▄▅▆▇█"
FREE, CACHED, SHARED = "·", "░", "▓"
LEGEND = f"{LEVELS[2]}{LEVELS[7]} held, and how full   {SHARED} shared   {CACHED} free, prefix cached   {FREE} free"
MAP_ROWS = 8  # most lines of one executor's map
HEADINGS = (
    *("EXECUTOR", "STATE", "RUN", "WAIT", "TOKENS/S", "STEP ms"),
    *("PROMPT TOKENS", "DECODES", "KV HELD", "PREFIX HITS", "PREEMPTIONS"),
)
SEQUENCES = 8  # most that are listed for one executor


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens drawn per second, by executor; None where only one moment is known."""

    by_target: dict[str, float]

    @classmethod
    def between(cls, before: Inspection | None, now: Inspection) -> Rates:
        if before is None or now.seconds <= before.seconds:
            return cls({})
        drawn = {blocks.target: blocks.num_sampled_tokens for blocks in before.executors}
        return cls(
            {
                blocks.target: max(0, blocks.num_sampled_tokens - drawn[blocks.target]) / (now.seconds - before.seconds)
                for blocks in now.executors
                if blocks.target in drawn
            }
        )

    def of(self, target: str) -> str:
        return f"{self.by_target[target]:,.0f}" if target in self.by_target else "-"

    @property
    def total(self) -> str:
        return f"{sum(self.by_target.values()):,.0f}" if self.by_target else "-"


def lines_of(seen: Inspection, rates: Rates, width: int) -> list[Line]:
    """All there is to say, of lines no longer than `width`; the most important first."""
    maps = {blocks.target: blocks for blocks in seen.executors}
    lines = [_headline(seen, rates), []]
    lines += _table(seen.load.executors, maps, rates)
    lines += [[(f"{e.target}: {e.reason}", DIM)] for e in seen.load.executors if e.reason]
    lines += _queue(seen)
    for blocks in seen.executors:
        lines += [[], *_inside(blocks, width)]
    if seen.executors:
        lines += [[], [(LEGEND, DIM)]]
    return [clip(line, width) for line in lines]


def _headline(seen: Inspection, rates: Rates) -> Line:
    running = sum(len(blocks.sequences) for blocks in seen.executors)
    waiting = seen.load.queue_length + sum(e.num_waiting for e in seen.load.executors)
    words = f"   {rates.total} tokens/s   {running} run   {waiting} wait"
    return [
        ("octavo", BOLD),
        (f" {seen.model}", DIM),
        (words, PLAIN),
        ("   draining" if seen.load.draining else "", BOLD),
    ]


def _table(executors: Sequence[ExecutorLoad], maps: dict[str, BlockMap], rates: Rates) -> list[Line]:
    rows = [HEADINGS, *(_row(e, maps.get(e.target), rates) for e in executors)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [[(text, PLAIN if number else DIM)] for number, text in enumerate(texts)]


def _row(load: ExecutorLoad, blocks: BlockMap | None, rates: Rates) -> tuple[str, ...]:
    if blocks is None:
        return (load.target, load.state.name, *["-"] * (len(HEADINGS) - 2))
    last = blocks.steps[-1] if blocks.steps else None
    seconds = next((step.seconds for step in reversed(blocks.steps) if step.seconds is not None), None)
    return (
        load.target,
        load.state.name,
        f"{len(blocks.sequences)}/{blocks.max_num_seqs}",
        str(load.num_waiting),
        rates.of(load.target),
        "-" if seconds is None else f"{seconds * 1e3:.1f}",
        "-" if last is None else f"{last.num_prefill_tokens}/{blocks.max_num_batched_tokens}",
        "-" if last is None else str(last.num_decodes),
        f"{1 - load.num_free_blocks / load.num_blocks:.0%}" if load.num_blocks else "-",
        f"{load.prefix_hits / load.prefix_queries:.0%}" if load.prefix_queries else "-",
        str(load.num_preemptions),
    )


def _queue(seen: Inspection) -> list[Line]:
    load = seen.load
    if not load.queue_length:
        return []
    head = f"queue: {load.queue_length} of {load.queue_limit} requests, {load.queue_tokens:,} tokens of KV demand"
    why = [[(f"  {w.num_requests} of {w.tenant} at priority {w.priority}: {w.reason}", PLAIN)] for w in load.waiting]
    return [[], [(head, BOLD)], *why]


def _inside(blocks: BlockMap, width: int) -> list[Line]:
    """One executor's steps, blocks and sequences."""
    usable = len(blocks.holders) - 1
    shared = sum(count > 1 for count in blocks.ref_counts)
    held = sum(count > 0 for count in blocks.ref_counts)
    cached = sum(bool(filled) and not count for filled, count in zip(blocks.num_filled, blocks.ref_counts, strict=True))
    sizes = f" {usable:,} blocks of {blocks.block_size}: {held} held, {shared} of them shared, {cached} cached"
    steps = blocks.steps[-max(8, min(60, width - 40)) :]
    lines: list[Line] = [
        [(blocks.target, BOLD), (sizes, DIM)],
        [("prompt tokens per step  ", DIM), (spark([s.num_prefill_tokens for s in steps]), f"38;5;{HUES[1]}")],
        [("decodes per step        ", DIM), (spark([s.num_decodes for s in steps]), f"38;5;{HUES[0]}")],
    ]
    lines += map_lines(blocks, width)
    lines += [_sequence(sequence) for sequence in blocks.sequences[:SEQUENCES]]
    more = len(blocks.sequences) - SEQUENCES
    return [*lines, [(f"  and {more} more", DIM)]] if more > 0 else lines


def map_lines(blocks: BlockMap, width: int) -> list[Line]:
    """A character for each block in the order of their ids; where there are too many, for some neighbours, of which it
    shows the most frequent kind."""
    usable = len(blocks.holders) - 1
    per_cell = -(-usable // (width * MAP_ROWS))
    pieces = [_block(blocks, block_id) for block_id in range(1, usable + 1)]
    if per_cell > 1:
        groups = (pieces[start : start + per_cell] for start in range(0, usable, per_cell))
        pieces = [Counter(group).most_common(1)[0][0] for group in groups]
    return [_joined(pieces[start : start + width]) for start in range(0, len(pieces), width)]


def _block(blocks: BlockMap, block_id: int) -> Piece:
    holder, filled = blocks.holders[block_id], blocks.num_filled[block_id]
    if not holder:
        return (CACHED, DIM) if filled else (FREE, DIM)
    style = style_of(blocks.sequences[holder - 1].group)
    if blocks.ref_counts[block_id] > 1:
        return (SHARED, style)
    return (LEVELS[max(0, -(-filled * len(LEVELS) // blocks.block_size) - 1)], style)


def _sequence(sequence: RunningSequence) -> Line:
    computed = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
    part = f"{computed}/" if computed < sequence.num_prompt_tokens else ""
    words = [
        f" {sequence.tenant} / {sequence.request_id or f'#{sequence.group}'} [{sequence.index}]",
        f"prompt {part}{sequence.num_prompt_tokens}, {sequence.num_cached_tokens} cached",
        f"output {sequence.num_tokens - sequence.num_prompt_tokens}",
        f"{sequence.num_blocks} blocks",
    ]
    if sequence.num_preemptions:
        words.append(f"preempted {sequence.num_preemptions} times")
    return [("  ■", style_of(sequence.group)), (",  ".join(words), PLAIN)]


def style_of(group: int) -> str:
    return f"38;5;{HUES[group % len(HUES)]}"


def spark(values: Sequence[int]) -> str:
    """A bar for each value, against the largest, and that at the end."""
    most = max(values, default=0)
    bars = "".join(LEVELS[max(1, -(-value * len(LEVELS) // most)) - 1] if value else " " for value in values)
    return f"{bars}  at most {most}" if most else f"{bars}  none"


def clip(line: Line, width: int) -> Line:
    """The line without what goes beyond the width, and without what would move the cursor."""
    kept: Line = []
    for text, style in line:
        shown = ""
        for character in text:
            width -= 2 if unicodedata.east_asian_width(character) in "WF" else 1
            if width < 0:
                return [*kept, (shown, style)]
            shown += character if character.isprintable() else "?"
        kept.append((shown, style))
    return kept


def painted(line: Line, *, colour: bool) -> str:
    """As it is written."""
    return "".join(f"\x1b[{style}m{text}\x1b[0m" if colour and style else text for text, style in line)


def _joined(pieces: Iterable[Piece]) -> Line:
    """With neighbours of one style in one piece."""
    line: Line = []
    for text, style in pieces:
        if line and line[-1][1] == style:
            line[-1] = (line[-1][0] + text, style)
        else:
            line.append((text, style))
    return line
