"""From values to the messages that a client gets. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from octavo.v1 import generation_pb2 as pb

from scheduler.core.block_map import Holder
from scheduler.core.plan import PromptLogprobs, TokenLogprobs
from scheduler.detokenizer import Pieces
from scheduler.inspection import ExecutorView, Inspection, Owner
from scheduler.output import OutputDelta, OutputEnd
from scheduler.outputs import EndReason, ExecutorLoad, ExecutorState, Load, ModelInfo, Submission, WaitingRequests

FINISH_REASONS = {
    EndReason.STOP: pb.FINISH_REASON_STOP,
    EndReason.LENGTH: pb.FINISH_REASON_LENGTH,
    EndReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    EndReason.ERROR: pb.FINISH_REASON_ERROR,
    EndReason.TIMEOUT: pb.FINISH_REASON_TIMEOUT,
}
EXECUTOR_STATES = {
    ExecutorState.CONNECTING: pb.EXECUTOR_STATE_CONNECTING,
    ExecutorState.READY: pb.EXECUTOR_STATE_READY,
    ExecutorState.DRAINING: pb.EXECUTOR_STATE_DRAINING,
    ExecutorState.REFUSED: pb.EXECUTOR_STATE_REFUSED,
    ExecutorState.LOST: pb.EXECUTOR_STATE_LOST,
}


def started(request_id: str, submission: Submission) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        started=pb.Started(
            request_id=request_id,
            num_prompt_tokens=len(submission.prompt_token_ids),
            seed=submission.sampling.seed,
        )
    )


def prompt_logprobs(
    news: PromptLogprobs, prompt: Sequence[int], pieces: Pieces, max_entries: int
) -> Iterator[pb.GenerateResponse]:
    """In messages of at most `max_entries` positions."""
    for start in range(0, len(news.entries), max_entries):
        entries = news.entries[start : start + max_entries]
        first = news.first_position + start
        tokens = prompt[first : first + len(entries)]
        yield pb.GenerateResponse(
            prompt_logprobs=pb.PromptLogprobs(first_position=first, logprobs=_logprobs(tokens, entries, pieces))
        )


def delta(news: OutputDelta, pieces: Pieces) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        delta=pb.Delta(
            index=news.index,
            first_position=news.first_position,
            token_ids=news.token_ids,
            text=news.text,
            logprobs=_logprobs(news.token_ids, news.logprobs, pieces) if news.logprobs else None,
        )
    )


def finished(end: OutputEnd, submission: Submission) -> pb.GenerateResponse:
    finish = end.finish
    return pb.GenerateResponse(
        finished=pb.Finished(
            index=end.index,
            reason=FINISH_REASONS[end.reason],
            error=finish.error if end.reason in (EndReason.ERROR, EndReason.TIMEOUT) else None,
            stop=end.stop,
            stop_token_id=end.stop_token_id,
            usage=pb.Usage(
                num_prompt_tokens=len(submission.prompt_token_ids),
                num_output_tokens=end.num_output_tokens,
                num_cached_tokens=finish.num_cached_tokens,
            ),
            timings=pb.Timings(
                queue_seconds=finish.queue_seconds,
                prefill_seconds=finish.prefill_seconds,
                decode_seconds=finish.decode_seconds,
            ),
            num_preemptions=finish.num_preemptions,
            executors=finish.executors,
            seed=submission.sampling.seed,
            cumulative_logprob=finish.cumulative_logprob,
        )
    )


def model(info: ModelInfo, *, has_chat_template: bool) -> pb.GetModelResponse:
    defaults = info.defaults
    return pb.GetModelResponse(
        name=info.name,
        fingerprint=info.fingerprint,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        block_size=info.block_size,
        dtype=info.dtype,
        kv_dtype=info.kv_dtype,
        eos_token_ids=info.eos_token_ids,
        has_chat_template=has_chat_template,
        default_sampling=pb.SamplingParams(
            temperature=1.0 if defaults.temperature is None else defaults.temperature,
            top_k=defaults.top_k or 0,
            top_p=1.0 if defaults.top_p is None else defaults.top_p,
            min_p=defaults.min_p or 0.0,
            repetition_penalty=1.0 if defaults.repetition_penalty is None else defaults.repetition_penalty,
        ),
    )


def load(news: Load, *, draining: bool) -> pb.GetLoadResponse:
    return pb.GetLoadResponse(
        executors=map(_executor, news.executors),
        queue_length=news.queue_length,
        queue_tokens=news.queue_tokens,
        queue_limit=news.queue_limit,
        waiting=map(_waiting, news.waiting),
        draining=draining or news.draining,
    )


def inspection(news: Inspection, *, draining: bool) -> pb.WatchBlocksResponse:
    return pb.WatchBlocksResponse(
        seconds=news.seconds,
        model=news.model,
        load=load(news.load, draining=draining),
        executors=map(_block_map, news.executors),
    )


def _block_map(news: ExecutorView) -> pb.BlockMap:
    block_map = news.block_map
    return pb.BlockMap(
        target=news.target,
        block_size=block_map.block_size,
        sequences=map(_sequence, block_map.holders, news.owners),
        holders=block_map.holder_of,
        ref_counts=block_map.ref_cnt,
        num_filled=block_map.num_filled,
        max_num_seqs=news.max_num_seqs,
        max_num_batched_tokens=news.max_num_batched_tokens,
        num_sampled_tokens=news.num_sampled_tokens,
        steps=[pb.StepInfo(**record._asdict()) for record in news.steps],
    )


def _sequence(holder: Holder, owner: Owner | None) -> pb.RunningSequence:
    return pb.RunningSequence(
        sequence_id=holder.sequence_id,
        group=holder.output_ids[0],
        request_id=owner.request_id if owner else "",
        tenant=owner.tenant if owner else "",
        index=owner.index if owner else 0,
        priority=holder.priority,
        num_prompt_tokens=holder.num_prompt_tokens,
        num_tokens=holder.num_tokens,
        num_computed_tokens=holder.num_computed_tokens,
        num_cached_tokens=holder.num_cached_tokens,
        num_blocks=holder.num_blocks,
        num_preemptions=holder.num_preemptions,
    )


def _waiting(news: WaitingRequests) -> pb.WaitingReason:
    return pb.WaitingReason(
        reason=news.reason, num_requests=news.num_requests, tenant=news.tenant, priority=news.priority
    )


def _executor(news: ExecutorLoad) -> pb.ExecutorLoad:
    return pb.ExecutorLoad(
        target=news.target,
        incarnation=news.incarnation,
        state=EXECUTOR_STATES[news.state],
        reason=news.reason,
        num_running=news.num_running,
        num_waiting=news.num_waiting,
        num_blocks=news.num_blocks,
        num_free_blocks=news.num_free_blocks,
        prefix_queries=news.prefix_queries,
        prefix_hits=news.prefix_hits,
        num_preemptions=news.num_preemptions,
        plans_in_flight=news.plans_in_flight,
        steps=news.steps,
    )


def _logprobs(token_ids: Sequence[int], entries: Sequence[TokenLogprobs], pieces: Pieces) -> Iterator[pb.TokenLogprobs]:
    for token_id, entry in zip(token_ids, entries, strict=False):
        yield pb.TokenLogprobs(
            token_id=token_id,
            logprob=entry.logprob,
            rank=entry.rank,
            text=pieces.text(token_id),
            top=[
                pb.TopLogprob(token_id=other, logprob=logprob, text=pieces.text(other)) for other, logprob in entry.top
            ],
        )
