"""The state machine that decides every step of one executor.

It is pure: requests, results and ids come in as arguments, plans and events go out, and the same inputs give the same
plans. A driver does the I/O:

    while True:
        while (plan := core.schedule()) is not None:    # up to pipeline_depth plans are unanswered
            send(plan)
        for event in core.update(receive()):
            tell(event)

One rule covers chunked prefill, prefix hits, decode and resumption after preemption: each step gives every sequence
some of its `num_tokens - num_computed_tokens`.
Invariant between calls: `check_integrity()`.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from scheduler.core.beam import BeamSearch, Candidates, Continuation
from scheduler.core.block_hash import hash_chain
from scheduler.core.block_map import BlockMap, draw_block_map
from scheduler.core.config import CoreConfig
from scheduler.core.draft import NO_BLOCKS, Draft, Row, Step
from scheduler.core.integrity import check_integrity
from scheduler.core.kv_cache import KVCache
from scheduler.core.plan import (
    BatchPlan,
    Fork,
    NewSequence,
    PromptLogprobs,
    StepResult,
    TokenEvent,
    TokenLogprobs,
)
from scheduler.core.request import DoesNotFit, FinishReason, Request, Sequence, Status


@dataclass(slots=True)
class Counters:
    """Totals since the core was made."""

    steps: int = 0
    computed_tokens: int = 0  # all that were scheduled
    recomputed_tokens: int = 0  # of those, computed before and lost to preemption
    preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up at first admissions
    prefix_hits: int = 0  # of those, found


class Drained(NamedTuple):
    """A request that must go on elsewhere."""

    request: Request
    in_flight: range  # its positions in plans that were not answered; empty where none held it


class ProtocolError(Exception):
    """The executor's answer does not belong to the plan it answers."""


class Scheduler:
    def __init__(self, config: CoreConfig, next_sequence_id: Callable[[], int]) -> None:
        """`next_sequence_id` names hypotheses of beams; it must never return an id used before."""
        self.config = config
        self.counters = Counters()
        self._next_sequence_id = next_sequence_id
        self._kv = KVCache(config.num_blocks, config.block_size, config.prefix_caching)
        self._sequences: dict[int, Sequence] = {}  # a sibling that has not begun maps to the one that leads it
        self._beams: dict[int, BeamSearch] = {}  # by the ids of their outputs; hypotheses have ids of their own
        self._running: list[Sequence] = []  # in order
        self._waiting: list[Sequence] = []  # in order
        self._in_flight: deque[Step] = deque()
        self._step_id = 0
        self._finished: list[int] = []  # ids that the executor must still be told to forget
        self._preempted: list[int] = []  # likewise
        self._num_alone = 0  # sequences of requests that must be computed alone
        self._alone_is_next = True
        self._chosen: dict[int, int] = {}  # tokens of beams that the executor must still be told

    # What a driver asks.

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that fits."""
        return min(self._kv.capacity, self.config.max_model_len)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        """Plans not yet answered."""
        return len(self._in_flight)

    @property
    def num_blocks(self) -> int:
        """Usable ones."""
        return self._kv.pool.num_usable

    @property
    def num_free_blocks(self) -> int:
        return self._kv.pool.num_free

    @property
    def num_tokens_to_compute(self) -> int:
        """Of all sequences it has, known and not computed."""
        return sum(s.num_tokens - s.num_computed_tokens for s in itertools.chain(self._running, self._waiting))

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._in_flight or self._finished or self._preempted)

    def sequence(self, sequence_id: int) -> Sequence | None:
        """A live output's sequence, to read. A sibling that has not begun gives the one that leads it, a beam search
        its best hypothesis."""
        beam = self._beams.get(sequence_id)
        return beam.live[0] if beam is not None else self._sequences.get(sequence_id)

    def slot_usage(self) -> tuple[int, int]:
        """(slots of the blocks that running sequences hold, those of them that no token fills or will by the plans
        in flight): what paging wastes."""
        filled: dict[int, int] = {}
        for s in self._running:
            for index, block_id in enumerate(s.block_table):
                tokens = min(self.config.block_size, max(0, s.num_computed_tokens - index * self.config.block_size))
                filled[block_id] = max(tokens, filled.get(block_id, 0))
        allocated = len(filled) * self.config.block_size
        return allocated, allocated - sum(filled.values())

    def block_map(self) -> BlockMap:
        """Who holds which block now. Looks at every block: for people, not for every step."""
        return draw_block_map(self._kv, self._running)

    def check_fits(self, request: Request) -> None:
        """Raises DoesNotFit for what no state of this executor could run."""
        length = len(request.prompt_token_ids) + len(request.output_token_ids)
        width = request.beam_width or len(request.sequence_ids)
        if length + 1 > self.config.max_model_len:
            raise DoesNotFit(f"{length} tokens leave no room for output in max_model_len {self.config.max_model_len}")
        if length + 1 > self._kv.capacity:
            raise DoesNotFit(f"{length} tokens leave no room for output in a KV cache of {self._kv.capacity} tokens")
        if width > self.config.max_num_seqs:
            raise DoesNotFit(f"{width} outputs at once exceed max_num_seqs {self.config.max_num_seqs}")
        if request.beam_width is not None:
            needed = width * self._kv.num_blocks_of(length + self._output_limit(request))
            if needed > self.num_blocks:
                raise DoesNotFit(f"{width} beams may need {needed} KV blocks; there are {self.num_blocks}")

    def obstacle(self, request: Request) -> str | None:
        """Why the request would not run in the next plans if it were added now; None if it would, as soon as the token
        budget allows. What is told None is worth adding; the rest waits better outside, where it can go elsewhere."""
        try:
            self.check_fits(request)
        except DoesNotFit as error:  # it may fit another executor
            return str(error)
        if not self._running and not self._waiting:
            return None
        seats = self._seats_taken() + sum(self._seats(s) for s in self._waiting)
        wanted = request.beam_width or len(request.sequence_ids)
        if seats + wanted > self.config.max_num_seqs:
            return f"{seats} of {self.config.max_num_seqs} sequences run"
        cached, free = self._count_cached_blocks(request)
        needed = self._kv.num_blocks_of(len(request.prompt_token_ids) + len(request.output_token_ids)) - cached + free
        promised = self._promised_blocks() + sum(self._kv.num_blocks_of(s.num_tokens) for s in self._waiting)
        if needed + promised + seats + wanted - 1 > self.num_free_blocks:
            return f"{needed} KV blocks are needed; of {self.num_free_blocks} free ones {promised + seats} are promised"
        return None

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens of the prompt that are in the prefix cache now."""
        return self._count_cached_blocks(request)[0] * self.config.block_size

    def _count_cached_blocks(self, request: Request) -> tuple[int, int]:
        hashes = request.prompt_hashes
        if hashes is None:
            hashes = hash_chain(request.prompt_token_ids, self.config.block_size, request.cache_salt, request.adapter)
        return self._kv.count_cached_blocks(hashes, len(request.prompt_token_ids) + len(request.output_token_ids))

    def check_integrity(self) -> None:
        """Raises AssertionError where the state contradicts itself: what tests ask after every step."""
        check_integrity(self)

    # What a driver does.

    def add(self, request: Request) -> None:
        """Takes a request. Raises DoesNotFit."""
        self.check_fits(request)
        (lead_id, sample_index), *siblings = zip(request.sequence_ids, request.samples, strict=True)
        assert not any(i in self._sequences or i in self._beams for i in request.sequence_ids), "an id is used twice"
        sequence = Sequence(
            sequence_id=lead_id,
            sample_index=sample_index,
            request=request,
            token_ids=[*request.prompt_token_ids, *request.output_token_ids],
            num_prompt_tokens=len(request.prompt_token_ids),
            max_tokens=self._output_limit(request),
            siblings=tuple(siblings),
            next_prompt_logprob=max(1, request.num_prompt_logprobs_told),
            block_hashes=list(request.prompt_hashes or ()),
        )
        if request.beam_width is not None:
            beam = sequence.beam = BeamSearch(request, sequence.max_tokens, live=[sequence])
            self._beams.update(dict.fromkeys(request.sequence_ids, beam))
            sequence.sequence_id, sequence.siblings = self._next_sequence_id(), ()
        self._sequences.update(dict.fromkeys(self._ids(sequence), sequence))
        self._num_alone += request.alone
        insort(self._waiting, sequence, key=_order)

    def abort(self, sequence_id: int) -> None:
        """Ends one output at once, whatever it does; its blocks are free when this returns. Unknown ids are ignored:
        the output may just have ended. No event follows."""
        beam = self._beams.get(sequence_id)
        if beam is not None:
            self._end_beams(beam)
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return
        if sequence.siblings:
            del self._sequences[sequence_id]
            self._drop_sibling(sequence, sequence_id)
        else:
            self._end(sequence)

    def acquit(self, sequence_id: int) -> None:
        """An output that was to be computed alone may share plans from now on. Unknown ids are ignored."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None and sequence.request.alone:
            sequence.request = replace(sequence.request, alone=False)
            self._num_alone -= 1

    def finish(self, sequence_id: int, num_output_tokens: int) -> None:
        """The driver ends an output after its first `num_output_tokens` tokens, which were told already (a stop
        string was found). Tokens beyond, told or in flight, count nowhere."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            assert num_output_tokens <= sequence.num_output_tokens
            self._end(sequence)

    def drain_all(self) -> list[Drained]:
        """The executor is gone: gives back every request with the tokens told so far, and forgets everything. An
        output that had begun comes back on its own; beams, of which nothing was told, begin anew."""
        drained = []
        for beam in dict.fromkeys(self._beams.values()):
            drained.append(Drained(beam.request, self._positions_in_flight(beam.live)))
        for s in dict.fromkeys(self._sequences.values()):
            if s.beam is not None:
                continue
            ids = ((s.sequence_id, s.sample_index), *s.siblings)
            request = replace(
                s.request,
                sequence_ids=tuple(sequence_id for sequence_id, _ in ids),
                sample_indices=tuple(sample for _, sample in ids),
                output_token_ids=tuple(s.token_ids[s.num_prompt_tokens :]),
                num_prompt_logprobs_told=s.next_prompt_logprob,
            )
            drained.append(Drained(request, self._positions_in_flight([s])))
        self._sequences.clear()
        self._beams.clear()
        self._running.clear()
        self._waiting.clear()
        self._in_flight.clear()
        self._finished.clear()
        self._preempted.clear()
        self._chosen.clear()
        self._num_alone = 0
        self._kv = KVCache(self.config.num_blocks, self.config.block_size, self.config.prefix_caching)
        return drained

    def _positions_in_flight(self, sequences: list[Sequence]) -> range:
        rows = [row for step in self._in_flight for row in step.rows if row.sequence in sequences]
        if not rows:
            return range(0)
        return range(min(row.start for row in rows), max(max(row.end, row.start + 1) for row in rows))

    def schedule(self) -> BatchPlan | None:
        """The next plan, or None when there is nothing to plan, or enough is unanswered."""
        if len(self._in_flight) >= self.config.pipeline_depth:
            return None
        kinds = self._kinds()
        if not kinds:
            return None
        draft = self._draft(kinds)
        while not draft.rows and not self._in_flight and self._waiting and self._running:
            # Beams that wait for one of their own hold what it needs: somebody must give way, or nobody ever moves.
            self._preempt(self._running[-1])
            draft = self._draft(kinds)
        if not draft.rows and (self._in_flight or not (self._finished or self._preempted)):
            return None
        return self._commit(draft)

    def _kinds(self) -> tuple[bool, ...]:
        """Whose plan may come next, first choice first: that of a request which must be computed alone (True), or of
        all others (False). They take turns, and nothing is in flight beside the former."""
        alone_in_flight = bool(self._in_flight) and self._in_flight[-1].alone
        if not self._num_alone and not alone_in_flight:
            return (False,)
        if self._in_flight and (self._alone_is_next or alone_in_flight):
            return ()
        return (self._alone_is_next, not self._alone_is_next)

    def _draft(self, kinds: tuple[bool, ...]) -> Draft:
        """The first kind of plan that holds anything."""
        for alone in kinds:
            draft = Draft(self.config.max_num_batched_tokens, alone)
            self._schedule_running(draft)
            if not draft.preempted:
                self._schedule_waiting(draft)
            self._kv.end_plan()
            if draft.rows:
                break
        return draft

    def update(self, result: StepResult) -> list[TokenEvent]:
        """Takes the answer to the oldest unanswered plan. Raises ProtocolError when it is not that."""
        if not self._in_flight or self._in_flight[0].step_id != result.step_id:
            expected = self._in_flight[0].step_id if self._in_flight else "none"
            raise ProtocolError(f"result of step {result.step_id}, expected {expected}")
        step = self._in_flight.popleft()
        tokens = dict(result.tokens)
        block_size, finished = self.config.block_size, Status.FINISHED
        events: list[TokenEvent] = []
        for sequence, sequence_id, generation, start, end, samples, pending, parent_id in step.rows:
            sequence.num_in_flight -= 1
            if pending:
                self._kv.settle(sequence, pending)
            if sequence.status is finished or generation < sequence.valid_from:
                continue
            if result.errors and (error := _error(sequence_id, parent_id, result)) is not None:
                self._fail(sequence, error, events)
                continue
            if end // block_size > start // block_size and generation == sequence.generation:
                self._kv.commit(sequence, start, end)
            if result.prompt_logprobs:
                self._tell_prompt_logprobs(sequence, result, events)
            if not samples:
                continue
            if sequence.beam is None and sequence_id in tokens:
                self._append(sequence, tokens[sequence_id], result, events)
            elif sequence.beam is not None and sequence_id in result.candidates:
                self._take_candidates(sequence, result.candidates[sequence_id], events)
            else:  # not an exception: what this result brought to others must still be told
                self._fail(sequence, f"the executor's answer to step {result.step_id} passes it over", events)
        return events

    # Running sequences.

    def _schedule_running(self, draft: Draft) -> None:
        """Gives running sequences their tokens, in order; out of blocks, the last of them give way. One token is set
        aside for each that comes later, so that a long prompt is cut into chunks between decodes instead of holding
        them up."""
        running, running_status = list(self._running), Status.RUNNING
        for index, sequence in enumerate(running):
            if sequence.status is not running_status or (self._num_alone and sequence.request.alone is not draft.alone):
                continue  # gave way to one before it, or has another kind of plan
            num_tokens = self._num_schedulable(sequence)
            if num_tokens > 1:
                num_later = 0 if draft.alone else len(running) - 1 - index
                num_tokens = min(num_tokens, draft.budget - num_later)
            if num_tokens <= 0 or not draft.budget:
                continue
            while (needed := self._kv.num_blocks_needed(sequence, num_tokens)) and needed > self.num_free_blocks:
                victim = self._running[-1]
                self._preempt(victim)
                draft.preempted = True
                if victim is sequence:
                    return
            self._run(sequence, num_tokens, needed > 0, draft)
            if draft.alone:
                return

    def _num_schedulable(self, sequence: Sequence) -> int:
        """Tokens to compute, as far as they are known to be wanted."""
        num_tokens = len(sequence.token_ids) + sequence.num_placeholders
        if sequence.num_placeholders and num_tokens - sequence.num_prompt_tokens >= sequence.max_tokens:
            return 0  # what is in flight ends it
        return num_tokens - sequence.num_computed_tokens

    def _run(self, sequence: Sequence, num_tokens: int, needs_blocks: bool, draft: Draft) -> None:
        """Puts the next `num_tokens` tokens of a running sequence into the plan. In a steady decode this is all that
        is done for it, so each line counts."""
        start = sequence.num_computed_tokens
        end = start + num_tokens
        extension = self._kv.extend(sequence, num_tokens) if needs_blocks else None
        if extension is not None and extension.copy is not None:
            draft.copies.append(extension.copy)
        if not sequence.on_executor:
            draft.new.append(self._introduce(sequence))
        elif extension is not None:
            draft.tables.append(extension.table)
        crosses = end // self.config.block_size > start // self.config.block_size
        pending = self._kv.expect(sequence, start, end) if crosses else NO_BLOCKS
        samples = end == len(sequence.token_ids) + sequence.num_placeholders
        sequence.num_computed_tokens = end
        sequence.num_in_flight += 1
        draft.row_sequences.append(sequence.sequence_id)
        draft.row_tokens.append(num_tokens)
        draft.rows.append(Row(sequence, sequence.sequence_id, sequence.generation, start, end, samples, pending))
        draft.budget -= num_tokens
        if start < sequence.high_water:
            self.counters.recomputed_tokens += min(end, sequence.high_water) - start
        if end > sequence.high_water:
            sequence.high_water = end
        if samples and sequence.beam is None:
            if sequence.siblings:
                self._begin_siblings(sequence, draft)
            sequence.num_placeholders += 1

    def _introduce(self, sequence: Sequence) -> NewSequence:
        sequence.on_executor = True
        self._chosen.pop(sequence.sequence_id, None)
        return NewSequence(
            sequence_id=sequence.sequence_id,
            token_ids=tuple(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_computed_tokens=sequence.num_computed_tokens,
            block_ids=tuple(sequence.block_table),
            sample_index=sequence.sample_index,
            sampling=sequence.request.sampling,
            beam_candidates=sequence.beam.num_candidates if sequence.beam is not None else None,
            traceparent=sequence.request.traceparent,
        )

    def _begin_siblings(self, parent: Sequence, draft: Draft) -> None:
        """The prompt of a request with n > 1 is computed in this step: from its logits the others draw, too."""
        for sequence_id, sample_index in parent.siblings:
            child = self._copy(parent, sequence_id, sample_index)
            child.num_placeholders = child.num_in_flight = 1
            child.on_executor = True
            draft.forks.append(Fork(parent.sequence_id, sequence_id, sample_index))
            position = child.num_computed_tokens
            draft.rows.append(
                Row(child, sequence_id, 0, position, position, True, range(0), parent_id=parent.sequence_id)
            )
        parent.siblings = ()

    def _copy(self, parent: Sequence, sequence_id: int, sample_index: int) -> Sequence:
        """A running sequence with the tokens and blocks of another."""
        child = Sequence(
            sequence_id=sequence_id,
            sample_index=sample_index,
            request=parent.request,
            token_ids=list(parent.token_ids),
            num_prompt_tokens=parent.num_prompt_tokens,
            max_tokens=parent.max_tokens,
            beam=parent.beam,
            status=Status.RUNNING,
            num_computed_tokens=parent.num_computed_tokens,
            admitted=True,
            num_cached_tokens=parent.num_cached_tokens,
            high_water=parent.num_computed_tokens,
            next_prompt_logprob=parent.num_prompt_tokens,
        )
        self._kv.share(parent, child)
        self._sequences[sequence_id] = child
        self._num_alone += child.request.alone
        insort(self._running, child, key=_order)
        return child

    def _preempt(self, sequence: Sequence, keep_late: bool = True) -> None:
        """Takes the blocks of a running sequence and puts it back in its place among the waiting. Tokens of plans in
        flight are valid samples and will be appended, unless `keep_late` is false."""
        self._kv.free(sequence)
        self._running.remove(sequence)
        if sequence.on_executor:
            self._preempted.append(sequence.sequence_id)
            sequence.on_executor = False
        self._chosen.pop(sequence.sequence_id, None)
        sequence.status = Status.WAITING
        sequence.num_computed_tokens = 0
        sequence.generation += 1
        self.counters.preemptions += 1
        if sequence.beam is not None:
            sequence.beam.candidates.pop(sequence.sequence_id, None)
        if sequence.beam is not None or not keep_late:
            sequence.valid_from = sequence.generation
            sequence.num_placeholders = 0
        insort(self._waiting, sequence, key=_order)

    # Waiting sequences.

    def _schedule_waiting(self, draft: Draft) -> None:
        """Admits waiting sequences in order, until one does not fit: nobody overtakes it, so it is next."""
        for sequence in list(self._waiting):
            if sequence.request.alone is not draft.alone or (draft.alone and draft.rows):
                return  # its turn comes with another plan
            if draft.budget <= 0 or self._seats_taken() + self._extra_seats(sequence) > self.config.max_num_seqs:
                return
            if sequence.num_in_flight:
                return  # its late tokens come first
            prefix = self._kv.find_prefix(sequence)
            if prefix is None:
                continue  # its prefix is being computed: passed over for a step
            if not self._fits_whole(sequence, prefix):
                return
            self._admit(sequence, prefix)
            num_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, draft.budget)
            self._run(sequence, num_tokens, self._kv.num_blocks_needed(sequence, num_tokens) > 0, draft)

    def _fits_whole(self, sequence: Sequence, prefix: list[int]) -> bool:
        """There are blocks for the whole known sequence, besides those promised to running ones and one more for each
        of them, so that what is computed now is not thrown away in the next steps. Alone, it always fits. Hypotheses
        of its own search take nothing before it has reported: to keep blocks for them could make it wait forever."""
        if not self._running:
            return True
        needed = self._kv.num_blocks_of(sequence.num_tokens) - len(prefix) + self._kv.num_free_among(prefix)
        spare = sum(s.beam is None or s.beam is not sequence.beam for s in self._running) + len(sequence.siblings)
        return needed + spare + self._promised_blocks() <= self.num_free_blocks

    def _promised_blocks(self) -> int:
        """Blocks that running sequences still lack for the tokens they have."""
        return sum(self._kv.num_blocks_of(s.num_tokens) - len(s.block_table) for s in self._running)

    def _admit(self, sequence: Sequence, prefix: list[int]) -> None:
        self._waiting.remove(sequence)
        self._kv.adopt_prefix(sequence, prefix)
        sequence.status = Status.RUNNING
        insort(self._running, sequence, key=_order)
        if not sequence.admitted:
            sequence.admitted = True
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.counters.prefix_queries += sequence.num_tokens
            self.counters.prefix_hits += sequence.num_computed_tokens

    def _seats_taken(self) -> int:
        beams = {id(s.beam): s.beam.width for s in self._running if s.beam is not None}
        return sum(1 + len(s.siblings) for s in self._running if s.beam is None) + sum(beams.values())

    def _seats(self, sequence: Sequence) -> int:
        return sequence.beam.width if sequence.beam is not None else 1 + len(sequence.siblings)

    def _extra_seats(self, sequence: Sequence) -> int:
        """A beam search takes all its seats with its first hypothesis."""
        if sequence.beam is not None and any(s.status is Status.RUNNING for s in sequence.beam.live):
            return 0
        return self._seats(sequence)

    # Plans and results.

    def _commit(self, draft: Draft) -> BatchPlan:
        self._step_id += 1
        self.counters.steps += 1
        self.counters.computed_tokens += self.config.max_num_batched_tokens - draft.budget
        self._in_flight.append(Step(self._step_id, draft.rows, draft.alone))
        self._alone_is_next = not draft.alone
        plan = BatchPlan(
            step_id=self._step_id,
            finished=self._finished,
            preempted=self._preempted,
            new=draft.new,
            tokens=list(self._chosen.items()),
            tables=draft.tables,
            copies=draft.copies,
            row_sequences=draft.row_sequences,
            row_tokens=draft.row_tokens,
            forks=draft.forks,
        )
        self._finished, self._preempted, self._chosen = [], [], {}
        return plan

    def _append(self, sequence: Sequence, token_id: int, result: StepResult, events: list[TokenEvent]) -> None:
        """A sampled token came: tell it, and end the sequence where it says so."""
        request = sequence.request
        position = len(sequence.token_ids) - sequence.num_prompt_tokens
        sequence.token_ids.append(token_id)
        sequence.num_placeholders -= 1
        reason = None
        if token_id in request.sampling.stop_token_ids and position >= request.sampling.min_tokens:
            reason = FinishReason.STOP
        elif position + 1 >= sequence.max_tokens:
            reason = FinishReason.LENGTH
        logprobs: tuple[TokenLogprobs, ...] = ()
        if result.logprobs and sequence.sequence_id in result.logprobs:
            logprobs = (result.logprobs[sequence.sequence_id],)
        events.append(TokenEvent(sequence.sequence_id, position, (token_id,), logprobs, None, reason))
        if reason is not None:
            self._end(sequence)

    def _tell_prompt_logprobs(self, sequence: Sequence, result: StepResult, events: list[TokenEvent]) -> None:
        """Passes on what was not told before: after a preemption positions are computed again."""
        found = result.prompt_logprobs.get(sequence.sequence_id)
        if found is None:
            return
        skip = sequence.next_prompt_logprob - found.first_position
        if 0 <= skip < len(found.entries):
            fresh = PromptLogprobs(sequence.next_prompt_logprob, found.entries[skip:])
            sequence.next_prompt_logprob += len(fresh.entries)
            events.append(TokenEvent(sequence.sequence_id, sequence.num_output_tokens, prompt_logprobs=fresh))

    def _fail(self, sequence: Sequence, error: str, events: list[TokenEvent]) -> None:
        """The executor could not compute the sequence. What it computed may be bad: nobody builds on it any more."""
        bad = self._kv.forget_computed_by(sequence)
        if sequence.beam is not None:
            ids, told = list(sequence.request.sequence_ids), 0
            self._end_beams(sequence.beam)
        else:
            ids, told = self._ids(sequence), sequence.num_output_tokens
            self._end(sequence)
        events.extend(TokenEvent(i, told, finish_reason=FinishReason.ERROR, error=error) for i in ids)
        for other in list(self._running):
            if other.request is sequence.request or not bad.isdisjoint(other.block_table):
                self._preempt(other, keep_late=False)

    def _ids(self, sequence: Sequence) -> list[int]:
        return [sequence.sequence_id, *(sequence_id for sequence_id, _ in sequence.siblings)]

    # Ends.

    def _end(self, sequence: Sequence) -> None:
        """Frees everything the sequence holds; the executor is told with the next plan."""
        if sequence.status is Status.RUNNING:
            self._kv.free(sequence)
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.status = Status.FINISHED
        self._num_alone -= sequence.request.alone
        if sequence.on_executor:
            self._finished.append(sequence.sequence_id)
            sequence.on_executor = False
        self._chosen.pop(sequence.sequence_id, None)
        for sequence_id in self._ids(sequence):
            self._sequences.pop(sequence_id, None)

    def _drop_sibling(self, lead: Sequence, sequence_id: int) -> None:
        """One of several outputs ends before the prompt is computed. If it is the one that leads, the next one leads
        on under its own id, from what the prefix cache kept."""
        if lead.sequence_id != sequence_id:
            lead.siblings = tuple(s for s in lead.siblings if s[0] != sequence_id)
            return
        if lead.status is Status.RUNNING:
            self._preempt(lead, keep_late=False)
        self._waiting.remove(lead)
        (lead.sequence_id, lead.sample_index), *rest = lead.siblings
        lead.siblings = tuple(rest)
        insort(self._waiting, lead, key=_order)

    def _output_limit(self, request: Request) -> int:
        return min(request.max_tokens, self.capacity - len(request.prompt_token_ids))

    # Beams.

    def _take_candidates(self, sequence: Sequence, candidates: Candidates, events: list[TokenEvent]) -> None:
        """A hypothesis reported; with the last one of its search, the search takes a step."""
        beam = sequence.beam
        assert beam is not None
        beam.candidates[sequence.sequence_id] = candidates
        if not beam.complete:
            return
        going_on = beam.advance()
        if not going_on:
            events.extend(beam.outputs())
            self._end_beams(beam)
            return
        self._continue_beams(beam, going_on)

    def _continue_beams(self, beam: BeamSearch, going_on: list[Continuation]) -> None:
        """Hypotheses that nobody continues end; the first continuation of each goes on in its place, and the others
        become copies of it. All copies are made before any token is appended."""
        parents = {c.parent for c in going_on}
        for loser in [s for s in beam.live if s not in parents]:
            self._end(loser)
        beam.live = []
        for c in going_on:
            in_place = c.parent not in beam.live
            beam.live.append(c.parent if in_place else self._copy(c.parent, self._next_sequence_id(), 0))
        for sequence, c in zip(beam.live, going_on, strict=True):
            sequence.token_ids.append(c.token_id)
            sequence.cumulative_logprob = c.cumulative_logprob
            if sequence.on_executor:
                self._chosen[sequence.sequence_id] = c.token_id

    def _end_beams(self, beam: BeamSearch) -> None:
        for sequence in beam.live:
            self._end(sequence)
        for sequence_id in beam.request.sequence_ids:
            del self._beams[sequence_id]


def _error(sequence_id: int, parent_id: int | None, result: StepResult) -> str | None:
    """What went wrong with a row's sequence; a fork whose parent failed has failed too."""
    if parent_id is not None and parent_id in result.errors:
        return result.errors.get(sequence_id, result.errors[parent_id])
    return result.errors.get(sequence_id)


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order
