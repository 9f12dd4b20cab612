"""What tenants hold of their quotas, and what these admit: plain Python, for the reference simulator and for policies."""

from collections.abc import Iterable, Mapping
from typing import Any

from weft.cluster.quota import NO_TENANTS, OTHERS, RESOURCES, Limits, Quota


class Cohort:
    """The tenants that share quotas, and what each of them holds.

    Args:
        quotas: of tenants, as they were given.
        tenants: the names of all of them.
        jobs: those that hold something; of each ``tenant``, ``milli_gpus`` and ``row`` are read.
    """

    def __init__(self, quotas: Mapping[str, Quota], tenants: Iterable[str], jobs: Iterable[Any] = ()):
        names = self.names = list(dict.fromkeys([*tenants, *(name for name in quotas if name != OTHERS)]))
        limits = self.limits = Limits.of_tenants(quotas, names)
        self.resources = limits.resources
        self.pool: list[int] = limits.pool.tolist()
        self.nominal, self.reserved, self.limit = (
            dict(zip(names, each.tolist(), strict=True)) for each in (limits.nominal, limits.reserved, limits.limit)
        )
        self.held = {name: [0] * len(self.pool) for name in names}
        for job in jobs if quotas else ():
            self.add(job)

    def requested(self, job: Any) -> list[int]:
        """What a job requests of each resource."""
        amounts = dict(zip(RESOURCES, (job.milli_gpus, int(job.row.cpu[0]), int(job.row.memory[0])), strict=True))
        return [amounts[name] for name in self.resources]

    def add(self, job: Any, sign: int = 1) -> None:
        """A job starts (sign 1) or ends (-1)."""
        for r, amount in enumerate(self.requested(job)):
            self.held[job.tenant][r] += sign * amount

    def in_pool(self, tenant: str, r: int, more: int = 0) -> int:
        """What a tenant, with so much more, takes of the pool of what is lent: all beyond what it does not lend."""
        return max(self.held[tenant][r] + more - self.reserved[tenant][r], 0)

    def lacking(self, job: Any, kept: Mapping[str, list[int]] = NO_TENANTS) -> list[int]:
        """The resources of which the pool has too little for a job, beside what it keeps for other tenants' heads."""
        found = []
        for r, amount in enumerate(self.requested(job)):
            more = self.in_pool(job.tenant, r, amount) - self.in_pool(job.tenant, r)
            if more:
                used = sum(self.in_pool(tenant, r) for tenant in self.held)
                others = sum(of[r] for tenant, of in kept.items() if tenant != job.tenant)
                if used + others + more > self.pool[r]:
                    found.append(r)
        return found

    def admits(self, job: Any, kept: Mapping[str, list[int]] = NO_TENANTS) -> bool:
        """Whether its tenant's quotas admit the job, and the pool has enough left."""
        return not self.beyond(self.limit, job) and not self.lacking(job, kept)

    def borrows(self, job: Any) -> bool:
        """Whether its tenant would hold more than its nominal quota with it."""
        return bool(self.beyond(self.nominal, job))

    def beyond(self, most: Mapping[str, list[int]], job: Any) -> list[int]:
        """The resources of which its tenant would hold more with the job than is in ``most``."""
        held, may = self.held[job.tenant], most[job.tenant]
        return [r for r, amount in enumerate(self.requested(job)) if amount and held[r] + amount > may[r]]
