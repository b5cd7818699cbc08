"""`python -m executor` with the fake model: the process under test in test_executor_process.py.

The model's name says how loading goes: "fake" at once, "slow" never ends, "broken" fails; "failing" loads, and every
step raises on a device that does not survive it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from executor.__main__ import leave, main
from executor.config import ExecutorConfig, StartupError
from executor.served import GenerationDefaults, ServedModel

if TYPE_CHECKING:
    from executor.loaded import Loaded


def load_fake(config: ExecutorConfig, device_name: str, progress: Callable[[str], None]) -> Loaded:
    progress("looking for the model")
    if config.model == "slow":
        threading.Event().wait()
    if config.model == "broken":
        raise StartupError("no model 'broken'")
    if config.model == "faulty":
        raise RuntimeError("a fault of ours")
    from executor.loaded import Loaded
    from executor.loading import warm_up
    from executor.runner import Runner
    from tests.executor.factories import FakeModel, create_limits

    limits = create_limits()
    model = FakeModel(limits)
    runner = Runner(model, model, limits)
    warm_up(runner)
    served = ServedModel(
        name=config.model,
        fingerprint="f00d",
        limits=limits,
        dtype="float32",
        kv_dtype="float32",
        eos_token_ids=(2,),
        defaults=GenerationDefaults(),
        deterministic=config.deterministic,
        device=device_name,
        tokenizer_files={"tokenizer.json": b"{}"},
    )
    if config.model == "failing":
        model.fails_with = RuntimeError("an illegal memory access was encountered")
        return Loaded(served, runner, survives_failed_steps=False)
    return Loaded(served, runner)


if __name__ == "__main__":
    leave(main(sys.argv[1:], load_fake))
