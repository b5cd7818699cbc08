"""An engine without a model: it does what a script of the test says, and remembers what it was told.

Implements scheduler.outputs.ServingEngine. By default a request is answered at once, with the tokens in `answer`.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from scheduler.core.block_map import BlockMap, Holder
from scheduler.core.plan import PromptLogprobs, TokenLogprobs
from scheduler.inspection import ExecutorView, Inspection, Owner
from scheduler.metrics import Metrics
from scheduler.outputs import (
    EndReason,
    ExecutorLoad,
    ExecutorState,
    GenerationDefaults,
    Load,
    ModelInfo,
    OutputEvent,
    OutputFinish,
    Submission,
    UnknownExecutor,
    WaitingRequests,
)
from scheduler.step_log import StepRecord
from tests.services.tokenizers_for_tests import CHAT_TEMPLATE, byte_level, reference

TOKENIZER_FILES = byte_level(CHAT_TEMPLATE)
LIBRARY = reference(TOKENIZER_FILES)
EOS = LIBRARY.token_to_id("</s>")


def make_model(**overrides: object) -> ModelInfo:
    model = ModelInfo(
        name="tiny",
        fingerprint="f1",
        vocab_size=LIBRARY.get_vocab_size(),
        max_model_len=256,
        block_size=16,
        dtype="float32",
        kv_dtype="float32",
        eos_token_ids=(EOS,),
        defaults=GenerationDefaults(temperature=0.2, top_p=0.9),
        capacity_tokens=512,
        max_num_seqs=8,
        deterministic=True,
        device="cpu",
    )
    return replace(model, **overrides)  # type: ignore[arg-type]


class FakeTicket:
    """Merges what its reader has not taken, as the seam demands."""

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.num_tokens = [0] * submission.n
        self.ended = [False] * submission.n
        self.aborted = False
        self.finished: list[tuple[int, int]] = []  # (index, num_output_tokens) that the service found
        self.num_reads = 0
        self._unread: list[OutputEvent] = []
        self._news = asyncio.Event()

    def put(
        self,
        token_ids: Sequence[int] = (),
        *,
        index: int = 0,
        reason: EndReason | None = None,
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: PromptLogprobs | None = None,
        **finish: object,
    ) -> None:
        """News of one output; with a reason its last."""
        if self.ended[index]:
            return
        first = self.num_tokens[index]
        self.num_tokens[index] += len(token_ids)
        end = None
        if reason is not None:
            self.ended[index] = True
            end = OutputFinish(reason, num_output_tokens=self.num_tokens[index], **finish)  # type: ignore[arg-type]
        self._unread.append(OutputEvent(index, first, tuple(token_ids), tuple(logprobs), prompt_logprobs, end))
        self._news.set()

    def end_all(self, reason: EndReason, **finish: object) -> None:
        for index in range(self.submission.n):
            self.put(index=index, reason=reason, **finish)

    async def __aiter__(self) -> AsyncIterator[list[OutputEvent]]:
        while True:
            await self._news.wait()
            self._news.clear()
            unread, self._unread = self._unread, []
            self.num_reads += 1
            yield unread
            if all(self.ended) and not self._unread:
                return


Script = Callable[[FakeTicket], None]


def answer(*token_ids: int, reason: EndReason = EndReason.STOP, **finish: object) -> Script:
    """A script: these tokens for each output, then the end."""

    def script(ticket: FakeTicket) -> None:
        for index in range(ticket.submission.n):
            ticket.put(token_ids, index=index, reason=reason, **finish)

    return script


def text_ids(text: str) -> list[int]:
    return LIBRARY.encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]


def hang(ticket: FakeTicket) -> None:
    """A script: nothing ever comes."""


@dataclass
class FakeEngine:
    model: ModelInfo | None = field(default_factory=make_model)
    tokenizer_files: Mapping[str, bytes] = field(default_factory=lambda: TOKENIZER_FILES)
    metrics: Metrics = field(default_factory=Metrics)
    script: Script = field(default_factory=lambda: answer(*text_ids("Hello world"), EOS))
    refusal: Exception | None = None
    ready: bool = True
    why_stalled: str | None = None
    draining: bool = False
    drained_executors: list[str] = field(default_factory=list)
    waiting: tuple[WaitingRequests, ...] = (WaitingRequests("default", 0, 2, "no free block"),)
    tickets: list[FakeTicket] = field(default_factory=list)
    failure: asyncio.Future[None] | None = None
    inspections: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def submit(self, submission: Submission) -> FakeTicket:
        if self.refusal is not None:
            raise self.refusal
        ticket = FakeTicket(submission)
        self.tickets.append(ticket)
        self.script(ticket)
        return ticket

    def finish(self, ticket: FakeTicket, index: int, num_output_tokens: int) -> None:
        ticket.finished.append((index, num_output_tokens))
        ticket.put(index=index, reason=EndReason.STOP)

    def abort(self, ticket: FakeTicket) -> None:
        ticket.aborted = ticket.aborted or not all(ticket.ended)
        ticket.end_all(EndReason.CANCELLED)

    def drain(self) -> None:
        self.change(draining=True)

    def drain_executor(self, name: str) -> str:
        if name != "here:1":
            raise UnknownExecutor(name, ["here:1"])
        self.drained_executors.append(name)
        return "i1"

    def load(self) -> Load:
        executor = ExecutorLoad("here:1", "i1", ExecutorState.READY, num_running=3, num_blocks=10, num_free_blocks=4)
        return Load((executor,), queue_length=2, queue_tokens=70, queue_limit=9, waiting=self.waiting)

    def inspect(self) -> Inspection:
        """Two sequences of one request share block 1; block 4 keeps a prefix; the null block and 5 to 10 are free."""
        self.inspections += 1
        shape = {"output_ids": (7, 8), "priority": 0, "num_prompt_tokens": 17, "num_cached_tokens": 0}
        holders = tuple(
            Holder(sequence_id=i, num_tokens=19, num_computed_tokens=18, num_blocks=2, num_preemptions=0, **shape)  # type: ignore[arg-type]
            for i in (7, 8)
        )
        block_map = BlockMap(
            block_size=16,
            holders=holders,
            holder_of=array("H", [0, 1, 1, 2, 0, 0, 0, 0, 0, 0, 0]),
            ref_cnt=array("H", [0, 2, 1, 1, 0, 0, 0, 0, 0, 0, 0]),
            num_filled=bytes([0, 16, 2, 2, 16, 0, 0, 0, 0, 0, 0]),
        )
        owners = (Owner("ask-1", "acme", 0), Owner("ask-1", "acme", 1))
        steps = (StepRecord(1, 0, 1, 17, 1, 0, 0, 0.25), StepRecord(2, 2, 0, 0, 0, 0, 1, None))
        view = ExecutorView("here:1", block_map, owners, 8, 64, num_sampled_tokens=4, steps=steps)
        return Inspection(float(self.inspections), "tiny", self.load(), (view,))

    def stalled(self) -> str | None:
        return self.why_stalled

    def change(self, **state: object) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_change(self) -> None:
        await self._changed.wait()

    async def run(self) -> None:
        """Until cancelled, or until the test calls `fail`."""
        self.failure = asyncio.get_running_loop().create_future()
        await self.failure

    def fail(self, error: Exception) -> None:
        for ticket in self.tickets:
            ticket.end_all(EndReason.ERROR, error=str(error))
        assert self.failure is not None
        self.failure.set_exception(error)
