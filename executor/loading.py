"""From a config to a model that runs: resolve, load, size the KV cache, warm up. The one place that joins model,
backend and runner.

Runs on a thread of its own, once; `progress` hears a line before each thing that takes time. Raises StartupError with a
sentence that a user can act on; anything else is a fault of ours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from executor.backends.base import OutOfMemory
from executor.backends.cpu.backend import CpuBackend
from executor.backends.cpu.deterministic import NotDeterministic
from executor.backends.cpu.memory import available_memory, kv_cache_blocks
from executor.config import ExecutorConfig, StartupError
from executor.loaded import Loaded
from executor.model.errors import ModelError
from executor.model.loader import LoadedModel, dtype_name, load_model
from executor.model.resolve import resolve_model
from executor.plan import BatchPlan, Limits, NewSequence, Sampling
from executor.runner import Runner
from executor.served import GenerationDefaults, ServedModel

_DEFAULT_SHARE = 4  # a quarter of what is free
_DEFAULT_MOST = 2 << 30


def load(config: ExecutorConfig, device_name: str, progress: Callable[[str], None]) -> Loaded:
    """Everything between the command line and the first plan."""
    torch.set_num_threads(config.num_threads)
    try:
        resolved = resolve_model(config.model, config.cache_dir, progress)
        backend = CpuBackend(_dtype(config.dtype), config.deterministic)
        model = load_model(resolved.directory, backend, config.cache_dir, config.max_model_len, progress)
        num_blocks = _num_blocks(config, model)
        spec = model.kv_cache_spec(num_blocks, config.block_size, model.dtype)
        progress(f"taking {format_bytes(num_blocks * spec.bytes_per_block)} for {num_blocks} KV blocks")
        backend.allocate_kv_cache(spec)
    except (ModelError, OutOfMemory, NotDeterministic) as error:
        raise StartupError(str(error)) from error
    limits = Limits(
        vocab_size=model.config.vocab_size,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=model.max_model_len,
    )
    runner = Runner(model.decoder, backend, limits)
    progress("warming up")
    warm_up(runner)
    return Loaded(_served(config, resolved.name, model, limits, device_name), runner)


def warm_up(runner: Runner) -> None:
    """A prompt's step and a decode step, as a session would send them; nothing of it is kept."""
    limits = runner.limits
    length = min(limits.block_size, limits.max_num_batched_tokens, limits.max_model_len - 1)
    new = NewSequence(
        sequence_id=1,
        token_ids=[token % limits.vocab_size for token in range(length)],
        num_prompt_tokens=length,
        num_computed_tokens=0,
        block_ids=list(range(1, min(3, limits.num_blocks))),
        sample_index=0,
        sampling=Sampling(temperature=1.0),
    )
    rows = [length] if limits.num_blocks < 3 else [length, 1]
    for step, tokens in enumerate(rows):
        plan = BatchPlan(step + 1, new=[] if step else [new], row_sequences=[1], row_tokens=[tokens])
        errors = runner.run(plan).errors
        if errors:
            raise StartupError(f"the model is broken: a first step failed ({errors[1]})")
    runner.reset()


def format_bytes(size: int) -> str:
    """ "1.5 GiB": for people."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.4g} {units[0]}"


def _dtype(name: str) -> torch.dtype:
    if name == "auto":
        native = torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if native else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def _num_blocks(config: ExecutorConfig, model: LoadedModel) -> int:
    """No more than the memory that is free, and than all sequences at their longest could fill."""
    per_block = model.kv_cache_spec(1, config.block_size, model.dtype).bytes_per_block
    if config.num_blocks is not None:
        return kv_cache_blocks(per_block, config.num_blocks * per_block)
    memory = config.kv_cache_memory or min(available_memory() // _DEFAULT_SHARE, _DEFAULT_MOST)
    most = config.max_num_seqs * -(-model.max_model_len // config.block_size) + 1
    return min(kv_cache_blocks(per_block, memory), most)


def _served(config: ExecutorConfig, name: str, model: LoadedModel, limits: Limits, device_name: str) -> ServedModel:
    defaults = model.defaults
    return ServedModel(
        name=name,
        fingerprint=model.fingerprint(model.dtype, config.block_size),
        limits=limits,
        dtype=dtype_name(model.dtype),
        kv_dtype=dtype_name(model.dtype),
        eos_token_ids=model.eos_token_ids,
        defaults=GenerationDefaults(
            defaults.temperature, defaults.top_k, defaults.top_p, defaults.min_p, defaults.repetition_penalty
        ),
        deterministic=config.deterministic,
        device=device_name,
        tokenizer_files=model.tokenizer_files,
    )
