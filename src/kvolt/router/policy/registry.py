"""Policies by name: ours with the weights of the settings, and functions of somebody else's."""

from __future__ import annotations

from collections.abc import Callable

from kvolt.core.errors import ConfigError
from kvolt.router.policy.custom import CustomPolicy, is_custom
from kvolt.router.policy.policy import ClassicWeights, LatencyWeights, Policy, classic, latency
from kvolt.router.policy.shadow import Shadow
from kvolt.runtime.config.router_settings import RouterSettings


def latency_of(settings: RouterSettings) -> Policy:
    return latency(LatencyWeights(settings.room_weight, settings.affinity_s))


def classic_of(settings: RouterSettings) -> Policy:
    return classic(ClassicWeights(settings.overlap_weight, settings.affinity_blocks))


POLICIES: dict[str, Callable[[RouterSettings], Policy]] = {"latency": latency_of, "classic": classic_of}


def policy_named(name: str, settings: RouterSettings) -> Policy:
    """ConfigError for one that there is not, or that does not work."""
    if is_custom(name):
        return CustomPolicy(name, latency_of(settings))
    if name not in POLICIES:
        raise ConfigError(
            f"there is no policy {name!r}",
            key="router",
            remedy=f"known: {', '.join(POLICIES)}, FILE.py:FUNCTION, MODULE:FUNCTION",
        )
    return POLICIES[name](settings)


def shadow_of(settings: RouterSettings) -> tuple[Shadow, Policy] | None:
    """The second policy that is only asked, if one is wanted; what it fails on nobody decides for it."""
    if settings.shadow is None:
        return None
    policy = policy_named(settings.shadow, settings)
    return Shadow(settings.shadow, policy.costs if isinstance(policy, CustomPolicy) else policy), policy
