"""How much each tenant was served, so that the one which had the least for its weight comes next.

A virtual token counter (Sheng et al., OSDI 2024): tokens served over weight, kept while somebody waits. A tenant that
was idle comes back with no less than the least of those who wait, so that it is owed nothing for the time in which it
wanted nothing; and when nobody waits at all, all are even, since what nobody else wanted was taken from nobody.
Knows no requests and no order between priorities.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.ranking import Ranking

MAX_IDLE_TENANTS = 4096  # whose accounts are kept; names come from clients, so they must be bounded


@dataclass(slots=True, eq=False)
class Tenant:
    """An account. `served` only grows."""

    name: str
    weight: float
    served: float  # tokens over weight
    num_waiting: int = 0


class FairShare:
    """The accounts."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Of tenants named, above 0; all others have 1."""
        assert all(weight > 0 for weight in weights.values())
        self._weights = weights
        self._tenants: dict[str, Tenant] = {}
        self._waiting: Ranking[Tenant] = Ranking(lambda tenant: (tenant.served, tenant.name))
        self._most_served = 0.0

    def __len__(self) -> int:
        """Accounts kept."""
        return len(self._tenants)

    def enter(self, name: str) -> Tenant:
        """One more request of this tenant waits."""
        tenant = self._account(name)
        if not tenant.num_waiting:
            tenant.served = max(tenant.served, self._floor())
            self._most_served = max(self._most_served, tenant.served)
        tenant.num_waiting += 1
        self._waiting.put(tenant)
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """One of its requests waits no more."""
        tenant.num_waiting -= 1
        if not tenant.num_waiting:
            self._waiting.discard(tenant)
            self._forget_idle()

    def charge(self, name: str, tokens: int) -> None:
        """So many tokens were computed for this tenant."""
        tenant = self._account(name)
        tenant.served += tokens / tenant.weight
        self._most_served = max(self._most_served, tenant.served)

    def _account(self, name: str) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, self._weights.get(name, 1.0), self._floor())
        return tenant

    def _floor(self) -> float:
        """What a tenant that comes now has had at the least."""
        least = self._waiting.first()
        return self._most_served if least is None else least.served

    def _forget_idle(self) -> None:
        """Those with the least go first: they lose the least, or nothing where they are below the floor."""
        if len(self._tenants) - len(self._waiting) <= 2 * MAX_IDLE_TENANTS:
            return
        idle = sorted((t for t in self._tenants.values() if not t.num_waiting), key=lambda t: t.served)
        for tenant in idle[:-MAX_IDLE_TENANTS]:
            del self._tenants[tenant.name]
