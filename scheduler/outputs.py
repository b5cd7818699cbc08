"""The seam between service and engine: what a client's request becomes, and what comes back of it.

Values only, and the two protocols that the service is written against. Token ids, no text: the engine never sees a
string that a client wrote, the service never sees a block or a plan. Every output of an accepted submission ends in
exactly one `OutputEvent` whose `finish` is set.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from scheduler.core.plan import PromptLogprobs, TokenLogprobs
from scheduler.core.request import SamplingParams

if TYPE_CHECKING:
    from scheduler.inspection import Inspection
    from scheduler.metrics import Metrics


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling defaults of the model's generation_config; None where it names none."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served, as its executors describe it."""

    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int  # tokens of prompt and output together, of the longest executor
    block_size: int
    dtype: str
    kv_dtype: str
    eos_token_ids: tuple[int, ...]
    defaults: GenerationDefaults
    capacity_tokens: int  # (num_blocks - 1) * block_size of the roomiest executor
    max_num_seqs: int  # of the widest executor
    deterministic: bool
    device: str


@dataclass(frozen=True, slots=True)
class Submission:
    """One accepted request, all defaults resolved."""

    prompt_token_ids: tuple[int, ...]  # at least one
    n: int
    beam_width: int | None
    max_tokens: int  # per output
    sampling: SamplingParams
    priority: int
    cache_salt: str
    queue_timeout: float  # seconds
    tenant: str
    request_id: str = ""  # the client's own name for it, or the one chosen for it: to show, never to find it by
    traceparent: str = ""  # W3C Trace Context of its span; empty: not traced


class EndReason(enum.Enum):
    """Why an output ended: the core's reasons, whose values are the same, and the queue's own."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class OutputFinish:
    """The last word on one output."""

    reason: EndReason
    error: str | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    executors: tuple[str, ...] = ()  # incarnations that computed it, in order
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    cumulative_logprob: float | None = None  # beams


@dataclass(frozen=True, slots=True)
class OutputEvent:
    """News of one output: tokens from output position `first_position` on, final."""

    index: int  # in [0, n)
    first_position: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token, where asked for
    prompt_logprobs: PromptLogprobs | None = None
    finish: OutputFinish | None = None


class ExecutorState(enum.Enum):
    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"
    REFUSED = "refused"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class ExecutorLoad:
    """One executor as the scheduler sees it."""

    target: str
    incarnation: str
    state: ExecutorState
    reason: str = ""
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0  # usable: the null block is not counted
    num_free_blocks: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_preemptions: int = 0
    plans_in_flight: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class WaitingRequests:
    """Requests of one tenant and one priority that wait, and why the first of them does."""

    tenant: str
    priority: int
    num_requests: int
    reason: str


@dataclass(frozen=True, slots=True)
class Load:
    """What runs, what waits and why."""

    executors: tuple[ExecutorLoad, ...] = ()
    queue_length: int = 0
    queue_tokens: int = 0
    queue_limit: int = 0
    waiting: tuple[WaitingRequests, ...] = ()  # in the order in which their first ones will be served
    draining: bool = False


class EngineError(Exception):
    """Why the engine takes or keeps no request; the service turns each kind into its status."""


class QueueFull(EngineError):
    """The queue is at its limit, a sentence naming it; room is likely after `retry_after_seconds`."""

    def __init__(self, limit: str, retry_after_seconds: float) -> None:
        super().__init__(f"the queue is full ({limit})")
        self.limit = limit
        self.retry_after_seconds = retry_after_seconds


class NoExecutor(EngineError):
    """Nothing to run on yet."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"no executor: {reason}")
        self.reason = reason


class Draining(EngineError):
    """The scheduler is shutting down."""

    def __init__(self) -> None:
        super().__init__("the scheduler is draining and takes no new request")


class DoesNotFit(EngineError):
    """No known executor could ever run it; the message names both numbers."""


class UnknownExecutor(EngineError):
    """No executor of this name has joined."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(f"no executor {name!r} has joined; there are {', '.join(known) or 'none'}")
        self.name = name


class ExecutorLost(EngineError):
    """Raised by `Engine.run` when the only executor is gone and the configuration says to stop then."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the executor was lost: {reason}")
        self.reason = reason


class Ticket(Protocol):
    """One submission in flight. Iterating yields everything new since the last read; it ends after the last finish."""

    def __aiter__(self) -> AsyncIterator[list[OutputEvent]]: ...


TicketT = TypeVar("TicketT", bound=Ticket)


class ServingEngine(Protocol[TicketT]):
    """What service and server need of `scheduler.engine.Engine`. One event loop; nothing here blocks."""

    @property
    def model(self) -> ModelInfo | None:
        """None before the first executor."""

    @property
    def tokenizer_files(self) -> Mapping[str, bytes]:
        """By file name (see executor.proto, TokenizerChunk); set with `model`."""

    @property
    def metrics(self) -> Metrics:
        """Its own counts, to which service and server add theirs."""

    @property
    def ready(self) -> bool:
        """An executor is ready, so a submission would run."""

    def submit(self, submission: Submission) -> TicketT:
        """Raises QueueFull, NoExecutor, Draining or DoesNotFit."""

    def finish(self, ticket: TicketT, index: int, num_output_tokens: int) -> None:
        """A stop string was found: the output ends with STOP after so many tokens. Its finish event still comes."""

    def abort(self, ticket: TicketT) -> None:
        """Ends what has not ended, with CANCELLED. Idempotent."""

    def drain(self) -> None:
        """Takes no new submission from now on."""

    def drain_executor(self, name: str) -> str:
        """The executor of this incarnation or address takes nothing new, and stops when what it runs is over or its
        grace period is; returns its incarnation. Raises UnknownExecutor."""

    def load(self) -> Load: ...

    def inspect(self) -> Inspection:
        """Everything an onlooker may see; it costs as much as a step, so ask through an Inspector."""

    def stalled(self) -> str | None:
        """Why nothing is planned although work waits; None while all is well."""

    async def wait_change(self) -> None:
        """Returns once the state of an executor, `model` or a drain may have changed."""

    async def run(self) -> None:
        """Serves until cancelled. Raises ExecutorLost where the configuration says to stop then."""
