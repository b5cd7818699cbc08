"""The short form of `python -m tests.chaos`: one executor dies in each way, and no client notices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.__main__ import EXECUTOR_FLAGS, MAX_MODEL_LEN
from tests.chaos.faults import Fault, Injector
from tests.chaos.processes import create_farm, running_farm
from tests.chaos.reference import check_by_transformers
from tests.chaos.run import chaos, undisturbed
from tests.chaos.workload import create_requests
from tests.executor.model.factories import create_tiny_model


@pytest.mark.timeout(240)
async def test_all_streams_end_with_the_tokens_of_the_undisturbed_run(tmp_path: Path) -> None:
    model = create_tiny_model(tmp_path / "model", max_position_embeddings=MAX_MODEL_LEN)
    farm = create_farm(tmp_path, (f"--model={model.directory}", *EXECUTOR_FLAGS), 3)
    async with running_farm(farm) as client:
        expected = await undisturbed(client, create_requests(24, 128, max_tokens=160))
        check_by_transformers(model, expected, most=3)
        injector = Injector(farm, client, kinds=(Fault.KILL, Fault.STOP_CONTINUE, Fault.TERMINATE))
        report = await chaos(farm, client, expected, injector, seconds=14, period=5)
    assert report.complaints == []
    assert report.faults == {Fault.KILL: 1, Fault.STOP_CONTINUE: 1, Fault.TERMINATE: 1}
    assert report.num_moved > 0
