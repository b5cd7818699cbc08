"""What makes two executors interchangeable, as one hash.

Owns the list of ingredients. The tensors' part is a hash of names, shapes, dtypes and contents, independent of how they
are spread over files; it is remembered in the cache, under the files' paths, sizes and times, because reading a large
model twice would make every start slow.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from executor.model.config import ModelConfig
from executor.model.weights import Weights, weight_files

DIGEST = re.compile(r"[0-9a-f]{64}")
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class FingerprintInputs:
    """Everything that a fingerprint covers."""

    config: ModelConfig
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    tokenizer_files: Mapping[str, bytes]
    tensors: str  # see `tensors_digest`
    dtype: str
    quantization: str
    kv_dtype: str
    block_size: int


def fingerprint(inputs: FingerprintInputs) -> str:
    """Hexadecimal sha256; equal exactly when all ingredients are."""
    values: dict[str, object] = {
        "config": asdict(inputs.config),
        "eos_token_ids": sorted(inputs.eos_token_ids),
        "tokenizer": {
            name: hashlib.sha256(content).hexdigest() for name, content in sorted(inputs.tokenizer_files.items())
        },
        "tensors": inputs.tensors,
        "dtype": inputs.dtype,
        "quantization": inputs.quantization,
        "kv_dtype": inputs.kv_dtype,
        "block_size": inputs.block_size,
    }
    if inputs.config.rope.rope_type in LENGTH_DEPENDENT_ROPE:  # elsewhere the length changes no number
        values["max_model_len"] = inputs.max_model_len
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def tensors_digest(directory: Path, cache_dir: Path) -> str:
    """Hash of all tensors of a model, remembered in `cache_dir` where that can be written."""
    files = [(str(path.resolve()), path.stat()) for path in weight_files(directory)]
    identity = json.dumps([(path, status.st_size, status.st_mtime_ns) for path, status in files])
    remembered = cache_dir / "digests" / hashlib.sha256(identity.encode()).hexdigest()
    digest = _recall(remembered)
    if digest is None:
        digest = _digest(Weights(directory))
        _remember(remembered, digest)
    return digest


def _recall(remembered: Path) -> str | None:
    """The digest in the file; None where there is none, or none that can be read."""
    try:
        digest = remembered.read_text().strip()
    except (OSError, ValueError):
        return None
    return digest if DIGEST.fullmatch(digest) else None


def _remember(remembered: Path, digest: str) -> None:
    """As far as the cache can be written: where it cannot, that costs the hash at every start, and nothing else."""
    partial = remembered.with_suffix(f".{uuid.uuid4().hex}.partial")
    with contextlib.suppress(OSError):
        remembered.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(digest)
            partial.rename(remembered)
        finally:
            partial.unlink(missing_ok=True)


def _digest(weights: Weights) -> str:
    def one(name: str) -> str:
        tensor = weights.read(name)
        contents: memoryview = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        return f"{name} {tensor.dtype} {list(tensor.shape)} {hashlib.sha256(contents).hexdigest()}"

    with ThreadPoolExecutor(max_workers=2) as pool:  # hashing leaves the interpreter's lock
        return hashlib.sha256("\n".join(pool.map(one, weights)).encode()).hexdigest()
