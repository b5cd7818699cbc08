"""Any order of requests, forks, ends, errors and lost executors, in pools so small that everything collides."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.core.request import DoesNotFit, FinishReason, Request
from scheduler.core.scheduler import Scheduler
from tests.core.factories import Driver, FakeExecutor, create_core, create_driver, create_request, expected_output

PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=14)


def check_block_map(core: Scheduler) -> None:
    """The picture agrees with the tables, whatever was shared, copied or taken back."""
    block_map, size = core.block_map(), core.config.block_size
    assert [bool(place) for place in block_map.holder_of] == [count > 0 for count in block_map.ref_cnt]
    assert sum(block_map.ref_cnt) == sum(holder.num_blocks for holder in block_map.holders)
    first_holder: dict[int, int] = {}
    num_filled: dict[int, int] = {}
    for place, holder in enumerate(block_map.holders, 1):
        for index, block_id in enumerate(core._sequences[holder.sequence_id].block_table):
            first_holder.setdefault(block_id, place)
            filled = min(size, max(0, holder.num_computed_tokens - index * size))
            num_filled[block_id] = max(filled, num_filled.get(block_id, 0))
    for block_id in range(block_map.num_blocks):
        assert block_map.holder_of[block_id] == first_holder.get(block_id, 0)
        cached = core._kv.pool.hash_of(block_id) is not None
        assert block_map.num_filled[block_id] == num_filled.get(block_id, size * cached)


def undisturbed_beams(request: Request, block_size: int, max_candidates: int | None) -> list[list[int]]:
    driver = create_driver(block_size=block_size, num_blocks=200, max_model_len=64)
    driver.executor.max_candidates = max_candidates
    driver.core.add(request)
    driver.run()
    return [driver.outputs[i] for i in request.sequence_ids]


class CoreMachine(RuleBasedStateMachine):
    """Outputs are followed under the ids they were first given, through every executor that computes them."""

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(4, 14),
        depth=st.integers(1, 3),
        max_num_seqs=st.integers(1, 5),
        extra_tokens=st.integers(0, 6),
        prefix_caching=st.booleans(),
        max_candidates=st.sampled_from([None, None, 0, 1, 2, 3]),
    )
    def start(self, block_size, num_blocks, depth, max_num_seqs, extra_tokens, prefix_caching, max_candidates):
        self.max_candidates = max_candidates
        self.ids = itertools.count(1).__next__
        self.settings = {
            "block_size": block_size,
            "num_blocks": num_blocks,
            "pipeline_depth": depth,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_seqs + extra_tokens,
            "max_model_len": 24,
            "prefix_caching": prefix_caching,
        }
        self.expected: dict[int, list[int]] = {}
        self.told: dict[int, list[int]] = {}
        self.first_id: dict[int, int] = {}  # current id -> the id first given
        self.ended: dict[int, FinishReason | str] = {}
        self.failed: set[int] = set()
        self.join()

    def join(self):
        core = create_core(self.ids, **self.settings)
        self.driver = Driver(core, FakeExecutor(core.config.block_size, max_candidates=self.max_candidates))

    @property
    def core(self):
        return self.driver.core

    def alive(self):
        return sorted(i for i in self.first_id if self.first_id[i] not in self.ended)

    def take(self, events):
        for event in events:
            first = self.first_id[event.sequence_id]
            assert first not in self.ended, "news after the end"
            assert event.first_position == len(self.told[first]), "a token was lost or doubled"
            self.told[first].extend(event.token_ids)
            if event.finish_reason is not None:
                self.ended[first] = event.finish_reason

    @rule(
        prompt=PROMPTS,
        n=st.integers(1, 3),
        beam_width=st.one_of(st.none(), st.none(), st.integers(1, 3)),
        max_tokens=st.integers(1, 9),
        priority=st.integers(0, 1),
        salt=st.sampled_from(["", "", "a"]),
        stop=st.lists(st.integers(0, 6), max_size=1),
        alone=st.sampled_from([False, False, False, True]),
    )
    def add(self, prompt, n, beam_width, max_tokens, priority, salt, stop, alone):
        if beam_width is not None:
            n = min(n, beam_width)
        request = create_request(
            prompt=prompt,
            sequence_ids=tuple(self.ids() for _ in range(n)),
            beam_width=beam_width,
            max_tokens=max_tokens,
            priority=priority,
            cache_salt=salt,
            stop=stop,
            arrival=self.ids(),
            alone=alone,
        )
        try:
            self.core.add(request)
        except DoesNotFit:
            width = beam_width or n
            limit = self.core.capacity
            blocks = -(-(len(prompt) + min(max_tokens, limit - len(prompt))) // self.core.config.block_size)
            assert (
                len(prompt) + 1 > limit
                or width > self.core.config.max_num_seqs
                or (beam_width is not None and width * blocks > self.core.num_blocks)
            )
            return
        bounded = replace(request, max_tokens=min(max_tokens, self.core.capacity - len(prompt)))
        if beam_width is None:
            outputs = [expected_output(bounded, index) for index in range(n)]
        else:
            outputs = undisturbed_beams(bounded, self.core.config.block_size, self.max_candidates)
        for sequence_id, output in zip(request.sequence_ids, outputs, strict=True):
            self.expected[sequence_id] = output
            self.told[sequence_id] = []
            self.first_id[sequence_id] = sequence_id

    @rule()
    def plan(self):
        self.driver.plan()

    @precondition(lambda self: self.driver.plans)
    @rule()
    def answer(self):
        plan = self.driver.plans.pop(0)
        self.take(self.core.update(self.driver.executor.run(plan)))

    @precondition(lambda self: self.driver.plans and self.driver.plans[0].row_sequences)
    @rule(data=st.data())
    def answer_with_an_error(self, data):
        plan = self.driver.plans.pop(0)
        broken = data.draw(st.sampled_from(list(plan.row_sequences)))
        self.take(self.core.update(self.driver.executor.run(plan, frozenset([broken]))))

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def abort(self, data):
        sequence_id = data.draw(st.sampled_from(self.alive()))
        beam = self.core._beams.get(sequence_id)
        for ended in beam.request.sequence_ids if beam else (sequence_id,):
            self.ended[self.first_id[ended]] = "aborted"
        self.core.abort(sequence_id)
        self.core.abort(sequence_id)

    @precondition(lambda self: any(self.told[self.first_id[i]] for i in self.alive()))
    @rule(data=st.data())
    def finish(self, data):
        sequence_id = data.draw(st.sampled_from([i for i in self.alive() if self.told[self.first_id[i]]]))
        first = self.first_id[sequence_id]
        keep = data.draw(st.integers(0, len(self.told[first])))
        del self.told[first][keep:]
        self.ended[first] = "finished"
        self.core.finish(sequence_id, keep)

    @rule()
    def lose_the_executor(self):
        drained = self.core.drain_all()
        assert not self.core.has_work
        assert self.core.num_free_blocks == self.core.num_blocks
        self.join()
        for request, _ in drained:
            fresh = tuple(self.ids() for _ in request.sequence_ids)
            for old, new in zip(request.sequence_ids, fresh, strict=True):
                self.first_id[new] = self.first_id.pop(old)
            self.core.add(replace(request, sequence_ids=fresh))

    @invariant()
    def holds_together(self):
        if hasattr(self, "driver"):
            self.core.check_integrity()
            check_block_map(self.core)

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        for _ in range(3000):
            while self.driver.plan() is not None:
                pass
            if not self.driver.plans:
                break
            self.take(self.core.update(self.driver.executor.run(self.driver.plans.pop(0))))
        assert not self.core.has_work, "work is left, and nothing is planned"
        assert self.core.num_free_blocks == self.core.num_blocks
        assert not self.driver.executor.sequences
        assert self.ended.keys() == self.expected.keys()
        for first, reason in self.ended.items():
            told, expected = self.told[first], self.expected[first]
            if isinstance(reason, FinishReason) and reason is not FinishReason.ERROR:
                assert told == expected
            else:
                assert told == expected[: len(told)]


CoreMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
test_any_order_of_events_keeps_every_token = pytest.mark.timeout(600)(CoreMachine.TestCase)
