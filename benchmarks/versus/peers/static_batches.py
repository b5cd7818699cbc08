"""transformers' generate as a peer: `python static_batches.py MODEL_DIR`, in an environment that has it.

Requests are taken eight at a time, in the order they stand; a batch ends with its longest answer.
"""

import sys
import time
from typing import Any

from protocol import Answer, Arrivals, Task, Work, serve

BATCH_SIZE = 8


def build() -> Answer:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
    return lambda task: answer(model, task)


def answer(model: Any, task: Task) -> Arrivals:
    """What comes late is in time for the last batches; nothing streams."""
    works = task.now + task.late
    arrivals: Arrivals = []
    for first in range(0, len(works), BATCH_SIZE):
        batch = works[first : first + BATCH_SIZE]
        generate(model, batch)
        end = time.perf_counter()
        arrivals += [[(end, work.num_output_tokens)] for work in batch]
    return arrivals


def generate(model: Any, batch: list[Work]) -> None:
    """Prompts are padded on the left; every row runs as long as the longest."""
    import torch

    longest = max(len(work.prompt_token_ids) for work in batch)
    rows = [(longest - len(work.prompt_token_ids), work.prompt_token_ids) for work in batch]
    num_tokens = max(work.num_output_tokens for work in batch)
    with torch.inference_mode():
        model.generate(
            input_ids=torch.tensor([[0] * padding + prompt for padding, prompt in rows]),
            attention_mask=torch.tensor([[0] * padding + [1] * len(prompt) for padding, prompt in rows]),
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            do_sample=False,
        )


if __name__ == "__main__":
    serve("transformers", build)
