"""With work and nothing in flight, something is planned; and what keeps a request waiting is told."""

from __future__ import annotations

import random

import pytest

from scheduler.core.request import DoesNotFit
from tests.core.factories import create_driver, create_request


def random_request(r: random.Random, sequence_id: int):
    width = r.choice([None, None, None, 1, 2, 3])
    return create_request(
        sequence_id,
        [r.randint(0, 2) for _ in range(r.randint(1, 14))],
        n=r.randint(1, width or 3),
        beam_width=width,
        max_tokens=r.randint(1, 10),
        priority=r.choice([0, 0, 1]),
    )


def random_driver(r: random.Random):
    max_num_seqs = r.randint(1, 6)
    return create_driver(
        block_size=r.randint(1, 5),
        num_blocks=r.randint(4, 24),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + r.randint(0, 6),
        pipeline_depth=r.randint(1, 3),
        prefix_caching=r.random() < 0.7,
    )


@pytest.mark.parametrize("seed", range(60))
def test_something_is_planned_whenever_work_is_there_and_nothing_is_in_flight(seed):
    r = random.Random(seed)
    driver = random_driver(r)
    ids: list[int] = []
    for step in range(120):
        if r.random() < 0.3:
            request = random_request(r, 10 * step + 1)
            try:
                driver.core.add(request)
            except DoesNotFit:
                continue
            ids.extend(request.sequence_ids)
        elif r.random() < 0.1 and ids:
            driver.core.abort(r.choice(ids))
        if not driver.plans:
            assert (driver.plan() is not None) == driver.core.has_work
        elif r.random() < 0.5:
            driver.plan()
        else:
            fail = frozenset(driver.plans[0].row_sequences[:1]) if r.random() < 0.05 else frozenset()
            driver.answer(fail)
    driver.run()
    assert driver.core.num_free_blocks == driver.core.num_blocks


class TestAnObstacle:
    """What keeps a request from running soon, for a driver that holds it back until there is none."""

    def test_is_none_for_an_idle_core(self):
        assert create_driver().core.obstacle(create_request(1, range(100))) is None

    def test_is_a_lack_of_seats_those_of_waiting_ones_counted(self):
        driver = create_driver(max_num_seqs=4)
        driver.core.add(create_request(1, n=2))
        driver.step()
        driver.core.add(create_request(3, [1]))
        assert driver.core.obstacle(create_request(5, [2])) is None
        assert driver.core.obstacle(create_request(5, [2], n=2)) == "3 of 4 sequences run"
        assert driver.core.obstacle(create_request(5, [2], beam_width=2)) == "3 of 4 sequences run"

    def test_is_a_lack_of_blocks_with_one_kept_for_each_that_runs(self):
        driver = create_driver(num_blocks=8, block_size=4)
        driver.core.add(create_request(1, range(7)))
        driver.step()  # holds two blocks of seven, and its next token fills the second
        assert driver.core.obstacle(create_request(2, range(50, 66))) is None
        assert "5 KV blocks are needed; of 5 free ones" in driver.core.obstacle(create_request(2, range(50, 67)))

    def test_is_smaller_by_the_blocks_that_are_shared(self):
        driver = create_driver(num_blocks=8, block_size=4)
        driver.core.add(create_request(1, range(7), max_tokens=20))
        driver.step()
        assert driver.core.obstacle(create_request(2, [*range(4), *range(50, 66)])) is None
        assert driver.core.obstacle(create_request(2, [*range(5, 9), *range(50, 66)])) is not None
