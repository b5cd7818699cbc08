"""What a client gets: the events of a stream, a whole completion, and what is served and runs, as plain values."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from octavo.errors import RequestFailed
from octavo.v1 import generation_pb2 as pb


class FinishReason(enum.Enum):
    """Why an output ended. LENGTH: max_tokens, the model's own bound, or all KV blocks there are. UNKNOWN: a reason of
    a newer server."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"


class TopLogprob(NamedTuple):
    token_id: int
    logprob: float
    text: str


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The token at one position, its log probability and rank (1 is best), and the best tokens there."""

    token_id: int
    logprob: float
    rank: int
    text: str
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True)
class Started:
    """The request was accepted."""

    request_id: str
    num_prompt_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of the prompt's tokens from position `first_position` on."""

    first_position: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens and new text of output `index`. Text may lag behind its tokens; both are final."""

    index: int
    first_position: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int  # prompt tokens found in the prefix cache


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds: waiting, from the first step to the first token, from there to the last token."""

    queue: float
    prefill: float
    decode: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The last word on output `index`."""

    index: int
    reason: FinishReason
    error: str | None  # with ERROR: what went wrong; with TIMEOUT: what it waited for
    stop: str | None  # the stop string found
    stop_token_id: int | None
    usage: Usage
    timings: Timings
    num_preemptions: int
    executors: tuple[str, ...]
    seed: int
    cumulative_logprob: float | None  # beam search


Event = Started | PromptLogprobs | Delta | Finished


@dataclass(frozen=True, slots=True)
class Output:
    """One output, whole."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finished: Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """All outputs of a request. The properties speak of the first, which most often is the only one."""

    request_id: str
    seed: int
    prompt_logprobs: tuple[TokenLogprobs, ...]  # of positions [1, num_prompt_tokens)
    outputs: tuple[Output, ...]

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finished.reason

    @property
    def usage(self) -> Usage:
        return self.outputs[0].finished.usage

    @property
    def timings(self) -> Timings:
        return self.outputs[0].finished.timings


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What an absent sampling argument means for the model."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float


@dataclass(frozen=True, slots=True)
class Model:
    """What is served."""

    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    block_size: int
    dtype: str
    kv_dtype: str
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    default_sampling: SamplingDefaults


class ExecutorState(enum.Enum):
    UNSPECIFIED = "unspecified"
    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"
    REFUSED = "refused"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class ExecutorLoad:
    """One executor; see generation.proto for each field."""

    target: str
    incarnation: str
    state: ExecutorState
    reason: str
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    prefix_queries: int
    prefix_hits: int
    num_preemptions: int
    plans_in_flight: int
    steps: int


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

    executors: tuple[ExecutorLoad, ...]
    queue_length: int
    queue_tokens: int
    queue_limit: int
    waiting: tuple[WaitingRequests, ...]  # in the order in which their first ones will be served
    draining: bool


class Gathered:
    """Collects the events of one stream."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._deltas: dict[int, list[Delta]] = {}
        self._finished: dict[int, Finished] = {}

    def add(self, event: Event) -> None:
        match event:
            case Started():
                self._started = event
            case PromptLogprobs():
                self._prompt_logprobs.extend(event.logprobs)
            case Delta():
                self._deltas.setdefault(event.index, []).append(event)
            case Finished():
                self._finished[event.index] = event

    def completion(self) -> Completion:
        """Once the stream has ended. Raises RequestFailed."""
        assert self._started is not None, "a stream that ended well has begun"
        outputs = tuple(_output(self._deltas.get(index, ()), self._finished[index]) for index in sorted(self._finished))
        completion = Completion(self._started.request_id, self._started.seed, tuple(self._prompt_logprobs), outputs)
        for end in self._finished.values():
            if end.reason in (FinishReason.ERROR, FinishReason.TIMEOUT):
                why = end.error or "it waited longer than its queue_timeout"
                raise RequestFailed(f"output {end.index} ended with {end.reason.name}: {why}", completion)
        return completion


def _output(deltas: Iterable[Delta], finished: Finished) -> Output:
    deltas = tuple(deltas)
    return Output(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        finished=finished,
    )


_REASONS = {
    number: FinishReason[name.removeprefix("FINISH_REASON_")]
    for name, number in pb.FinishReason.items()
    if number != pb.FINISH_REASON_UNSPECIFIED
}
_STATES = {number: ExecutorState[name.removeprefix("EXECUTOR_STATE_")] for name, number in pb.ExecutorState.items()}


def event_of(message: pb.GenerateResponse) -> Event | None:
    """None: an event of a newer server."""
    match message.WhichOneof("event"):
        case "started":
            started = message.started
            return Started(started.request_id, started.num_prompt_tokens, started.seed)
        case "prompt_logprobs":
            prompt = message.prompt_logprobs
            return PromptLogprobs(prompt.first_position, _logprobs(prompt.logprobs))
        case "delta":
            delta = message.delta
            ids = tuple(delta.token_ids)
            return Delta(delta.index, delta.first_position, ids, delta.text, _logprobs(delta.logprobs))
        case "finished":
            return _finished(message.finished)
        case _:
            return None


def model_of(message: pb.GetModelResponse) -> Model:
    defaults = message.default_sampling
    return Model(
        name=message.name,
        fingerprint=message.fingerprint,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        block_size=message.block_size,
        dtype=message.dtype,
        kv_dtype=message.kv_dtype,
        eos_token_ids=tuple(message.eos_token_ids),
        has_chat_template=message.has_chat_template,
        default_sampling=SamplingDefaults(
            defaults.temperature, defaults.top_k, defaults.top_p, defaults.min_p, defaults.repetition_penalty
        ),
    )


def load_of(message: pb.GetLoadResponse) -> Load:
    return Load(
        executors=tuple(map(_executor_load, message.executors)),
        queue_length=message.queue_length,
        queue_tokens=message.queue_tokens,
        queue_limit=message.queue_limit,
        waiting=tuple(WaitingRequests(w.tenant, w.priority, w.num_requests, w.reason) for w in message.waiting),
        draining=message.draining,
    )


def _finished(message: pb.Finished) -> Finished:
    usage, timings = message.usage, message.timings
    return Finished(
        index=message.index,
        reason=_REASONS.get(message.reason, FinishReason.UNKNOWN),
        error=message.error if message.HasField("error") else None,
        stop=message.stop if message.HasField("stop") else None,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        usage=Usage(usage.num_prompt_tokens, usage.num_output_tokens, usage.num_cached_tokens),
        timings=Timings(timings.queue_seconds, timings.prefill_seconds, timings.decode_seconds),
        num_preemptions=message.num_preemptions,
        executors=tuple(message.executors),
        seed=message.seed,
        cumulative_logprob=message.cumulative_logprob if message.HasField("cumulative_logprob") else None,
    )


def _logprobs(entries: Iterable[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            token_id=entry.token_id,
            logprob=entry.logprob,
            rank=entry.rank,
            text=entry.text,
            top=tuple(TopLogprob(top.token_id, top.logprob, top.text) for top in entry.top),
        )
        for entry in entries
    )


def _executor_load(message: pb.ExecutorLoad) -> ExecutorLoad:
    return ExecutorLoad(
        target=message.target,
        incarnation=message.incarnation,
        state=_STATES.get(message.state, ExecutorState.UNSPECIFIED),
        reason=message.reason,
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_blocks=message.num_blocks,
        num_free_blocks=message.num_free_blocks,
        prefix_queries=message.prefix_queries,
        prefix_hits=message.prefix_hits,
        num_preemptions=message.num_preemptions,
        plans_in_flight=message.plans_in_flight,
        steps=message.steps,
    )
