"""The error tree: codes are names, and an error comes back from another process as what it was."""

from __future__ import annotations

import ast
import inspect

import msgspec
import pytest

from kvolt.core import errors
from kvolt.core.errors import ErrorInfo, Fault, KvoltError, Overloaded, from_info, to_info, with_fields


def tree(root: type[KvoltError] = KvoltError) -> list[type[KvoltError]]:
    own = [kind for kind in root.__subclasses__() if kind.__module__ == errors.__name__]
    return [root, *(each for kind in own for each in tree(kind))]


KINDS = tree()


def through_the_wire(error: BaseException) -> KvoltError:
    return from_info(msgspec.msgpack.decode(msgspec.msgpack.encode(to_info(error)), type=ErrorInfo))


def test_the_tree_is_found() -> None:
    defined = [
        node.name for node in ast.walk(ast.parse(inspect.getsource(errors))) if isinstance(node, ast.ClassDef)
    ]
    assert {kind.__name__ for kind in KINDS} == set(defined) - {"Fault", "ErrorInfo"}


def test_codes_are_unique() -> None:
    assert len({kind.code for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_says_whose_fault_it_is(kind: type[KvoltError]) -> None:
    assert isinstance(kind.fault, Fault)
    assert isinstance(kind.retryable, bool)
    assert kind.__doc__
    assert not (kind.fault is Fault.CALLER and kind.retryable), "the same request would fail again"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_round_trip(kind: type[KvoltError]) -> None:
    fields = {"text": "é", "whole": 2**40, "part": 0.5, "flag": True, "none": None}
    error = through_the_wire(kind("what happened", **fields))
    assert type(error) is kind
    assert (error.message, error.fields, str(error)) == ("what happened", fields, "what happened")


def test_fields_may_have_any_name() -> None:
    error = through_the_wire(errors.NotFound("x", **{"message": "m", "self": 1, "a b": 2, "code": "c"}))
    assert error.fields == {"message": "m", "self": 1, "a b": 2, "code": "c"}


def test_a_subclass_of_elsewhere_comes_back_as_the_base() -> None:
    class Special(KvoltError):
        code = "special"

    error = through_the_wire(Special("x", detail=1))
    assert type(error) is KvoltError
    assert error.fields == {"code": "special", "detail": 1}


def test_a_foreign_error_tells_only_its_type() -> None:
    error = through_the_wire(ValueError("the password is 1234"))
    assert type(error) is KvoltError
    assert error.message == "internal error (ValueError)"
    assert error.fields == {}


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        (2**63, str(2**63)),
        (-(2**64), str(-(2**64))),
        (2**63 - 1, 2**63 - 1),
        ([1, 2], "[1, 2]"),
        ({"a": 1}, "{'a': 1}"),
        (b"x", "b'x'"),
        ("lone \ud800", "lone ?"),
        (Fault.CALLER, "caller"),
        ("x" * 5000, "x" * 1023 + "…"),
    ],
)
def test_any_field_can_be_sent(value: object, sent: object) -> None:
    error = through_the_wire(errors.EngineFailed("x", engine=value))  # type: ignore[arg-type]
    assert error.fields == {"engine": sent}


def test_a_long_or_broken_message_is_cut_to_what_can_be_sent() -> None:
    assert len(through_the_wire(KvoltError("x" * 10_000_000)).message) == 4096
    assert through_the_wire(KvoltError("a\udc80b")).message == "a?b"


def test_repr_shows_the_fields() -> None:
    assert repr(errors.NotFound("no", kind="card")) == "NotFound('no', kind='card')"


def test_fields_are_the_errors_own() -> None:
    first, second = KvoltError("a", x=1), KvoltError("b")
    assert (first.fields, second.fields) == ({"x": 1}, {})


def test_more_can_be_said_of_an_error_that_is_several_requests_end() -> None:
    shared = Overloaded("full", queue="q")
    shared.__cause__ = KeyError("x")
    told = with_fields(shared, gpu_work="none", queue="other")
    assert (type(told), told.message, told.fields) == (Overloaded, "full", {"gpu_work": "none", "queue": "q"})
    assert told.__cause__ is shared.__cause__
    assert shared.fields == {"queue": "q"}
