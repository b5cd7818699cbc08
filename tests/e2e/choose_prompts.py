"""Chooses the prompts of test_greedy.py: `python -m tests.e2e.choose_prompts`.

Greedy decoding can be compared token for token, with no tolerance, only where no step is a near tie. Of the candidates
below those are kept whose two best logits differ by more than 1e-3 at each of 64 steps, computed by transformers in
float64; their tokens are written beside them to data/greedy.json.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from executor.model.resolve import resolve_model

DATA = Path(__file__).parent / "data" / "greedy.json"
NUM_STEPS = 64
MIN_GAP = 1e-3

TOPICS = [
    "gravity", "the water cycle", "how bread is made", "the French Revolution", "photosynthesis", "prime numbers",
    "volcanoes", "the history of chess", "how a bicycle stays upright", "the Roman Empire", "black holes",
    "recursion in programming", "the human heart", "why leaves change colour", "how vaccines work", "tides",
]  # fmt: skip
OPENINGS = [
    "Once upon a time, in a village by the sea,", "The capital of France is", "def fibonacci(n):\n",
    "The three laws of motion are", "In 1969, the first humans", "Dear Sir or Madam,\n\n", "Water boils at",
    "The mitochondria is", "A list of fruits:\n1. Apple\n2.", "The quick brown fox",
]  # fmt: skip


def candidates() -> list[str]:
    chats = [f"<|im_start|>user\nExplain {topic} in detail.<|im_end|>\n<|im_start|>assistant\n" for topic in TOPICS]
    return [*chats, *OPENINGS]


def greedy(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], float]:
    """Tokens of NUM_STEPS steps, fewer if one is an end of sequence, and the least gap between the two best logits."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NUM_STEPS,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(output.logits).topk(2).values
    return output.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min())


def main() -> None:
    directory = resolve_model("smollm2", Path("~/.cache/octavo").expanduser(), print).directory
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    kept = []
    for text in candidates():
        prompt = tokenizer(text, add_special_tokens=False).input_ids
        tokens, gap = greedy(model, prompt)
        print(f"{gap:.5f} {len(tokens)} {text!r}", flush=True)
        if len(tokens) == NUM_STEPS and gap > MIN_GAP:
            kept.append({"text": text, "prompt": prompt, "tokens": tokens, "gap": round(gap, 6)})
    DATA.write_text("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n")
    print(f"{len(kept)} of {len(candidates())} kept")


if __name__ == "__main__":
    main()
