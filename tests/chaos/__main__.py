"""`python -m tests.chaos --seconds N`: executors die in every way while clients compare each token.

Three executor processes (a tiny random model in float32, deterministic), one scheduler, 48 streams through the client.
Prints what happened; exits with 1 when a token was lost, doubled or differs, or a stream ended with an error. Takes the
seconds given and about two minutes more. From 300 seconds on, every kind of fault comes at least ten times.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
from pathlib import Path

from tests.chaos.faults import Fault, Injector
from tests.chaos.processes import create_farm, running_farm
from tests.chaos.reference import check_by_transformers
from tests.chaos.run import chaos, print_report, undisturbed
from tests.chaos.stall import measure_stall, print_stalls
from tests.chaos.workload import create_requests
from tests.executor.model.factories import TinyModel, create_tiny_model

MAX_MODEL_LEN = 1024
EXECUTOR_FLAGS = (
    "--dtype=float32",
    "--deterministic",
    "--threads=1",
    "--num-blocks=1500",
    "--max-num-seqs=64",
    "--grace-period=2",
)


def log(line: str) -> None:
    print(line, flush=True)


async def run(model: TinyModel, arguments: argparse.Namespace, logs: Path) -> bool:
    vocab_size = 128
    farm = create_farm(logs, (f"--model={model.directory}", *EXECUTOR_FLAGS), 3)
    async with running_farm(farm) as client:
        expected = await undisturbed(client, create_requests(arguments.streams, vocab_size, seed=arguments.seed))
        num_tokens = sum(len(answer.token_ids) for stream in expected for answer in stream.answers.values())
        compared = check_by_transformers(model, expected)
        log(f"undisturbed: {num_tokens} tokens of {len(expected)} streams; {compared} are transformers' own too")
        stalls = [
            await measure_stall(farm, client, fault, vocab_size, seed)
            for seed, fault in enumerate(
                itertools.islice(itertools.cycle((Fault.KILL, Fault.STOP_KILL)), arguments.stalls)
            )
        ]
        print_stalls(stalls)
        injector = Injector(farm, client, seed=arguments.seed)
        report = await chaos(
            farm, client, expected, injector, seconds=arguments.seconds, period=arguments.period, progress=log
        )
    print_report(report)
    return report.ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="how long faults go on")
    parser.add_argument("--period", type=float, default=5.0, help="seconds from one fault to the next, at least")
    parser.add_argument("--streams", type=int, default=48)
    parser.add_argument("--stalls", type=int, default=4, help="single faults whose stall is measured before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, help="keep the executors' logs there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        logs = arguments.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        model = create_tiny_model(Path(scratch) / "model", max_position_embeddings=MAX_MODEL_LEN)
        return 0 if asyncio.run(run(model, arguments, logs)) else 1


if __name__ == "__main__":
    sys.exit(main())
