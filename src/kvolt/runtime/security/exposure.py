"""Refuses internal listeners that other machines reach while no cluster key protects them."""

from __future__ import annotations

from kvolt.core.errors import ConfigError
from kvolt.runtime.config.settings import ClusterSettings
from kvolt.runtime.network import is_loopback


def has_credentials(cluster: ClusterSettings) -> bool:
    return any(each is not None for each in (cluster.key, cluster.certificate, cluster.join_token))


def check_exposure(cluster: ClusterSettings, host: str, key: str, what: str) -> None:
    """Raise ConfigError if other machines reach a listener on this host and nothing authenticates them.

    `key`: the setting with the host; `what`: the listener in a sentence.
    """
    if is_loopback(host) or cluster.insecure_network or has_credentials(cluster):
        return
    raise ConfigError(
        f"{what} would listen on {host}, where any machine that reaches it can control the cluster",
        key=key,
        remedy="create a key with `kvolt cluster init` and start all processes with --cluster-key FILE, or use "
        "--insecure-network if only trusted machines reach this network",
    )
