"""Tests of the tests: each small fault planted in a copy of the core must be caught by the tests named with it.

A fault that no test sees means that the behaviour is promised by nobody. When the core's text changes, the patch that
no longer applies says so; plant the same fault in the new text.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Fault(NamedTuple):
    name: str
    file: str  # of scheduler/core
    text: str  # stands there once
    becomes: str
    caught_by: str  # tests of tests/core, by file


FAULTS = [
    Fault(
        "a sequence's blocks are freed from its beginning",
        "kv_cache",
        "self._release(reversed(sequence.block_table))",
        "self._release(sequence.block_table)",
        "prefix_cache",
    ),
    Fault(
        "blocks are indexed when they are planned",
        "scheduler",
        "        sequence.num_in_flight += 1\n",
        "        sequence.num_in_flight += 1\n        self._kv.commit(sequence, start, end)\n",
        "prefix_cache",
    ),
    Fault(
        "nobody waits for a prefix in the making",
        "kv_cache",
        "return None if block_hash in self._pending else blocks",
        "return blocks",
        "prefix_cache",
    ),
    Fault(
        "a shared block is written in place",
        "kv_cache",
        "if offset and self.pool.ref_cnt",
        "if False and offset and self.pool.ref_cnt",
        "forks",
    ),
    Fault(
        "a hit covers the last token",
        "kv_cache",
        "in sequence.block_hashes[: (sequence.num_tokens - 1) // self.block_size]",
        "in sequence.block_hashes[: sequence.num_tokens // self.block_size]",
        "prefix_cache",
    ),
    Fault(
        "steps are planned beyond the last token",
        "scheduler",
        "num_tokens - sequence.num_prompt_tokens >= sequence.max_tokens",
        "num_tokens - sequence.num_prompt_tokens > sequence.max_tokens",
        "pipelining",
    ),
    Fault(
        "late tokens are dropped",
        "scheduler",
        "if sequence.beam is not None or not keep_late:",
        "if True:",
        "preemption",
    ),
    Fault(
        "the first one gives way", "scheduler", "victim = self._running[-1]", "victim = self._running[0]", "preemption"
    ),
    Fault(
        "a fork's blocks are not counted",
        "kv_cache",
        "for block_id in parent.block_table:\n            self.pool.touch(block_id)",
        "for block_id in parent.block_table:\n            pass",
        "forks",
    ),
    Fault(
        "the source of a copy is free at once",
        "kv_cache",
        "if block_id in self._copy_sources and",
        "if False and block_id in self._copy_sources and",
        "forks",
    ),
    Fault(
        "a block handed out keeps its hash",
        "block_pool",
        "        self.forget(block_id)\n        self._ref_cnt[block_id] = 1",
        "        self._ref_cnt[block_id] = 1",
        "block_pool",
    ),
    Fault("a hash leaves out its parent", "block_hash", "blake2b(parent + struct", "blake2b(struct", "block_hash"),
    Fault(
        "roots ignore the adapter", "block_hash", '(b"adapter", adapter.encode())', '(b"adapter", b"")', "block_hash"
    ),
    Fault(
        "news come after the end",
        "scheduler",
        "if sequence.status is finished or generation",
        "if generation",
        "pipelining",
    ),
    Fault(
        "a sequence is admitted that does not fit whole",
        "scheduler",
        "return needed + spare + self._promised_blocks() <= self.num_free_blocks",
        "return self.num_free_blocks > needed - needed + len(prefix)",
        "preemption",
    ),
    Fault(
        "a sequence is admitted before its late tokens came",
        "scheduler",
        "            if sequence.num_in_flight:\n                return",
        "            if False:\n                return",
        "preemption",
    ),
    Fault(
        "a failed sequence's blocks stay in the index",
        "kv_cache",
        "                self.pool.forget(block_id)\n                bad.add",
        "                bad.add",
        "prefix_cache",
    ),
    Fault(
        "who shares a failed block goes on",
        "scheduler",
        "or not bad.isdisjoint(other.block_table):",
        ":",
        "prefix_cache",
    ),
    Fault(
        "a long prompt takes the decodes' tokens", "scheduler", "draft.budget - num_later", "draft.budget", "batching"
    ),
    Fault(
        "log probabilities of the prompt are told again",
        "scheduler",
        "skip = sequence.next_prompt_logprob - found.first_position",
        "skip = 0",
        "drain",
    ),
    Fault(
        "the executor is not told who ended",
        "scheduler",
        "self._finished.append(sequence.sequence_id)",
        "pass",
        "abort",
    ),
    Fault("a hypothesis far down may end", "beam", "if stops and rank < self.width:", "if stops:", "beams"),
    Fault("a plan that preempts admits, too", "scheduler", "if not draft.preempted:", "if True:", "preemption"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=[f.name.replace(" ", "-") for f in FAULTS])
def test_a_planted_fault_is_caught(fault, tmp_path):
    shutil.copytree(ROOT / "scheduler" / "core", tmp_path / "scheduler" / "core")
    shutil.copytree(ROOT / "tests" / "core", tmp_path / "tests" / "core", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "scheduler" / "__init__.py").touch()
    (tmp_path / "tests" / "__init__.py").touch()
    target = tmp_path / "scheduler" / "core" / f"{fault.file}.py"
    text = target.read_text()
    assert text.count(fault.text) == 1, "the fault cannot be planted: the core's text has changed"
    target.write_text(text.replace(fault.text, fault.becomes))
    tests = tmp_path / "tests" / "core" / f"test_{fault.caught_by}.py"
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:asyncio", "-p", "no:hypothesispytest"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-c", os.devnull, f"--rootdir={tmp_path}", str(tests)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    assert "failed" in run.stdout
