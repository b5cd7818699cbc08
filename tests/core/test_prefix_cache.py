"""Prefixes that are found, waited for, evicted, and never found where they must not be."""

from __future__ import annotations

import pytest

from scheduler.core.request import FinishReason
from tests.core.factories import create_driver, create_request, expected_output, force_preemption

PROMPT = list(range(40, 54))  # three full blocks of 4 and two tokens


def test_a_second_equal_prompt_computes_only_what_follows_the_last_full_block():
    driver = create_driver()
    driver.core.add(create_request(1, PROMPT, max_tokens=1))
    driver.run()
    driver.core.add(create_request(2, PROMPT, max_tokens=1))
    plan = driver.plan()
    assert (plan.new[0].num_computed_tokens, plan.row_tokens) == (12, [2])
    assert plan.new[0].block_ids[:3] == driver.history[0].new[0].block_ids[:3]


def test_only_the_common_beginning_is_shared():
    driver = create_driver()
    driver.core.add(create_request(1, PROMPT, max_tokens=1))
    driver.run()
    driver.core.add(create_request(2, [*PROMPT[:9], 1, 2, 3, 4], max_tokens=1))
    assert driver.plan().new[0].num_computed_tokens == 8


@pytest.mark.parametrize("num_blocks_of_prompt", [1, 2, 3])
def test_a_prompt_of_full_blocks_computes_its_last_block_again_into_a_fresh_one(num_blocks_of_prompt):
    """There must be logits of the last token."""
    driver = create_driver(block_size=4)
    prompt = list(range(4 * num_blocks_of_prompt))
    driver.core.add(create_request(1, prompt, max_tokens=1))
    driver.run()
    driver.core.add(create_request(2, prompt, max_tokens=1))
    plan = driver.plan()
    assert plan.row_tokens == [4]
    assert plan.new[0].num_computed_tokens == len(prompt) - 4
    assert plan.new[0].block_ids[-1] not in driver.history[0].new[0].block_ids
    driver.run()
    assert driver.outputs[1] == driver.outputs[2]


def test_outputs_are_found_by_a_prompt_that_goes_on_from_them():
    driver = create_driver()
    first = create_request(1, PROMPT, max_tokens=8)
    driver.core.add(first)
    driver.run()
    told = driver.outputs[1]
    driver.core.add(create_request(2, [*PROMPT, *told], max_tokens=1))
    # 21 tokens were computed: the last output was drawn and never fed.
    assert driver.plan().new[0].num_computed_tokens == 20


@pytest.mark.parametrize(
    ("one", "other"),
    [({"cache_salt": "x"}, {"adapter": "x"}), ({"cache_salt": "x"}, {}), ({"cache_salt": "x"}, {"cache_salt": "y"})],
)
def test_other_roots_never_hit(one, other):
    """A salt that reads as another request's adapter is none, and shares nothing with it."""
    driver = create_driver()
    driver.core.add(create_request(1, PROMPT, max_tokens=1, **one))
    driver.run()
    assert driver.core.num_cached_tokens(create_request(2, PROMPT, **one)) == 12
    driver.core.add(create_request(2, PROMPT, max_tokens=1, **other))
    assert driver.plan().new[0].num_computed_tokens == 0


def test_a_block_is_found_only_after_its_step_came_back():
    driver = create_driver(pipeline_depth=2)
    driver.core.add(create_request(1, PROMPT, max_tokens=5))
    driver.plan()
    assert driver.core.num_cached_tokens(create_request(2, PROMPT)) == 0
    driver.answer()
    assert driver.core.num_cached_tokens(create_request(2, PROMPT)) == 12


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [16, 64, 1024])
def test_a_burst_of_equal_prompts_computes_the_prefix_once(depth, budget):
    driver = create_driver(pipeline_depth=depth, max_num_batched_tokens=budget, num_blocks=400)
    for sequence_id in range(1, 17):
        driver.core.add(create_request(sequence_id, PROMPT, max_tokens=1))
    driver.run()
    assert driver.core.counters.computed_tokens == 14 + 15 * 2
    assert driver.core.counters.prefix_hits == 15 * 12
    assert len({tuple(o) for o in driver.outputs.values()}) == 1


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_burst_of_equal_long_prompts_computes_the_prefix_once_through_chunks(depth):
    driver = create_driver(pipeline_depth=depth, max_num_batched_tokens=16, max_num_seqs=4)
    prompt = list(range(61))
    for sequence_id in (1, 2, 3):
        driver.core.add(create_request(sequence_id, prompt, max_tokens=1))
    driver.run()
    assert driver.core.counters.computed_tokens == 61 + 2 * 1


def test_another_prompt_overtakes_one_that_waits_for_a_prefix():
    driver = create_driver(pipeline_depth=2)
    driver.core.add(create_request(1, PROMPT))
    driver.core.add(create_request(2, PROMPT))
    driver.core.add(create_request(3, [1, 2]))
    assert driver.plan().row_sequences == [1, 3]
    driver.answer()
    assert 2 in driver.plan().row_sequences


def test_nobody_waits_for_a_prefix_whose_step_failed():
    driver = create_driver()
    driver.core.add(create_request(1, PROMPT, max_tokens=2))
    driver.core.add(create_request(2, PROMPT, max_tokens=2))
    driver.plan()
    driver.answer(fail=frozenset([1]))
    plan = driver.plan()
    assert (plan.row_sequences, plan.row_tokens) == ([2], [14])
    driver.run()
    assert driver.outputs[2] == expected_output(create_request(2, PROMPT, max_tokens=2), 0)


def test_a_lookup_counts_once_however_long_a_request_waits_and_however_often_it_begins():
    """Hit rates told of waiting, not of the cache."""
    driver = create_driver(num_blocks=8, block_size=4)
    driver.core.add(create_request(1, range(12), max_tokens=8))
    driver.step()
    driver.core.add(create_request(2, range(12), max_tokens=8))
    driver.core.add(create_request(3, range(60, 80), max_tokens=1))
    for _ in range(3):
        driver.step()
    force_preemption(driver.core, 2)
    driver.run()
    assert driver.core.counters.prefix_queries == 12 + 12 + 20
    assert driver.core.counters.prefix_hits == 8


def test_tokens_to_schedule_are_counted_after_the_lookup():
    """Preempted, then admitted again with a hit on its own blocks."""
    driver = create_driver()
    driver.core.add(create_request(1, PROMPT, max_tokens=6))
    for _ in range(3):
        driver.step()
    force_preemption(driver.core, 1)
    plan = driver.plan()
    assert plan.preempted == [1]
    assert (plan.new[0].num_computed_tokens, plan.row_tokens) == (16, [1])
    driver.run()
    assert driver.outputs[1] == expected_output(create_request(1, PROMPT, max_tokens=6), 0)


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    driver = create_driver(num_blocks=6, block_size=4)
    driver.core.add(create_request(1, range(19), max_tokens=1))  # all five blocks, of which four are full
    driver.run()
    found = [driver.core.num_cached_tokens(create_request(9, range(19)))]
    for sequence_id in (2, 3, 4):
        driver.core.add(create_request(sequence_id, [100 + sequence_id], max_tokens=50))  # takes one block
        driver.plan()
        driver.answer()
        found.append(driver.core.num_cached_tokens(create_request(9, range(19))))
    assert found == [16, 16, 12, 8]


def test_a_hit_keeps_a_free_block_from_being_evicted():
    driver = create_driver(num_blocks=7, block_size=4)
    driver.core.add(create_request(1, range(8), max_tokens=1))
    driver.run()
    driver.core.add(create_request(2, range(9), max_tokens=9))
    driver.step()
    driver.core.add(create_request(3, range(90, 99), max_tokens=2))
    driver.run()
    for sequence_id, prompt in ((2, range(9)), (3, range(90, 99))):
        assert driver.outputs[sequence_id] == expected_output(
            create_request(prompt=prompt, max_tokens=len(driver.outputs[sequence_id])), 0
        )


def test_without_prefix_caching_nothing_is_found():
    driver = create_driver(prefix_caching=False)
    driver.core.add(create_request(1, PROMPT, max_tokens=1))
    driver.core.add(create_request(2, PROMPT, max_tokens=1))
    assert driver.plan().row_tokens == [14, 14]
    driver.run()
    assert driver.core.num_cached_tokens(create_request(3, PROMPT)) == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("caching", [True, False])
def test_outputs_do_not_depend_on_the_cache(depth, caching):
    """Sixteen prompts, twice."""
    driver = create_driver(pipeline_depth=depth, prefix_caching=caching, num_blocks=60)
    requests = [create_request(i, [i % 4] * 9 + [i % 2] * 6, max_tokens=5) for i in range(1, 33)]
    for request in requests:
        driver.core.add(request)
    driver.run()
    for request in requests:
        assert driver.outputs[request.sequence_ids[0]] == expected_output(request, 0)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_two_equal_prompts_in_flight_leave_no_freed_block_in_a_table(depth):
    """The copy that is not indexed is freed with its own holder."""
    driver = create_driver(pipeline_depth=depth, num_blocks=30, prefix_caching=True)
    driver.core.add(create_request(1, range(8), max_tokens=3))
    driver.run()
    for sequence_id in (2, 3):
        driver.core.add(create_request(sequence_id, range(8), max_tokens=6))
    driver.run()  # the driver checks the pool's integrity after every call
    assert driver.outputs[2] == driver.outputs[3] == expected_output(create_request(2, range(8), max_tokens=6), 0)
    assert driver.core.num_free_blocks == driver.core.num_blocks


class TestAFailedSequence:
    """What it computed may be NaN, and nobody builds on it any more."""

    def failing(self, depth: int = 1):
        """Request 1 computes a prefix and goes on; request 2 shares it; then 1 fails."""
        driver = create_driver(pipeline_depth=depth)
        driver.core.add(create_request(1, PROMPT, max_tokens=20))
        driver.plan()
        driver.answer()
        driver.core.add(create_request(2, [*PROMPT, 7], max_tokens=20))
        while len(driver.outputs.get(2, ())) < 3:
            driver.step()
        return driver

    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_ends_with_its_error_and_the_others_go_on(self, depth):
        driver = self.failing(depth)
        before = list(driver.outputs[2])
        while not driver.plans or 1 not in driver.plans[0].row_sequences:
            driver.plan()
        events = driver.answer(fail=frozenset([1]))
        assert [(e.error, e.finish_reason) for e in events if e.sequence_id == 1] == [
            ("non-finite logits", FinishReason.ERROR)
        ]
        driver.run()
        expected = expected_output(create_request(2, [*PROMPT, 7], max_tokens=20), 0)
        assert driver.outputs[2] == expected
        assert expected[: len(before)] == before
        assert driver.finished[2] is FinishReason.LENGTH

    def test_takes_its_blocks_out_of_the_cache(self):
        driver = self.failing()
        probe = create_request(3, [*PROMPT, *driver.outputs[1], 1, 2, 3, 4])
        assert driver.core.num_cached_tokens(probe) > 12
        driver.plan()
        driver.answer(fail=frozenset([1]))
        assert driver.core.num_cached_tokens(probe) == 0

    def test_sets_back_who_shares_a_block_into_fresh_ones(self):
        driver = self.failing()
        shared = set(driver.core.sequence(1).block_table) & set(driver.core.sequence(2).block_table)
        assert len(shared) == 3
        driver.plan()
        driver.answer(fail=frozenset([1]))
        plan = driver.plan()
        assert (plan.finished, plan.preempted) == ([1], [2])
        again = plan.new[0]
        assert (again.sequence_id, again.num_computed_tokens) == (2, 0)
        assert not shared & set(again.block_ids)

    def test_leaves_alone_who_shares_nothing(self):
        driver = self.failing()
        driver.core.add(create_request(3, [1, 2, 3], max_tokens=9))
        driver.step()
        table = list(driver.core.sequence(3).block_table)
        driver.plan()
        driver.answer(fail=frozenset([1]))
        assert driver.core.sequence(3).block_table[: len(table)] == table
        assert driver.core.sequence(3).generation == 0

    def test_that_only_shared_a_prefix_leaves_the_prefix_in_the_cache(self):
        driver = self.failing()
        driver.plan()
        driver.answer(fail=frozenset([2]))
        assert driver.core.num_cached_tokens(create_request(3, PROMPT)) == 12
        assert driver.core.sequence(1).generation == 0
