"""What a run's records come to: percentiles, latencies, throughput, goodput."""

from __future__ import annotations

import pytest
from octavo.bench.measures import Goodput, Objective, Percentiles, Record, percentile, percentiles_ms, summarize


def make_record(**overrides: object) -> Record:
    """Due at 10 s; five tokens in four messages, done at 10.9 s."""
    settings: dict[str, object] = {
        "start": 10.0,
        "num_prompt_tokens": 7,
        "arrivals": [(10.5, 1), (10.6, 1), (10.8, 2), (10.9, 1)],
        "end": 10.9,
    }
    return Record(**(settings | overrides))  # type: ignore[arg-type]


def test_a_percentile_lies_between_its_neighbours() -> None:
    assert [percentile([1.0, 2.0, 3.0, 5.0], share) for share in (0, 0.5, 0.9, 1)] == pytest.approx([1, 2.5, 4.4, 5])


def test_one_value_is_all_its_percentiles() -> None:
    assert percentiles_ms([0.25]) == Percentiles(250, 250, 250, 250)


def test_there_are_no_percentiles_of_nothing() -> None:
    assert percentiles_ms([]) is None


def test_percentiles_do_not_ask_for_order() -> None:
    assert percentiles_ms([0.003, 0.001, 0.002]) == percentiles_ms([0.001, 0.002, 0.003])


def test_ttft_counts_from_when_the_request_was_due() -> None:
    assert make_record(start=9.0).ttft == pytest.approx(1.5)


def test_a_gap_is_the_time_between_two_messages() -> None:
    assert make_record().gaps == pytest.approx([0.1, 0.2, 0.1])


def test_tpot_spreads_the_time_over_the_tokens_after_the_first_message() -> None:
    assert make_record().tpot == pytest.approx(0.4 / 4)


def test_tokens_that_came_with_the_first_are_not_in_tpot() -> None:
    assert make_record(arrivals=[(1.0, 3), (2.0, 2)]).tpot == pytest.approx(0.5)


def test_one_message_has_no_tpot() -> None:
    assert make_record(arrivals=[(1.0, 3)]).tpot is None


def test_throughput_is_of_the_whole_run() -> None:
    found = summarize([make_record(), make_record()], seconds=4.0)
    assert (found.num_done, found.num_output_tokens, found.num_prompt_tokens) == (2, 10, 14)
    assert found.output_tokens_per_second == pytest.approx(2.5)
    assert found.total_tokens_per_second == pytest.approx(6.0)
    assert found.requests_per_second == pytest.approx(0.5)


def test_what_was_cut_off_counts_with_its_tokens_and_as_neither_done_nor_failed() -> None:
    found = summarize([make_record(), make_record(end=None, arrivals=[(10.1, 1), (10.2, 1)])], seconds=1.0)
    assert (found.num_done, found.num_errors, found.num_unfinished, found.num_output_tokens) == (1, 0, 1, 7)
    assert found.itl_ms is not None
    assert found.itl_ms.mean == pytest.approx(125)  # 0.1, 0.2, 0.1 and 0.1
    assert found.tpot_ms is not None
    assert found.tpot_ms.mean == pytest.approx(100)  # of the one that ended


def test_errors_are_counted_by_what_was_said() -> None:
    found = summarize([make_record(error="full"), make_record(error="full"), make_record(error="gone")], seconds=1.0)
    assert found.errors == {"full": 2, "gone": 1}
    assert (found.num_errors, found.num_done) == (3, 0)


def test_a_request_that_never_answered_has_no_part_in_latencies() -> None:
    found = summarize([make_record(arrivals=[], error="full")], seconds=1.0)
    assert (found.ttft_ms, found.tpot_ms, found.itl_ms, found.total_tokens_per_second) == (None, None, None, 0)


def test_a_run_of_no_time_has_no_rates() -> None:
    assert summarize([], seconds=0.0).output_tokens_per_second == 0


@pytest.mark.parametrize(
    ("objective", "good"),
    [
        (Objective(ttft_ms=501), True),
        (Objective(ttft_ms=499), False),
        (Objective(itl_ms=201), True),
        (Objective(itl_ms=199), False),
        (Objective(ttft_ms=501, itl_ms=199), False),
    ],
)
def test_a_request_is_good_if_it_keeps_every_bound(objective: Objective, good: bool) -> None:
    assert objective.is_met_by(make_record()) is good


def test_goodput_counts_failures_against_the_server_and_cut_off_requests_not_at_all() -> None:
    records = [make_record(), make_record(start=9.0), make_record(error="gone"), make_record(end=None)]
    assert summarize(records, 2.0, Objective(ttft_ms=600)).goodput == Goodput(0.5, pytest.approx(1 / 3))  # type: ignore[arg-type]


def test_without_an_objective_there_is_no_goodput() -> None:
    assert summarize([make_record()], 1.0).goodput is None
