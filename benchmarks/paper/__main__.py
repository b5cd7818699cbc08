"""The PagedAttention paper's claims as a report: `python -m benchmarks.paper [--seed N] [--docs DIR]`.

Writes DIR/paper.md and the pictures in DIR/paper/. All but one section are functions of the seed; that one is measured
on this machine and can be left out with `--no-measure`. Takes one to three minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.paper import recompute, report
from benchmarks.paper.figures import FULL, SHORT, compute


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of lengths, arrivals and scores (default 0)")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where the report goes (default docs)")
    parser.add_argument("--short", action="store_true", help="fewer steps, for a look")
    parser.add_argument("--no-measure", action="store_true", help="leave the measured section out; needs no torch then")
    parser.add_argument("--json", action="store_true", help="print all figures as one line of JSON as well")
    options = parser.parse_args()
    try:
        from benchmarks.paper import pictures
    except ImportError:
        sys.exit("the report's pictures need matplotlib: pip install -e '.[bench]' in the checkout")
    figures = compute(SHORT if options.short else FULL, options.seed)
    costs = [] if options.no_measure else recompute.measure(recompute.BLOCK_SIZES, 3, options.seed)
    words = ["python -m benchmarks.paper", f"--seed {options.seed}"]
    words += [word for word, given in (("--short", options.short), ("--no-measure", options.no_measure)) if given]
    pictures.draw(options.docs / "paper", figures, costs)
    (options.docs / "paper.md").write_text(report.render(figures, costs, " ".join(words), "paper"), encoding="utf-8")
    if options.json:
        print(json.dumps({**asdict(figures), "recompute": [cost._asdict() for cost in costs]}))
    else:
        print(f"written: {options.docs / 'paper.md'}")


if __name__ == "__main__":
    main()
