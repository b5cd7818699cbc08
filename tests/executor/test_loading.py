"""What goes wrong between the command line and the first plan, as a sentence."""

from __future__ import annotations

import pytest
import torch

from executor import loading
from executor.config import ExecutorConfig, StartupError

OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 224.00 MiB. GPU 0 has a total capacity of 7.79 GiB of which 61.00 MiB is "
    "free. Including non-PyTorch memory, this process has 7.70 GiB memory in use. If reserved but unallocated memory "
    "is large try setting PYTORCH_ALLOC_CONF."
)


def test_weights_that_the_device_does_not_hold_are_a_sentence_with_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was called a fault of ours, with a traceback."""

    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    monkeypatch.setattr(loading, "open_platform", full)
    with pytest.raises(StartupError) as refused:
        loading.load(ExecutorConfig(threads=1), "cuda", lambda line: None)
    assert str(refused.value) == (
        "the device's memory does not hold the model and its largest step: CUDA out of memory. Tried to allocate "
        "224.00 MiB. GPU 0 has a total capacity of 7.79 GiB of which 61.00 MiB is free"
    )
