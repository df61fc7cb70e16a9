"""Addresses as people write them."""

from __future__ import annotations

import asyncio
import ssl

import pytest

from kvolt.core.errors import ConfigError, ConnectFailed
from kvolt.runtime.network import (
    SocketNetwork,
    is_loopback,
    is_wildcard,
    join_address,
    peer_group,
    same_host,
    split_address,
    split_host,
)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("a", "a", None),
        ("a:7400", "a", 7400),
        ("10.0.0.5:0", "10.0.0.5", 0),
        ("fe80::1", "fe80::1", None),
        ("[fe80::1]", "fe80::1", None),
        ("[fe80::1]:7400", "fe80::1", 7400),
        ("::1", "::1", None),
        ("a:", "a:", None),
        (":80", ":80", None),
        ("a:http", "a:http", None),
        ("", "", None),
    ],
)
def test_a_host_with_or_without_a_port(text: str, host: str, port: int | None) -> None:
    assert split_host(text) == (host, port)


@pytest.mark.parametrize(("host", "port"), [("a", 1), ("127.0.0.1", 0), ("fe80::1", 65535)])
def test_an_address_comes_apart_as_it_was_joined(host: str, port: int) -> None:
    assert split_address(join_address(host, port)) == split_host(join_address(host, port)) == (host, port)


@pytest.mark.parametrize("text", ["", "a", ":1", "a:", "a:b", "a:65536", "a:-1"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        split_address(text)


def test_hosts_of_this_machine_only() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.0.1", "localhost", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.5", "", "1270.a")))
    assert all(map(is_wildcard, ("0.0.0.0", "::", "*", "")))
    assert not any(map(is_wildcard, ("127.0.0.1", "::1", "a")))


@pytest.mark.parametrize(
    ("host", "group"),
    [
        ("10.0.0.5", "10.0.0.5"),
        ("::ffff:10.0.0.5", "10.0.0.5"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("2001:db8:0:1:ffff:ffff:ffff:ffff", "2001:db8:0:1::/64"),
        ("2001:db8:0:2::1", "2001:db8:0:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unix", "unix"),
        ("?", "?"),
    ],
)
def test_an_ipv6_host_counts_with_its_whole_network(host: str, group: str) -> None:
    assert peer_group(host) == group


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.5", "10.0.0.5", True),
        ("10.0.0.5", "10.0.0.6", False),
        ("10.0.0.5", "::ffff:10.0.0.5", True),
        ("10.0.0.5", "::ffff:10.0.0.6", False),
        ("fe80::1", "FE80:0::1", True),
        ("worker", "Worker", True),
        ("worker", "10.0.0.5", False),
        ("localhost", "::1", True),
        ("127.0.0.1", "::ffff:127.0.0.1", True),
        ("0.0.0.0", "127.0.0.1", True),
        ("127.0.0.1", "10.0.0.5", False),
        ("0.0.0.0", "10.0.0.5", False),
    ],
)
def test_hosts_written_in_two_ways(one: str, other: str, same: bool) -> None:
    assert same_host(one, other) is same
    assert same_host(other, one) is same


async def test_an_end_within_the_tls_handshake_has_a_reason() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10_000)
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        address = join_address(*server.sockets[0].getsockname())
        with pytest.raises(ConnectFailed, match="connection closed"):
            await SocketNetwork(tls=ssl.create_default_context()).connect(address, asyncio.Protocol, 5.0)
