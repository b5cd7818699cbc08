"""What a core must know of its executor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Limits of one executor, and how far to plan ahead of it."""

    num_blocks: int  # the null block included
    block_size: int  # tokens
    max_num_seqs: int
    max_num_batched_tokens: int  # of one plan
    max_model_len: int
    pipeline_depth: int = 2  # plans unanswered at a time
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), else decodes alone could fill a step and starve a prompt"
            )
