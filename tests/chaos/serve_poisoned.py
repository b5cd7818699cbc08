"""`python -m executor` that dies of a token: whoever is told a sequence that holds it is gone, as by a kernel's fault.

The process under test in test_poison.py. Only simulated models.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from executor.__main__ import leave, main
from executor.config import ExecutorConfig

if TYPE_CHECKING:
    from executor.loaded import Loaded

POISON = 255  # a token id


def load_poisoned(config: ExecutorConfig, device_name: str, progress: Callable[[str], None]) -> Loaded:
    from executor.loaded import Loaded
    from executor.plan import BatchPlan, StepResult
    from executor.simulated import SimulatedRunner, load_simulated

    class PoisonedRunner(SimulatedRunner):
        def run(self, plan: BatchPlan, queued_ns: int = 0) -> StepResult:
            if any(POISON in new.token_ids for new in plan.new):
                os.kill(os.getpid(), signal.SIGKILL)
            return super().run(plan, queued_ns)

    loaded = load_simulated(config, device_name, progress)
    assert config.simulate_step_ms is not None
    never_drawn = (POISON, *loaded.model.eos_token_ids)
    runner = PoisonedRunner(loaded.model.limits, config.simulate_step_ms / 1e3, never_drawn)
    return Loaded(loaded.model, runner)


if __name__ == "__main__":
    leave(main(sys.argv[1:], load_poisoned))
