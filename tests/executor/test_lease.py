"""Who may own the executor."""

from __future__ import annotations

import pytest

from executor.lease import Holder, Lease, OwnedByOther, StaleSession


def test_the_first_comer_gets_the_lease() -> None:
    lease = Lease()
    assert lease.acquire(Holder("a", 1)) is None
    assert lease.holder == Holder("a", 1)


def test_another_scheduler_is_told_the_owner() -> None:
    lease = Lease()
    lease.acquire(Holder("a", 1))
    with pytest.raises(OwnedByOther, match="owned by scheduler 'a'"):
        lease.acquire(Holder("b", 9))


def test_a_higher_session_of_the_owner_takes_over() -> None:
    lease = Lease()
    lease.acquire(Holder("a", 1))
    assert lease.acquire(Holder("a", 2)) == Holder("a", 1)


@pytest.mark.parametrize("session", [4, 5])
def test_a_session_that_is_not_higher_is_refused_naming_both(session: int) -> None:
    lease = Lease()
    lease.acquire(Holder("a", 5))
    with pytest.raises(StaleSession, match=f"session {session} of scheduler 'a' is not higher than session 5"):
        lease.acquire(Holder("a", session))


def test_a_session_that_lost_the_lease_does_not_release_it() -> None:
    lease = Lease()
    lease.acquire(Holder("a", 1))
    lease.acquire(Holder("a", 2))
    lease.release(Holder("a", 1))
    assert lease.holder == Holder("a", 2)


def test_a_released_lease_is_anybodys() -> None:
    lease = Lease()
    lease.acquire(Holder("a", 7))
    lease.release(Holder("a", 7))
    assert lease.acquire(Holder("b", 1)) is None
