"""Core values to messages for executors, and back. The only place that knows both.

Plans are packed columns, so a steady decode step costs little to encode. Raises ProtocolError for an answer whose
columns do not fit together.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.v1 import executor_pb2 as pb

from scheduler.core.plan import (
    BatchPlan,
    NewSequence,
    PromptLogprobs,
    StepResult,
    StepTimings,
    TokenLogprobs,
)
from scheduler.core.request import SamplingParams
from scheduler.core.scheduler import ProtocolError


def plan_to_message(plan: BatchPlan) -> pb.BatchPlan:
    message = pb.BatchPlan(
        step_id=plan.step_id,
        finished=plan.finished,
        preempted=plan.preempted,
        row_sequences=plan.row_sequences,
        row_tokens=plan.row_tokens,
    )
    message.new.extend([_new_sequence(new) for new in plan.new])
    for sequence_id, token_id in plan.tokens:
        message.token_sequences.append(sequence_id)
        message.tokens.append(token_id)
    for table in plan.tables:
        message.table_sequences.append(table.sequence_id)
        message.table_starts.append(table.start)
        message.table_counts.append(len(table.block_ids))
        message.table_blocks.extend(table.block_ids)
    for copy in plan.copies:
        message.copy_sources.append(copy.source)
        message.copy_destinations.append(copy.destination)
    for fork in plan.forks:
        message.fork_parents.append(fork.parent)
        message.fork_children.append(fork.child)
        message.fork_samples.append(fork.sample_index)
    return message


def result_from_message(message: pb.StepResult) -> StepResult:
    """An entry of `logprobs` without a logprob of its own speaks of a beam's candidates."""
    if len(message.sequence_ids) != len(message.token_ids):
        raise ProtocolError(f"{len(message.sequence_ids)} sequence ids and {len(message.token_ids)} token ids")
    logprobs: dict[int, TokenLogprobs] = {}
    candidates: dict[int, tuple[tuple[int, float], ...]] = {}
    for entry in message.logprobs:
        top = _top(entry.sequence_id, entry.top_token_ids, entry.top_logprobs)
        if entry.HasField("logprob"):
            logprobs[entry.sequence_id] = TokenLogprobs(entry.logprob, entry.rank, top)
        else:
            candidates[entry.sequence_id] = top
    timings = message.timings
    return StepResult(
        step_id=message.step_id,
        tokens=list(zip(message.sequence_ids, message.token_ids, strict=True)),
        logprobs=logprobs,
        candidates=candidates,
        prompt_logprobs={p.sequence_id: _prompt_logprobs(p) for p in message.prompt_logprobs},
        errors={e.sequence_id: e.message for e in message.errors},
        timings=StepTimings(timings.queued_ns, timings.prepare_ns, timings.forward_ns, timings.sample_ns),
    )


def _new_sequence(new: NewSequence) -> pb.NewSequence:
    return pb.NewSequence(
        sequence_id=new.sequence_id,
        token_ids=new.token_ids,
        num_prompt_tokens=new.num_prompt_tokens,
        num_computed_tokens=new.num_computed_tokens,
        block_ids=new.block_ids,
        sample_index=new.sample_index,
        sampling=_sampling(new.sampling, new.beam_candidates),
        traceparent=new.traceparent,
    )


def _sampling(sampling: SamplingParams, beam_candidates: int | None) -> pb.SequenceSampling:
    return pb.SequenceSampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
        seed=sampling.seed,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sorted(sampling.stop_token_ids),
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        beam_candidates=beam_candidates,
    )


def _top(sequence_id: int, token_ids: Sequence[int], logprobs: Sequence[float]) -> tuple[tuple[int, float], ...]:
    if len(token_ids) != len(logprobs):
        raise ProtocolError(
            f"{len(token_ids)} best tokens of sequence {sequence_id}, {len(logprobs)} log probabilities"
        )
    return tuple(zip(token_ids, logprobs, strict=True))


def _prompt_logprobs(message: pb.PromptPositions) -> PromptLogprobs:
    width = message.num_top
    top = _top(message.sequence_id, message.top_token_ids, message.top_logprobs)
    if len(message.ranks) != len(message.logprobs) or len(top) != width * len(message.logprobs):
        raise ProtocolError(f"prompt log probabilities of sequence {message.sequence_id} do not fit together")
    return PromptLogprobs(
        message.first_position,
        tuple(
            TokenLogprobs(logprob, rank, top[index * width : (index + 1) * width])
            for index, (logprob, rank) in enumerate(zip(message.logprobs, message.ranks, strict=True))
        ),
    )
