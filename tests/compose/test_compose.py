"""The stack of compose.yaml on a real docker engine, where there is one."""

from __future__ import annotations

import pytest

from tests.compose.__main__ import run
from tests.compose.stack import engine_answers

LIMIT = 3000.0  # seconds


@pytest.mark.skipif(
    not engine_answers(), reason="NO DOCKER ENGINE: where one answers, `python -m tests.compose` runs the whole stack"
)
@pytest.mark.timeout(LIMIT + 60)
async def test_no_stream_is_lost_in_the_life_of_a_stack() -> None:
    assert await run(build=True, seconds=LIMIT)
