"""The queue: its order, its bounds, its deadlines, and when to come back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.admission import AdmissionQueue
from scheduler.outputs import QueueFull


def push(queue: AdmissionQueue[str], item: str, **overrides: float) -> None:
    place = {"tokens": 10, "priority": 0, "arrival": len(queue), "deadline": 60.0, "now": 0.0, **overrides}
    queue.push(item, **place)  # type: ignore[arg-type]


def make_queue(max_requests: int = 10, max_tokens: int = 1000) -> AdmissionQueue[str]:
    return AdmissionQueue(max_requests, max_tokens)


def test_smaller_priorities_come_first_then_earlier_arrivals() -> None:
    queue = make_queue()
    push(queue, "late", priority=0, arrival=2)
    push(queue, "urgent", priority=-1, arrival=3)
    push(queue, "early", priority=0, arrival=1)
    assert [queue.pop() for _ in range(3)] == ["urgent", "early", "late"]


def test_peek_takes_nothing() -> None:
    queue = make_queue()
    assert queue.peek() is None
    push(queue, "a")
    assert (queue.peek(), len(queue)) == ("a", 1)


def test_pop_from_an_empty_queue_is_an_index_error() -> None:
    with pytest.raises(IndexError):
        make_queue().pop()


def test_a_full_queue_names_its_number_of_requests() -> None:
    queue = make_queue(max_requests=1)
    push(queue, "a")
    with pytest.raises(QueueFull, match="1 requests wait"):
        push(queue, "b")
    assert list(queue) == ["a"]


def test_a_queue_full_of_tokens_names_all_three_numbers() -> None:
    queue = make_queue(max_tokens=100)
    push(queue, "a", tokens=60)
    with pytest.raises(QueueFull, match="60 tokens wait, 50 more exceed 100"):
        push(queue, "b", tokens=50)


def test_an_empty_queue_takes_a_request_of_any_size() -> None:
    queue = make_queue(max_tokens=100)
    push(queue, "huge", tokens=5000)
    assert queue.num_tokens == 5000


def test_what_was_accepted_before_comes_back_past_the_bounds_and_to_its_place() -> None:
    queue = make_queue(max_requests=1)
    push(queue, "new", arrival=5)
    queue.put_back("old", tokens=10, priority=0, arrival=1, deadline=60.0)
    assert [queue.pop(), queue.pop()] == ["old", "new"]


def test_removal_frees_tokens_and_says_whether_it_waited() -> None:
    queue = make_queue()
    push(queue, "a", tokens=7)
    assert queue.remove("a")
    assert not queue.remove("a")
    assert (queue.num_tokens, queue.peek()) == (0, None)


def test_an_item_that_left_and_came_back_is_served_once_in_its_new_place() -> None:
    queue = make_queue()
    push(queue, "a", priority=-5, arrival=0)
    push(queue, "b", priority=0, arrival=1)
    queue.remove("a")
    push(queue, "a", priority=5, arrival=2)
    assert [queue.pop(), queue.pop(), queue.peek()] == ["b", "a", None]


def test_deadlines_that_came_remove_their_requests_the_earliest_first() -> None:
    queue = make_queue()
    for item, deadline in (("late", 9.0), ("second", 5.0), ("first", 4.0)):
        push(queue, item, deadline=deadline)
    assert queue.expire(3.9) == []
    assert queue.expire(5.0) == ["first", "second"]
    assert list(queue) == ["late"]


def test_retry_after_is_the_excess_over_the_measured_rate() -> None:
    queue = make_queue(max_tokens=1000)
    push(queue, "a", tokens=1000)
    for second in range(11):
        queue.record_served(100 if second else 0, float(second))
    with pytest.raises(QueueFull) as refusal:
        push(queue, "b", tokens=1000, now=10.0)
    assert refusal.value.retry_after_seconds == pytest.approx(10.0, rel=0.1)


def test_retry_after_is_bounded_when_nothing_is_served_and_short_before_anything_was_measured() -> None:
    queue = make_queue()
    push(queue, "a", tokens=900)
    assert queue.retry_after(0.0) == 1.0
    queue.record_served(1, 0.0)
    assert queue.retry_after(1000.0) == 60.0


@given(st.lists(st.tuples(st.sampled_from(["pop", "push", "remove", "expire"]), st.integers(0, 30)), max_size=300))
def test_counts_match_a_plain_list_whatever_happens(steps: list[tuple[str, int]]) -> None:
    queue, model, arrival = make_queue(max_requests=20, max_tokens=10**9), {}, 0
    for action, number in steps:
        if action == "push" and str(number) not in model and len(model) < 20:
            arrival += 1
            push(queue, str(number), tokens=number, priority=number % 3, arrival=arrival, deadline=float(number))
            model[str(number)] = (number % 3, arrival, number)
        elif action == "pop" and model:
            first = min(model, key=lambda item: model[item][:2])
            assert queue.pop() == first
            del model[first]
        elif action == "remove":
            assert queue.remove(str(number)) == (model.pop(str(number), None) is not None)
        elif action == "expire":
            assert set(queue.expire(number)) == {item for item in model if model[item][2] <= number}
            model = {item: place for item, place in model.items() if place[2] > number}
        assert (set(queue), queue.num_tokens) == (set(model), sum(place[2] for place in model.values()))
