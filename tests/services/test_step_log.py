"""The latest steps of an executor, as an onlooker sees them."""

from __future__ import annotations

from scheduler.core.plan import BatchPlan, Copy, NewSequence, StepResult
from scheduler.core.request import SamplingParams
from scheduler.step_log import KEPT, StepLog, StepRecord


def test_a_step_tells_what_its_plan_held_and_how_long_its_answer_took() -> None:
    log = StepLog()
    new = [NewSequence(7, (1, 2, 3), 3, 0, (1,), 0, SamplingParams())]
    log.sent(BatchPlan(1, row_sequences=[5, 6, 7], row_tokens=[1, 1, 30], new=new, copies=[Copy(1, 2)]), now=10.0)
    log.sent(BatchPlan(2, row_sequences=[5, 6], row_tokens=[1, 1], preempted=[7]), now=10.5)
    log.answered(StepResult(1, tokens=[(5, 0), (6, 0), (7, 0)]), now=11.0)
    assert log.records() == (StepRecord(1, 2, 1, 30, 1, 0, 1, 1.0), StepRecord(2, 2, 0, 0, 0, 1, 0, None))
    assert log.num_sampled_tokens == 3


def test_a_plan_without_rows_is_answered_in_its_turn_and_is_no_step() -> None:
    log = StepLog()
    log.sent(BatchPlan(1, finished=[5]), now=1.0)
    log.sent(BatchPlan(2, row_sequences=[6], row_tokens=[1]), now=2.0)
    log.answered(StepResult(1), now=3.0)
    log.answered(StepResult(2, tokens=[(6, 0)]), now=4.0)
    assert log.records() == (StepRecord(2, 1, 0, 0, 0, 0, 0, 2.0),)


def test_only_the_latest_are_kept() -> None:
    log = StepLog()
    for step_id in range(KEPT + 9):
        log.sent(BatchPlan(step_id, row_sequences=[1], row_tokens=[1]), now=0.0)
        log.answered(StepResult(step_id, tokens=[(1, 0)]), now=0.0)
    assert [record.step_id for record in log.records()] == list(range(9, KEPT + 9))
