"""A trace of everything that went into a core, and the plans that came out of it.

    python -m tests.core.trace          # records tests/core/data/trace.json anew

Record it anew only when plans are meant to change: that it replays is what says the core is deterministic, on every
machine and in every run.
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import asdict
from pathlib import Path

from scheduler.core.plan import BatchPlan, StepResult
from scheduler.core.request import Request, SamplingParams
from scheduler.core.scheduler import Scheduler
from tests.core.factories import FakeExecutor, create_core, create_request

PATH = Path(__file__).parent / "data" / "trace.json"
SETTINGS = {
    "num_blocks": 24,
    "block_size": 4,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 12,
    "max_model_len": 64,
    "pipeline_depth": 2,
}


def plain(value: object) -> object:
    """As JSON has it: sets in order, tuples as lists, keys as strings."""
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def plan_record(plan: BatchPlan | None) -> object:
    return None if plan is None else plain(asdict(plan))


def request_from(record: dict[str, object]) -> Request:
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}
    sampling = dict(record["sampling"])  # type: ignore[call-overload]
    sampling["stop_token_ids"] = frozenset(sampling["stop_token_ids"])
    return Request(**(fields | {"sampling": SamplingParams(**sampling)}))  # type: ignore[arg-type]


def result_from(record: dict[str, object]) -> StepResult:
    return StepResult(
        record["step_id"],  # type: ignore[arg-type]
        [(a, b) for a, b in record["tokens"]],  # type: ignore[attr-defined]
        candidates={
            int(k): tuple((t, p) for t, p in v)
            for k, v in record["candidates"].items()  # type: ignore[attr-defined]
        },
        errors={int(k): v for k, v in record["errors"].items()},  # type: ignore[attr-defined]
    )


def apply(core: Scheduler, call: str, argument: object) -> object:
    """Makes one call; returns what it said, as JSON has it."""
    match call:
        case "add":
            core.add(request_from(argument))  # type: ignore[arg-type]
        case "abort":
            core.abort(argument)  # type: ignore[arg-type]
        case "finish":
            core.finish(*argument)  # type: ignore[misc]
        case "update":
            return [[e.sequence_id, list(e.token_ids)] for e in core.update(result_from(argument))]  # type: ignore[arg-type]
        case "schedule":
            return plan_record(core.schedule())
    return None


def record(seed: int = 7, num_calls: int = 260) -> list[list[object]]:
    """[call, argument, answer] of a random run over everything that a core can be asked."""
    r = random.Random(seed)
    core = create_core(itertools.count(10_000).__next__, **SETTINGS)
    executor = FakeExecutor(core.config.block_size)
    plans: list[BatchPlan] = []
    told: dict[int, int] = {}
    calls: list[list[object]] = []
    next_id = 1
    while len(calls) < num_calls or core.has_work:
        kind = r.choices(("add", "abort", "finish", "schedule", "update"), (12, 2, 2, 40, 40))[0]
        argument: object = None
        if kind == "add" and len(calls) < num_calls:
            width = r.choice([None, None, None, 2, 3])
            n = r.randint(1, width or 3)
            prompt = [r.randint(0, 2) for _ in range(r.randint(1, 18))]
            request = create_request(
                next_id, prompt, n=n, beam_width=width, max_tokens=r.randint(1, 9), priority=r.randint(0, 1), stop=[3]
            )
            next_id += n
            argument = plain(asdict(request))
        elif kind in ("abort", "finish") and told:
            sequence_id = r.choice(sorted(told))
            argument = sequence_id if kind == "abort" else [sequence_id, r.randint(0, told.pop(sequence_id))]
            told.pop(sequence_id, None)
        elif kind == "update" and plans:
            plan = plans.pop(0)
            rows = list(plan.row_sequences)
            fail = frozenset([r.choice(rows)]) if rows and r.random() < 0.05 else frozenset()
            result = executor.run(plan, fail)
            argument = {
                "step_id": result.step_id,
                "tokens": plain(list(result.tokens)),
                "candidates": plain(result.candidates),
                "errors": plain(result.errors),
            }
        elif kind != "schedule":
            continue
        if kind == "schedule":
            plan = core.schedule()
            if plan is not None:
                plans.append(plan)
            calls.append([kind, None, plan_record(plan)])
            continue
        answer = apply(core, kind, argument)
        if kind == "update":
            for sequence_id, token_ids in answer:  # type: ignore[attr-defined]
                told[sequence_id] = told.get(sequence_id, 0) + len(token_ids)
            told = {i: n for i, n in told.items() if core.sequence(i) is not None and i not in core._beams}
        calls.append([kind, argument, answer])
    return calls


def main() -> None:
    lines = ",\n".join(json.dumps(call, separators=(",", ":")) for call in record())
    PATH.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
