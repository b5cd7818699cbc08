"""From a config to a model that runs: resolve, load, size the KV cache, warm up. The one place that joins model,
backend and runner.

Runs on a thread of its own, once; `progress` hears a line before each thing that takes time. Raises StartupError with a
sentence that a user can act on; anything else is a fault of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from executor.backends.base import OutOfMemory
from executor.backends.cpu.deterministic import NotDeterministic
from executor.backends.platform import CacheWish, Platform, PlatformError, open_platform
from executor.config import ExecutorConfig, StartupError
from executor.loaded import Loaded
from executor.model.errors import BrokenModel, ModelError
from executor.model.loader import LoadedModel, dtype_name, load_model
from executor.model.resolve import ResolvedModel, resolve_model
from executor.plan import BatchPlan, Limits, NewSequence, Sampling
from executor.runner import Runner
from executor.served import GenerationDefaults, ServedModel
from executor.sizes import format_bytes


def load(config: ExecutorConfig, device_name: str, progress: Callable[[str], None]) -> Loaded:
    """Everything between the command line and the first plan."""
    torch.set_num_threads(config.num_threads)
    try:
        platform = open_platform(config.device, config.dtype, config.deterministic, config.quantization)
        resolved = resolve_model(config.model, config.cache_dir, progress)
        try:
            return _load_resolved(config, resolved, platform, progress)
        except BrokenModel as error:
            raise StartupError(resolved.complaint(error)) from error
    except (ModelError, OutOfMemory, NotDeterministic, PlatformError) as error:
        raise StartupError(str(error)) from error
    except torch.OutOfMemoryError as error:  # its message goes on for lines; the first sentences name the sizes
        told = ". ".join(str(error).splitlines()[0].split(". ")[:3])
        raise StartupError(f"the device's memory does not hold the model and its largest step: {told}") from error


def _load_resolved(
    config: ExecutorConfig, resolved: ResolvedModel, platform: Platform, progress: Callable[[str], None]
) -> Loaded:
    backend = platform.backend
    model = load_model(resolved.directory, backend, config.cache_dir, config.max_model_len, progress)
    limits = Limits(
        vocab_size=model.config.vocab_size,
        block_size=config.block_size,
        num_blocks=0,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=model.max_model_len,
    )
    wish = CacheWish(config.kv_cache_memory, config.num_blocks, config.gpu_memory_share)
    limits = replace(limits, num_blocks=platform.num_blocks(model, limits, wish))
    spec = model.kv_cache_spec(limits.num_blocks, config.block_size, model.dtype)
    progress(f"taking {format_bytes(limits.num_blocks * spec.bytes_per_block)} for {limits.num_blocks} KV blocks")
    backend.allocate_kv_cache(spec)
    runner = Runner(platform.decoder(model, limits, progress), backend, limits)
    progress("warming up")
    warm_up(runner)
    return Loaded(_served(config, resolved.name, model, limits, platform.name), runner, platform.survives_failed_steps)


def warm_up(runner: Runner) -> None:
    """A prompt's step and a decode step, as a session would send them; nothing of it is kept. Raises BrokenModel."""
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
            raise BrokenModel(f"the model is broken: a first step failed ({errors[1]})")
    runner.reset()


def _served(config: ExecutorConfig, name: str, model: LoadedModel, limits: Limits, device_name: str) -> ServedModel:
    defaults = model.defaults
    return ServedModel(
        name=name,
        fingerprint=model.fingerprint(model.dtype, config.block_size, config.quantization),
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
