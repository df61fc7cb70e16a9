"""Policies by name: built-in ones with weights from the settings, and user-defined functions."""

from __future__ import annotations

from collections.abc import Callable

from kvolt.core.errors import ConfigError
from kvolt.router.policy.custom import CustomPolicy, is_custom
from kvolt.router.policy.policy import ClassicWeights, LatencyWeights, Policy, classic, latency
from kvolt.router.policy.shadow import ShadowPolicy
from kvolt.runtime.config.router_settings import RouterSettings


def latency_policy(settings: RouterSettings) -> Policy:
    return latency(LatencyWeights(settings.room_weight, settings.affinity_s))


def classic_policy(settings: RouterSettings) -> Policy:
    return classic(ClassicWeights(settings.overlap_weight, settings.affinity_blocks))


POLICIES: dict[str, Callable[[RouterSettings], Policy]] = {
    "latency": latency_policy,
    "classic": classic_policy,
}


def find_policy(name: str, settings: RouterSettings) -> Policy:
    """Raises ConfigError for an unknown name or a function that does not load."""
    if is_custom(name):
        return CustomPolicy(name, latency_policy(settings))
    if name not in POLICIES:
        raise ConfigError(
            f"unknown policy: {name!r}",
            key="router",
            remedy=f"known: {', '.join(POLICIES)}, FILE.py:FUNCTION, MODULE:FUNCTION",
        )
    return POLICIES[name](settings)


def shadow_policy(settings: RouterSettings) -> tuple[ShadowPolicy, Policy] | None:
    """The shadow policy of the settings, if any. Requests on which it fails are only counted."""
    if settings.shadow is None:
        return None
    policy = find_policy(settings.shadow, settings)
    return ShadowPolicy(settings.shadow, policy.costs if isinstance(policy, CustomPolicy) else policy), policy
