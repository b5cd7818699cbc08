"""A model that is not computed: a step takes a given time, as on a GPU, and tokens follow from the sequence's own.

For tests of scale and of failover: an executor of this kind loads at once and sleeps through its steps. The token after
a sequence is a checksum of its tokens (and, where it is sampled, of seed and sample index), so a sequence that goes on
elsewhere draws what it would have drawn here. End-of-sequence tokens are never drawn: max_tokens alone says how long an
output is. There are no logits, so requests for log probabilities or beams fail, each on its own. No torch.
"""

from __future__ import annotations

import hashlib
import json
import struct
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from executor.config import SIMULATED_MODEL, ExecutorConfig, StartupError
from executor.launched import Finished, Launched
from executor.loaded import Loaded
from executor.plan import BatchPlan, Fork, InvalidPlan, Limits, Sampling, StepResult, StepTimings
from executor.sequences import Sequences, Slots
from executor.served import GenerationDefaults, ServedModel

DEVICE = "simulated"
MAX_MODEL_LEN = 4096  # of the built-in model


class SimulatedRunner:
    """A `StepRunner` that sleeps."""

    def __init__(self, limits: Limits, step_seconds: float, never_drawn: Sequence[int] = ()) -> None:
        self.limits = limits
        self.sequences = Sequences(limits)
        self.progress = 0
        self._step_ns = round(step_seconds * 1e9)
        self._drawable = [token for token in range(limits.vocab_size) if token not in set(never_drawn)]

    def reset(self) -> None:
        self.sequences.clear()

    def can_follow(self, plan: BatchPlan) -> bool:
        return True

    def launch(self, plan: BatchPlan, queued_ns: int = 0) -> Launched:
        """Raises InvalidPlan."""
        return Finished(self.run(plan, queued_ns))

    def run(self, plan: BatchPlan, queued_ns: int = 0) -> StepResult:
        """Raises InvalidPlan."""
        started = time.monotonic_ns()
        plan.check(self.limits, self.sequences)
        errors = self.sequences.apply(plan)
        for new in plan.new:
            if new.sequence_id not in errors and not _is_computable(new.sampling):
                self._fail(self.sequences.slot(new.sequence_id), "a simulated model has no log probabilities", errors)
        slots = self._advance(plan)
        draws = self._fork(plan.forks, slots, errors)
        tokens = [self._draw(slot) for slot in draws.tolist()]
        self.sequences.append(draws, np.array(tokens, np.int64))
        prepared = time.monotonic_ns()
        if plan.row_sequences:  # a plan without rows is answered without running the model
            time.sleep(max(0, started + self._step_ns - prepared) / 1e9)
            self.progress += 1
        return StepResult(
            step_id=plan.step_id,
            sequence_ids=self.sequences.ids[draws].tolist(),
            token_ids=tokens,
            errors=errors,
            timings=StepTimings(queued_ns, prepared - started, time.monotonic_ns() - prepared),
        )

    def _advance(self, plan: BatchPlan) -> Slots:
        """The rows are computed. Returns the slots of those that sample, in row order."""
        sequences = self.sequences
        slots, row_tokens = sequences.slots(plan.row_sequences), np.array(plan.row_tokens, np.int64)
        well = ~sequences.failed[slots]
        slots, row_tokens = slots[well], row_tokens[well]
        ends = sequences.num_computed_tokens[slots] + row_tokens
        known = sequences.num_tokens[slots]
        room = np.minimum(known, sequences.num_blocks[slots] * self.limits.block_size)
        for slot in slots[ends > room].tolist():
            raise InvalidPlan(f"sequence {sequences.ids[slot]}: a row beyond its tokens or its blocks")
        sequences.num_computed_tokens[slots] = ends
        sampling: Slots = slots[ends == known]
        return sampling

    def _fork(self, forks: Sequence[Fork], sampling: Slots, errors: dict[int, str]) -> Slots:
        """Slots that draw: each parent before its children."""
        if not forks:
            return sampling
        children: dict[int, list[int]] = {slot: [] for slot in sampling.tolist()}
        for fork in forks:
            parent, child = self.sequences.slot(fork.parent), self.sequences.fork(fork)
            if parent in children:
                children[parent].append(child)
            else:
                self._fail(child, f"sequence {fork.parent}, of which it is a fork, failed", errors)
        return np.array([slot for parent, forked in children.items() for slot in (parent, *forked)], np.int64)

    def _draw(self, slot: int) -> int:
        sampling = self.sequences.sampling[slot]
        salt = b""
        if sampling.temperature > 0:
            salt = struct.pack("<QQ", sampling.seed, self.sequences.sample_index[slot])
        return self._drawable[zlib.crc32(self.sequences.tokens(slot).data, zlib.crc32(salt)) % len(self._drawable)]

    def _fail(self, slot: int, message: str, errors: dict[int, str]) -> None:
        self.sequences.failed[slot] = True
        errors[int(self.sequences.ids[slot])] = message


def load_simulated(config: ExecutorConfig, device_name: str, progress: Callable[[str], None]) -> Loaded:
    """The tokenizer and the sizes are those of the model named, or of the built-in one. Raises StartupError."""
    assert config.simulate_step_ms is not None
    if config.model == SIMULATED_MODEL:
        name, files, vocab_size, longest, eos = SIMULATED_MODEL, *_built_in()
    else:
        name, files, vocab_size, longest, eos = _of_model(config, progress)
    length = config.max_model_len or longest
    limits = Limits(
        vocab_size=vocab_size,
        block_size=config.block_size,
        num_blocks=config.num_blocks or config.max_num_seqs * -(-length // config.block_size) + 1,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=length,
    )
    served = ServedModel(
        name=name,
        fingerprint=_fingerprint(files, limits),
        limits=limits,
        dtype="float32",
        kv_dtype="float32",
        eos_token_ids=eos,
        defaults=GenerationDefaults(),
        deterministic=True,
        device=DEVICE,
        tokenizer_files=files,
    )
    return Loaded(served, SimulatedRunner(limits, config.simulate_step_ms / 1e3, eos))


def _is_computable(sampling: Sampling) -> bool:
    return sampling.logprobs is None and sampling.prompt_logprobs is None and sampling.beam_candidates is None


def _fingerprint(files: Mapping[str, bytes], limits: Limits) -> str:
    hashed = hashlib.sha256(f"{DEVICE} {limits.vocab_size} {limits.block_size}".encode())
    for name in sorted(files):
        hashed.update(hashlib.sha256(files[name]).digest())
    return hashed.hexdigest()


def _built_in() -> tuple[dict[str, bytes], int, int, tuple[int, ...]]:
    """Tokenizer files, vocabulary, longest sequence, end-of-sequence tokens: one token for each byte, <s> and </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "</s>"}).encode(),
        "chat_template.jinja": b"{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}",
    }
    return files, len(alphabet) + 2, MAX_MODEL_LEN, (len(alphabet) + 1,)


def _of_model(
    config: ExecutorConfig, progress: Callable[[str], None]
) -> tuple[str, dict[str, bytes], int, int, tuple[int, ...]]:
    from executor.model.config import model_config, read_json
    from executor.model.errors import BrokenModel, ModelError
    from executor.model.loader import TOKENIZER_FILES
    from executor.model.resolve import resolve_model

    def content(directory: Path) -> dict[str, bytes]:
        return {name: (directory / name).read_bytes() for name in TOKENIZER_FILES if (directory / name).is_file()}

    try:
        resolved = resolve_model(config.model, config.cache_dir, progress)
        try:
            fields = read_json(resolved.directory / "config.json")
            sizes = model_config(fields)
        except BrokenModel as error:
            raise StartupError(resolved.complaint(error)) from error
    except ModelError as error:
        raise StartupError(str(error)) from error
    ends = fields.get("eos_token_id")
    eos = tuple(token for token in (ends if isinstance(ends, list) else [ends]) if isinstance(token, int))
    return resolved.name, content(resolved.directory), sizes.vocab_size, sizes.max_model_len, eos
