"""What comes of loading: the model as it is told to schedulers, and the runner that the step thread drives.

Apart from loading.py, which imports torch: a runner need not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from executor.config import ExecutorConfig
from executor.served import ServedModel
from executor.step_thread import StepRunner


class Loaded(NamedTuple):
    model: ServedModel
    runner: StepRunner
    survives_failed_steps: bool = True  # False: once a step raised, nothing that follows on the device can be trusted


Loader = Callable[[ExecutorConfig, str, Callable[[str], None]], Loaded]  # config, device's name, progress
