"""Endpoint names and instances as they are registered."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvolt.core.endpoints import (
    EndpointAddress,
    Instance,
    InstanceState,
    decode_instance,
    encode_instance,
)
from kvolt.core.errors import ConfigError
from kvolt.core.ids import InstanceId

ENDPOINT = EndpointAddress("ns", "worker", "generate")
INSTANCE = Instance(id=InstanceId("7f"), endpoint=ENDPOINT, address="10.0.0.1:7400")


@pytest.mark.parametrize("text", ["a.b.c", "ns.worker.generate", "A_1.b-2._", ".".join(["x" * 63] * 3)])
def test_names(text: str) -> None:
    assert str(EndpointAddress.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a.b",
        "a.b.c.d",
        "a..c",
        ".b.c",
        "a.b.",
        "a.b.c ",
        "a.b.c\n",
        "-a.b.c",
        "a.b/x.c",
        "a.b#1.c",
        "ä.b.c",
        f"a.b.{'x' * 64}",
    ],
)
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EndpointAddress.parse(text)
    assert caught.value.fields["remedy"]


def test_keys_lie_under_the_prefix_and_no_other() -> None:
    assert INSTANCE.key == "instances/ns/worker/generate/7f"
    assert INSTANCE.key.startswith(ENDPOINT.prefix)
    assert not INSTANCE.key.startswith(EndpointAddress("ns", "worker", "gen").prefix)
    assert INSTANCE.target == "ns.worker.generate#7f"


def test_round_trip() -> None:
    full = msgspec.structs.replace(
        INSTANCE,
        process="p",
        state=InstanceState.DRAINING,
        admin="h:1",
        info=msgspec.Raw(b"\x93\x01\x02\x03"),
    )
    for instance in (INSTANCE, full):
        again = decode_instance(encode_instance(instance))
        assert again is not None
        assert bytes(again.info) == bytes(instance.info)
        assert msgspec.structs.replace(again, info=instance.info) == instance


def test_a_newer_instance_is_understood() -> None:
    fields = msgspec.msgpack.decode(encode_instance(INSTANCE)) | {"zone": {"a": [1]}}
    assert decode_instance(msgspec.msgpack.encode(fields)) == INSTANCE


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"text",
        b"\x81\xa1z" + b"\x91" * 5000,
        b"\x81\xa2id\xa2\xff\xff",
        encode_instance(INSTANCE)[:-1],
    ],
)
def test_what_is_no_instance_is_none(value: bytes) -> None:
    assert decode_instance(value) is None


def test_an_unknown_state_is_none() -> None:
    fields = msgspec.msgpack.decode(encode_instance(INSTANCE)) | {"state": "asleep"}
    assert decode_instance(msgspec.msgpack.encode(fields)) is None


@given(st.binary(max_size=60))
def test_any_bytes(value: bytes) -> None:
    decode_instance(value)
