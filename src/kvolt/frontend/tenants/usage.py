"""Usage of each tenant: requests, tokens, refusals. Collected as metrics, and shown by `kvolt usage`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec
from prometheus_client.core import Metric

from kvolt.runtime.metric_families import counter, gauge

USAGE_DETAILS = "tenant_usage"
"""Section of a frontend's status: TenantUsage by tenant."""
_MAX_TENANTS = 4096
"""Series; tenants beyond them, which a store that changes may have over time, are counted together."""
_OTHER = "(other)"
UNKNOWN = "(none)"
"""Label of requests without a valid key; no tenant can have this name."""


class TenantUsage(msgspec.Struct):
    """Counts since the start of the process."""

    requests: int = 0
    active: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    refused: dict[str, int] = {}
    """By reason."""

    def count_refusal(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def add(self, other: TenantUsage) -> None:
        self.requests += other.requests
        self.active += other.active
        self.input_tokens += other.input_tokens
        self.output_tokens += other.output_tokens
        self.refused = dict(Counter(self.refused) + Counter(other.refused))


class UsageMeter:
    """Usage by tenant, of this process."""

    def __init__(self) -> None:
        self._tenants: dict[str, TenantUsage] = {}

    def of(self, tenant: str) -> TenantUsage:
        """Usage of a tenant of the store; client-chosen names must not get here."""
        usage = self._tenants.get(tenant)
        if usage is None:
            if len(self._tenants) >= _MAX_TENANTS:
                return self._tenants.setdefault(_OTHER, TenantUsage())
            usage = self._tenants[tenant] = TenantUsage()
        return usage

    def describe(self) -> dict[str, TenantUsage]:
        return self._tenants

    def collect(self) -> Iterator[Metric]:
        tenants = [((name,), usage) for name, usage in self._tenants.items()]
        label = ("tenant",)
        yield gauge(
            "kvolt_tenant_active_requests",
            "Requests in progress, by tenant",
            label,
            ((at, usage.active) for at, usage in tenants),
        )
        for name, help_text, field in (
            ("requests", "Admitted requests, by tenant", "requests"),
            ("input_tokens", "Prompt tokens of answered requests, by tenant", "input_tokens"),
            ("output_tokens", "Tokens generated, by tenant", "output_tokens"),
        ):
            values = [(at, float(getattr(usage, field))) for at, usage in tenants]
            yield counter(f"kvolt_tenant_{name}", help_text, label, values)
        refused = [
            ((*at, reason), float(count)) for at, usage in tenants for reason, count in usage.refused.items()
        ]
        yield counter(
            "kvolt_tenant_refused",
            "Requests refused because of the key or a limit, by tenant and reason",
            ("tenant", "reason"),
            refused,
        )
