"""The main figures of the report on the PagedAttention paper, in a short form: within what the method allows, and the
same for the same seed. Ranges hold for several seeds; where arithmetic gives a value, that value is asked for."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from benchmarks.paper import contiguous, figures, latency, pictures, prefixes, recompute, report
from benchmarks.paper.contiguous import Buddy, FirstFit
from benchmarks.paper.executor import MirrorExecutor
from benchmarks.paper.figures import SHORT, Figures, Memory
from benchmarks.paper.lengths import ALPACA, LONGEST, SHAREGPT, Lengths, Trace, cut_mean, draw, mu_for
from scheduler.core.plan import BatchPlan, Fork, NewSequence, TableUpdate
from scheduler.core.request import SamplingParams


@pytest.fixture(scope="module")
def sharegpt() -> Memory:
    return figures.memory(SHAREGPT, SHORT, seed=0)


# Lengths.


@pytest.mark.parametrize("trace", [SHAREGPT, ALPACA], ids=lambda trace: trace.name)
def test_lengths_have_the_means_of_the_trace(trace: Trace) -> None:
    drawn = list(itertools.islice(draw(trace, 0), 20_000))
    assert sum(one.prompt for one in drawn) / len(drawn) == pytest.approx(trace.prompt, rel=0.03)
    assert sum(one.output for one in drawn) / len(drawn) == pytest.approx(trace.output, rel=0.03)
    assert max(max(one) for one in drawn) <= LONGEST


@pytest.mark.parametrize("spread", [0.5, 1.25])
def test_the_mean_after_the_cut_is_the_one_asked_for(spread: float) -> None:
    assert cut_mean(mu_for(338, spread, LONGEST), spread, LONGEST) == pytest.approx(338)


# Allocators.


def test_first_fit_takes_the_first_hole_that_is_large_enough() -> None:
    memory = FirstFit(100)
    starts = [memory.allocate(size) for size in (10, 30, 20)]
    assert starts == [0, 10, 40]
    memory.free(10)
    assert memory.allocate(31) == 60
    assert memory.allocate(30) == 10
    assert memory.allocate(10) is None  # 9 slots are left, at the end


def test_a_buddy_is_rounded_up_and_joined_again() -> None:
    memory = Buddy(64)
    assert [memory.allocate(17), memory.allocate(9), memory.allocate(16)] == [0, 32, 48]
    assert memory.allocate(1) is None
    for start in (32, 0, 48):
        memory.free(start)
    assert memory.allocate(64) == 0


def test_buddies_fill_a_memory_that_is_no_power_of_two() -> None:
    memory = Buddy(15_700)
    assert [memory.allocate(2048) is not None for _ in range(8)] == [True] * 7 + [False]


@pytest.mark.parametrize("kind", [FirstFit, Buddy])
def test_pieces_never_overlap(kind: type[FirstFit] | type[Buddy]) -> None:
    r, memory, held = random.Random(0), kind(1000), dict[int, int]()
    for _ in range(2000):
        if held and r.random() < 0.5:
            start = r.choice(list(held))
            memory.free(start)
            del held[start]
        elif (start := memory.allocate(size := r.randint(1, 200))) is not None:  # type: ignore[assignment]
            assert start + size <= 1000
            assert all(start + size <= other or other + taken <= start for other, taken in held.items())
            held[start] = size


def test_rules_reserve_the_longest_the_doubled_and_the_true_length() -> None:
    reserved = [rule(Lengths(100, 25)) for rule in contiguous.RULES.values()]
    assert reserved == [2048, 132, 125]


def test_what_is_reserved_is_counted_by_what_becomes_of_it() -> None:
    use = contiguous.run(100, lambda lengths: 50, FirstFit, itertools.repeat(Lengths(10, 20)), 20, 0)
    assert use.requests == 2
    assert use.useful == pytest.approx(2 * (10 + 9.5) / 100)  # of 10 to 29 tokens
    assert use.coming == pytest.approx(2 * 10.5 / 100)
    assert (use.never, use.outside) == pytest.approx((0.4, 0))


# The executor that mirrors tables.


def test_the_mirror_counts_what_tables_share() -> None:
    executor = MirrorExecutor()
    new = NewSequence(1, (5,) * 20, 20, 0, (3, 4), 0, SamplingParams())
    result = executor.run(BatchPlan(1, new=[new], row_sequences=[1], row_tokens=[20], forks=[Fork(1, 2, 1)]))
    assert [sequence_id for sequence_id, _ in result.tokens] == [1, 2]
    assert executor.count_blocks() == (4, 2)
    executor.run(
        BatchPlan(2, tables=[TableUpdate(2, 1, (7,))], row_sequences=[1, 2], row_tokens=[1, 1])
    )  # a copy on write
    assert executor.count_blocks() == (4, 3)
    executor.run(BatchPlan(3, finished=[1]))
    assert executor.count_blocks() == (2, 2)


# Fig. 2 and 13.


def test_max_runs_seven_requests_and_holds_a_fifth_of_memory(sharegpt: Memory) -> None:
    use = sharegpt.buddy["Orca (Max)"]
    assert use.requests == 7  # 15,700 // 2,048
    assert 0.17 < use.useful < 0.24
    assert use == sharegpt.first_fit["Orca (Max)"]


def test_contiguous_memory_is_used_the_better_the_more_is_known(sharegpt: Memory) -> None:
    for allocator in (sharegpt.buddy, sharegpt.first_fit):
        shares = [use.useful for use in allocator.values()]
        assert shares == sorted(shares)
    assert sharegpt.buddy["Orca (Oracle)"].never == pytest.approx(0)
    assert sharegpt.buddy["Orca (Oracle)"].useful < sharegpt.first_fit["Orca (Oracle)"].useful < 0.65


def test_paged_blocks_waste_half_a_block_of_each_request_at_most(sharegpt: Memory) -> None:
    used = sharegpt.paged
    assert used.useful_of_held > 0.96
    assert used.useful > 0.9


def test_paged_blocks_run_several_times_the_requests(sharegpt: Memory) -> None:
    requests = sharegpt.paged.requests
    assert 4.0 < requests / sharegpt.buddy["Orca (Max)"].requests < 5.8  # the paper: 4.3
    assert 2.2 < requests / sharegpt.buddy["Orca (Oracle)"].requests < 3.1  # the paper: 2.2
    assert 1.6 < requests / sharegpt.first_fit["Orca (Oracle)"].requests < 2.2


# Fig. 15.


def test_drawn_outputs_share_their_prompt() -> None:
    saved = [figures.parallel(ALPACA, n, SHORT, seed=0).saved for n in (1, 2, 6)]
    assert saved[0] == 0
    assert 0.04 < saved[1] < saved[2] < 0.16  # the paper: 6.1 to 9.8 %


def test_beams_share_more_than_drawn_outputs() -> None:
    found = [figures.beams(ALPACA, width, SHORT, seed=0) for width in (2, 6)]
    assert 0.3 < found[0].saved < found[1].saved < 0.75  # the paper: 37.6 to 55.2 %
    assert found[0].copies > 0


# Fig. 18b.


def test_larger_blocks_waste_more_and_find_less_of_shared_prompts() -> None:
    by_size = [figures.block_size(tokens, SHORT, seed=0) for tokens in (1, 16, 64, 256)]
    for values in (
        [one.sharegpt.useful_of_held for one in by_size],
        [one.alpaca.useful_of_held for one in by_size],
        [one.found for one in by_size],
    ):
        assert values == sorted(values, reverse=True)
        assert values[0] == 1
    assert by_size[1].alpaca.useful_of_held > 0.88
    assert by_size[3].alpaca.useful_of_held < 0.4


def test_a_shared_prompt_of_whole_blocks_is_found_whole() -> None:
    assert prefixes.found_share(10_000, 16, range(64, 65), 5, seed=0) == 1
    assert prefixes.found_share(10_000, 16, range(79, 80), 5, seed=0) == pytest.approx(64 / 79)


# Fig. 19.


def test_moving_and_computing_are_timed_for_each_block_size() -> None:
    tiny = {**recompute.SHAPE, "vocab_size": 300, "hidden_size": 36, "intermediate_size": 48, "num_hidden_layers": 2}
    costs = recompute.measure((16, 64), 1, seed=0, shape=tiny)
    assert [cost.block_size for cost in costs] == [16, 64]
    assert all(value > 0 for cost in costs for value in cost[1:])


# Simulated time.


def test_chunks_bound_the_gaps_of_short_requests() -> None:
    whole, chunks = latency.chunking(4096, 0, 120), latency.chunking(256, 0, 120)
    assert chunks.itl_p99 <= latency.STEP_MS + 256 * latency.TOKEN_MS + 1e-6
    assert chunks.itl_p99 < 0.3 * whole.itl_p99
    assert chunks.long_ttft_p50 > whole.long_ttft_p50


def test_a_cached_prompt_is_answered_in_a_fraction_of_the_time() -> None:
    computed, cached = latency.caching(False, 0, 120), latency.caching(True, 0, 120)
    assert cached.ttft_p50 < 0.25 * computed.ttft_p50


def test_time_is_a_step_and_its_tokens() -> None:
    (told,) = latency.simulate([latency.Arrival(100.0, (1,) * 50, 3)], 512, prefix_caching=False)
    step = latency.STEP_MS
    assert told.ttft == pytest.approx(step + 50 * latency.TOKEN_MS)
    assert told.gaps == pytest.approx([step + latency.TOKEN_MS] * 2)


# The report.


def test_one_seed_gives_one_result() -> None:
    size = figures.Size(contiguous=240, paged=240, drawn=240, beams=240, blocks=240, groups=2, requests=20)
    assert figures.memory(ALPACA, size, 3) == figures.memory(ALPACA, size, 3)
    assert figures.beams(ALPACA, 2, size, 3) == figures.beams(ALPACA, 2, size, 3)
    assert figures.memory(ALPACA, size, 3) != figures.memory(ALPACA, size, 4)


@pytest.fixture(scope="module")
def small() -> Figures:
    size = figures.Size(contiguous=120, paged=120, drawn=120, beams=120, blocks=120, groups=2, requests=30)
    use = figures.memory(ALPACA, size, 0)
    drawn = {trace.name: {2: use.paged, 4: use.paged, 6: use.paged} for trace in figures.TRACES}
    block = figures.BlockSize(use.paged, use.paged, 0.5)
    chunks = {budget: latency.Chunking(1, 2, 3) for budget in figures.BUDGETS}
    return Figures(
        {"ShareGPT": use, "Alpaca": use},
        {1.0: use},
        drawn,
        drawn,
        {16: block},
        chunks,
        {False: latency.Caching(4, 5), True: latency.Caching(1, 2)},
    )


def test_the_report_has_the_command_the_papers_figures_and_ours(small: Figures) -> None:
    text = report.render(small, [recompute.Cost(16, 1.0, 2.0, 30.0)], "python -m benchmarks.paper --seed 0", "paper")
    assert "Written by `python -m benchmarks.paper --seed 0`" in text
    assert "| Orca (Max) | 20.4 % |" in text
    assert "copying wins by a factor of 30 at 16" in text
    assert text.count("(simulated)") == 2
    assert max(len(line) for line in text.splitlines() if not line.startswith("|")) <= 120


def test_without_a_measurement_the_report_says_so(small: Figures) -> None:
    assert "Not measured in this run" in report.render(small, [], "x", "paper")


def test_pictures_are_small_and_the_same_every_time(small: Figures, tmp_path: Path) -> None:
    costs = [recompute.Cost(16, 1.0, 2.0, 30.0)]
    for folder in ("a", "b"):
        pictures.draw(tmp_path / folder, small, costs)
    files = sorted((tmp_path / "a").iterdir())
    assert len(files) == 5
    for path in files:
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
        assert path.stat().st_size < 100_000


def test_the_report_in_docs_is_whole() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    text = (docs / "paper.md").read_text()
    assert "Written by `python -m benchmarks.paper --seed 0`" in text
    assert all(f"]({path.relative_to(docs)})" in text for path in (docs / "paper").glob("*.png"))
