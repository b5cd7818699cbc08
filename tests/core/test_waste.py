"""What paging wastes: slots of held blocks that no token fills."""

from __future__ import annotations

from collections import deque

import pytest

from benchmarks.null_executor import NullExecutor
from benchmarks.workloads import chat
from scheduler.core.plan import BatchPlan
from tests.core.factories import create_core, create_driver, create_request


def test_slots_are_counted_once_however_many_share_them():
    driver = create_driver(block_size=4)
    driver.core.add(create_request(1, range(6), n=3))
    driver.plan()
    assert driver.core.slot_usage() == (8, 2)
    driver.answer()
    driver.plan()
    # The full block is shared by three, each has a block of its own with three tokens.
    assert driver.core.slot_usage() == (16, 3)


def test_nothing_held_is_nothing_wasted():
    assert create_driver().core.slot_usage() == (0, 0)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_chats_waste_less_than_four_percent(seed, depth, capsys):
    """Summed over all steps, those with few sequences at the beginning and at the end too."""
    core = create_core(
        num_blocks=4001,
        block_size=16,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_model_len=1024,
        pipeline_depth=depth,
    )
    executor = NullExecutor()
    for i, work in enumerate(chat(seed=seed), 1):
        core.add(create_request(i, work.prompt_token_ids, max_tokens=work.num_output_tokens))
    plans: deque[BatchPlan] = deque()
    allocated = unfilled = 0
    worst = 0.0
    while core.has_work:
        while (plan := core.schedule()) is not None:
            plans.append(plan)
        held, empty = core.slot_usage()
        assert held == 16 * (core.num_blocks - core.num_free_blocks)  # nothing is held that is not counted
        allocated, unfilled = allocated + held, unfilled + empty
        worst = max(worst, empty / held if held else 0)
        core.update(executor.run(plans.popleft()))
    with capsys.disabled():
        print(f"\nchat, seed {seed}, depth {depth}: {unfilled / allocated:.2%} wasted, {worst:.1%} in the worst step")
    assert unfilled / allocated < 0.04
