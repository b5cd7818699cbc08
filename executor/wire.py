"""Protobuf to the executor's plan and back. The only place that knows both.

Raises InvalidPlan for messages whose columns do not fit together; what the columns mean is checked further in.
"""

from __future__ import annotations

from itertools import pairwise

from octavo.v1 import executor_pb2 as pb

from executor.plan import (
    BatchPlan,
    Fork,
    InvalidPlan,
    Limits,
    NewSequence,
    PromptLogprobs,
    Sampling,
    StepResult,
    TableUpdate,
    TokenLogprobs,
    check_contents,
    check_counts,
)


def plan_from_message(message: pb.BatchPlan, limits: Limits) -> BatchPlan:
    """Raises InvalidPlan naming the columns that differ in length, or are longer than the limits allow: the event loop
    converts, and must not spend seconds on what is refused anyway."""
    check_counts(
        {
            "finished": len(message.finished),
            "preempted": len(message.preempted),
            "new": len(message.new),
            "tokens": len(message.tokens),
            "tables": len(message.table_sequences),
            "copy_sources": len(message.copy_sources),
            "row_sequences": len(message.row_sequences),
            "forks": len(message.fork_children),
        },
        limits,
    )
    check_contents(
        num_tokens=sum(len(new.token_ids) for new in message.new),
        num_blocks=max(len(message.table_blocks), sum(len(new.block_ids) for new in message.new)),
        limits=limits,
    )
    _same_length(message, "token_sequences", "tokens")
    _same_length(message, "table_sequences", "table_starts", "table_counts")
    _same_length(message, "copy_sources", "copy_destinations")
    _same_length(message, "row_sequences", "row_tokens")
    _same_length(message, "fork_parents", "fork_children", "fork_samples")
    return BatchPlan(
        step_id=message.step_id,
        finished=list(message.finished),
        preempted=list(message.preempted),
        new=[_new_sequence(new) for new in message.new],
        tokens=list(zip(message.token_sequences, message.tokens, strict=True)),
        tables=_tables(message),
        copy_sources=list(message.copy_sources),
        copy_destinations=list(message.copy_destinations),
        row_sequences=list(message.row_sequences),
        row_tokens=list(message.row_tokens),
        forks=[
            Fork(*fork) for fork in zip(message.fork_parents, message.fork_children, message.fork_samples, strict=True)
        ],
    )


def message_from_result(result: StepResult) -> pb.StepResult:
    """Beams stand in `logprobs` with no token's own logprob."""
    message = pb.StepResult(step_id=result.step_id, sequence_ids=result.sequence_ids, token_ids=result.token_ids)
    message.timings.queued_ns = result.timings.queued_ns
    message.timings.prepare_ns = result.timings.prepare_ns
    message.timings.forward_ns = result.timings.forward_ns
    message.timings.sample_ns = result.timings.sample_ns
    for sequence_id, logprobs in result.logprobs.items():
        entry = message.logprobs.add(sequence_id=sequence_id, logprob=logprobs.logprob, rank=logprobs.rank)
        _add_top(entry, logprobs.top)
    for sequence_id, candidates in result.candidates.items():
        _add_top(message.logprobs.add(sequence_id=sequence_id), candidates)
    for sequence_id, prompt in result.prompt_logprobs.items():
        _add_prompt(message.prompt_logprobs.add(sequence_id=sequence_id), prompt)
    for sequence_id, error in result.errors.items():
        message.errors.add(sequence_id=sequence_id, message=error)
    return message


def _same_length(message: pb.BatchPlan, *columns: str) -> None:
    lengths = [len(getattr(message, column)) for column in columns]
    if any(one != other for one, other in pairwise(lengths)):
        described = ", ".join(f"{column} {length}" for column, length in zip(columns, lengths, strict=True))
        raise InvalidPlan(f"columns differ in length: {described}")


def _tables(message: pb.BatchPlan) -> list[TableUpdate]:
    if not message.table_sequences:
        if message.table_blocks:
            raise InvalidPlan(f"table_blocks has {len(message.table_blocks)} entries, table_counts sum to 0")
        return []
    blocks = list(message.table_blocks)
    if sum(message.table_counts) != len(blocks):
        raise InvalidPlan(f"table_blocks has {len(blocks)} entries, table_counts sum to {sum(message.table_counts)}")
    tables: list[TableUpdate] = []
    begin = 0
    for sequence_id, start, count in zip(
        message.table_sequences, message.table_starts, message.table_counts, strict=True
    ):
        tables.append(TableUpdate(sequence_id, start, blocks[begin : begin + count]))
        begin += count
    return tables


def _new_sequence(new: pb.NewSequence) -> NewSequence:
    return NewSequence(
        sequence_id=new.sequence_id,
        token_ids=list(new.token_ids),
        num_prompt_tokens=new.num_prompt_tokens,
        num_computed_tokens=new.num_computed_tokens,
        block_ids=list(new.block_ids),
        sample_index=new.sample_index,
        sampling=_sampling(new.sampling),
        traceparent=new.traceparent,
    )


def _sampling(message: pb.SequenceSampling) -> Sampling:
    return Sampling(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        logit_bias=dict(message.logit_bias),
        allowed_token_ids=tuple(message.allowed_token_ids),
        seed=message.seed,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        beam_candidates=message.beam_candidates if message.HasField("beam_candidates") else None,
    )


def _add_top(entry: pb.Logprobs, top: tuple[tuple[int, float], ...]) -> None:
    entry.top_token_ids.extend([token_id for token_id, _ in top])
    entry.top_logprobs.extend([logprob for _, logprob in top])


def _add_prompt(message: pb.PromptPositions, prompt: PromptLogprobs) -> None:
    message.first_position = prompt.first_position
    message.num_top = len(prompt.entries[0].top)
    for entry in prompt.entries:
        _add_prompt_entry(message, entry)


def _add_prompt_entry(message: pb.PromptPositions, entry: TokenLogprobs) -> None:
    message.logprobs.append(entry.logprob)
    message.ranks.append(entry.rank)
    message.top_token_ids.extend([token_id for token_id, _ in entry.top])
    message.top_logprobs.extend([logprob for _, logprob in entry.top])
