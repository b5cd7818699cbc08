"""Fair shares between tenants: who is served next when several wait, and what an idle tenant is owed."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.admission import AdmissionQueue
from scheduler.fair_share import MAX_IDLE_TENANTS, FairShare
from scheduler.ranking import SLACK, Ranking

Item = tuple[str, int]  # tenant, serial number


class Door:
    """A queue of which each request costs what it is charged at once."""

    def __init__(self, **weights: float) -> None:
        self.queue: AdmissionQueue[Item] = AdmissionQueue(10**6, 10**9, weights)
        self._arrivals = itertools.count()
        self.served: Counter[str] = Counter()  # tokens

    def push(self, tenant: str, count: int = 1, priority: int = 0) -> None:
        for _ in range(count):
            arrival = next(self._arrivals)
            place = {"tokens": 1, "arrival": arrival, "deadline": 60.0, "now": 0.0}
            self.queue.push((tenant, arrival), priority=priority, tenant=tenant, **place)  # type: ignore[arg-type]

    def serve(self, tokens: int = 10) -> str:
        tenant, _ = self.queue.pop()
        self.charge(tenant, tokens)
        return tenant

    def charge(self, tenant: str, tokens: int) -> None:
        self.served[tenant] += tokens
        self.queue.charge(tenant, tokens)

    def order(self, count: int, tokens: int = 10) -> str:
        return "".join(self.serve(tokens) for _ in range(count))


def test_one_tenant_alone_is_served_by_arrival() -> None:
    door = Door()
    door.push("a", 3)
    assert [door.queue.pop()[1] for _ in range(3)] == [0, 1, 2]


def test_a_flood_lets_a_newcomer_in_after_the_one_request_that_was_first() -> None:
    door = Door()
    door.push("a", 1000)
    door.order(500)
    door.push("b", 4)
    assert door.order(9) == "abababab" + "a"


@given(st.integers(0, 2**32))
def test_two_that_always_wait_differ_by_no_more_than_one_request(seed: int) -> None:
    r, door, largest = random.Random(seed), Door(), 500
    door.push("a", 200)
    door.push("b", 200)
    for _ in range(200):
        door.serve(r.randint(1, largest))
        assert abs(door.served["a"] - door.served["b"]) <= largest


def test_tokens_that_come_while_a_request_runs_count_as_those_at_its_beginning() -> None:
    door = Door()
    door.push("a", 3)
    door.push("b", 3)
    assert door.order(2) == "ab"
    door.charge("a", 15)
    assert door.order(3) == "bba"


def test_weights_of_3_to_1_give_3_to_1() -> None:
    door = Door(gold=3.0)
    door.push("gold", 2000)
    door.push("basic", 2000)
    r = random.Random(0)
    for _ in range(2000):
        door.serve(r.randint(10, 300))
    assert door.served["gold"] / door.served["basic"] == pytest.approx(3.0, rel=0.02)


def test_priorities_come_before_shares() -> None:
    door = Door()
    door.push("a", 2, priority=1)
    door.push("b", 2, priority=0)
    door.charge("b", 10_000)
    assert door.order(4) == "bbaa"


def test_what_was_served_in_one_priority_counts_in_the_others() -> None:
    door = Door()
    door.push("a", 1, priority=-1)
    door.push("a", 2)
    door.push("b", 2)
    assert door.serve(15) == "a"
    assert door.order(4, tokens=10) == "bbaa"


def test_an_idle_tenant_has_saved_nothing_up() -> None:
    door = Door()
    door.push("b")
    door.serve()
    door.push("a", 1000)
    door.order(500)
    door.push("b", 100)
    assert Counter(door.order(100)) == {"a": 50, "b": 50}


def test_what_a_tenant_had_while_nobody_else_waited_is_not_held_against_it() -> None:
    door = Door()
    for _ in range(100):
        door.push("a")
        door.serve()
    door.push("b", 50)
    door.push("a", 50)
    assert Counter(door.order(40)) == {"a": 20, "b": 20}


def test_a_tenant_that_leaves_and_comes_back_at_once_keeps_what_it_was_served() -> None:
    door = Door()
    door.push("a", 10)
    door.push("b")
    door.charge("b", 35)
    door.order(1)  # a
    assert door.queue.remove(("b", 10))
    door.push("b", 2)
    assert door.order(5) == "aaaba"


def test_classes_tell_the_head_of_each_tenant_and_priority_in_the_order_of_service() -> None:
    door = Door()
    door.push("a", 2)
    door.push("b", 3)
    door.push("a", 1, priority=-1)
    door.charge("a", 5)
    assert [tuple(waiting) for waiting in door.queue.classes()] == [
        ("a", -1, 1, ("a", 5)),
        ("b", 0, 3, ("b", 2)),
        ("a", 0, 2, ("a", 0)),
    ]


def test_outputs_of_one_request_that_come_back_singly_share_their_arrival() -> None:
    door = Door()
    for item in (("a", 7), ("a", 8), ("a", 9)):
        door.queue.put_back(item, tokens=1, priority=0, arrival=1, deadline=1.0, tenant="a")
    assert [door.queue.pop() for _ in range(3)] == [("a", 7), ("a", 8), ("a", 9)]


def test_accounts_of_tenants_that_come_once_are_bounded() -> None:
    shares = FairShare({})
    shares.enter("waits")
    for i in range(5 * MAX_IDLE_TENANTS):
        tenant = shares.enter(str(i))
        shares.leave(tenant)
        shares.charge(tenant.name, 1)
    assert len(shares) <= 2 * MAX_IDLE_TENANTS + 2


Step = tuple[str, str, int]


@given(
    st.lists(st.tuples(st.sampled_from(["push", "pop", "charge", "remove"]), st.sampled_from("abc"), st.integers(0, 2)))
)
def test_the_order_is_that_of_a_list_sorted_anew_each_time(steps: Iterable[Step]) -> None:
    queue: AdmissionQueue[int] = AdmissionQueue(1000, 10**6, {"a": 2.0})
    weights = {"a": 2.0, "b": 1.0, "c": 1.0}
    served: dict[str, float] = dict.fromkeys("abc", 0.0)
    waiting: dict[int, tuple[str, int]] = {}  # arrival -> tenant, priority
    for arrival, (action, tenant, number) in enumerate(steps):
        if action == "push":
            owners = {owner for owner, _ in waiting.values()}
            if tenant not in owners:
                floor = min((served[owner] for owner in owners), default=max(served.values()))
                served[tenant] = max(served[tenant], floor)
            queue.push(arrival, tokens=1, priority=number, arrival=arrival, deadline=1.0, now=0.0, tenant=tenant)
            waiting[arrival] = (tenant, number)
        elif action == "charge":
            queue.charge(tenant, number)
            served[tenant] += number / weights[tenant]
        elif action == "remove" and waiting:
            gone = sorted(waiting)[number % len(waiting)]
            assert queue.remove(gone)
            del waiting[gone]
        elif action == "pop" and waiting:
            first = min(waiting, key=lambda item: (waiting[item][1], served[waiting[item][0]], item))
            assert queue.pop() == first
            del waiting[first]


def test_a_ranking_does_not_grow_with_those_that_left() -> None:
    ranking: Ranking[int] = Ranking(lambda member: (member,))
    ranking.put(-1)
    for i in range(10_000):
        ranking.put(i)
        ranking.discard(i)
    assert len(ranking._heap) <= 2 * len(ranking) + SLACK + 1


def test_looking_for_the_first_of_many_asks_few_for_their_key() -> None:
    """A linear search would ask all of them, every time."""
    asked, behind = Counter[int](), dict.fromkeys(range(10_000), 0)

    def key(member: int) -> tuple[int, int]:
        asked[member] += 1
        return behind[member], member

    ranking: Ranking[int] = Ranking(key)
    for member in behind:
        ranking.put(member)
    asked.clear()
    for _ in range(1000):
        first = ranking.first()
        assert first is not None
        behind[first] += 1
    assert asked.total() < 5000
