"""The shape of a tensor in a file of torch's, read without torch and without running anything."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import pickle
import zipfile
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvolt.core.errors import InvalidRequest
from kvolt.frontend.openai_api.prompt_embeds import read_embeds


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def with_pickle(pickled: bytes, compression: int = zipfile.ZIP_STORED, **more: bytes) -> str:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, data in more.items():
            archive.writestr(f"archive/{name}", data)
    return text(file.getvalue())


def refusal(given: str) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read_embeds(given)
    assert caught.value.fields["param"] == "prompt_embeds"
    return caught.value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (5, 64), (1, 5, 64), (300, 7), (70000, 2)])
def test_as_many_as_it_has_rows(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    given = text(saved(torch.zeros(shape, dtype=dtype)))
    found = read_embeds(given)
    assert (found.num_rows, found.text) == (shape[-2], given)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_whatever_protocol_its_pickle_has(protocol: int) -> None:
    assert read_embeds(text(saved(torch.zeros(5, 3), pickle_protocol=protocol))).num_rows == 5


def test_a_view_has_its_own_shape() -> None:
    assert read_embeds(text(saved(torch.zeros(6, 4).T))).num_rows == 4
    assert read_embeds(text(saved(torch.zeros(6, 4)[2:5]))).num_rows == 3


@pytest.mark.parametrize("value", [torch.zeros(1).expand(100_000, 64), torch.zeros(1, 8).expand(3, 8)])
def test_what_is_one_value_many_times_over(value: torch.Tensor) -> None:
    """Two kilobytes here would be gigabytes in a worker."""
    assert "fewer values than the shape" in refusal(text(saved(value))).message


def test_integers() -> None:
    assert "not floats" in refusal(text(saved(torch.zeros(3, 4, dtype=torch.int32)))).message


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02K\x01q\x00" + b"h\x00h\x00\x86q\x00" * 500 + b")R.",  # twice as large with each five bytes
        b"\x80\x02K\x01" + b"\x85" * 3500 + b")R.",
        b"\x80\x02K\x01" + b"\x85" * 3500 + b".",
        b"\x80\x02c\\orch._utils\n_rebuild_tensor_v2\n.",  # what it names is an escape that Python warns of
    ],
)
def test_values_within_values_without_end(pickled: bytes) -> None:
    """To write them out would take hours, or more stack than there is."""
    assert "does not contain a tensor" in refusal(with_pickle(pickled)).message


def test_the_same_vectors_have_the_same_digest() -> None:
    one, same, other = (read_embeds(text(saved(torch.full((5, 3), each)))) for each in (1.0, 1.0, 2.0))
    assert one.digest == same.digest != other.digest


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(4), "the shape is (4,)"),
        (torch.zeros(2, 5, 3), "the shape is (2, 5, 3)"),
        (torch.zeros(0, 3), "empty"),
        (torch.zeros(5, 3).to_sparse(), "calls 'torch"),
        (torch.nn.Parameter(torch.zeros(5, 3)), "calls 'torch._utils _rebuild_parameter'"),
        ([torch.zeros(5, 3)], "EMPTY_LIST"),
        ({"a": torch.zeros(5, 3)}, "EMPTY_DICT"),
        (7, "tensor"),
        ("x", "tensor"),
    ],
)
def test_anything_but_one_dense_tensor(value: Any, words: str) -> None:
    assert words in refusal(text(saved(value))).message


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("no base64", "invalid base64"),
        ("AAAA\n", "invalid base64"),
        ("é", "invalid base64"),
        ("", "invalid file"),
        ("AAAA", "invalid file"),
        (text(saved(torch.zeros(5, 3), _use_new_zipfile_serialization=False)), "invalid file"),
        (text(saved(torch.zeros(5, 3))[:-30]), "invalid file"),
    ],
)
def test_what_is_no_file_of_torchs(given: str, words: str) -> None:
    assert words in refusal(given).message


class Danger:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/kvolt-must-not-be",)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_nothing_in_it_is_run(protocol: int) -> None:
    refusal(with_pickle(pickle.dumps(Danger(), protocol=protocol)))
    assert not os.path.exists("/tmp/kvolt-must-not-be")


def test_a_file_that_unpacks_to_more_than_it_is() -> None:
    refused = refusal(with_pickle(b"", zipfile.ZIP_DEFLATED, data=bytes(1 << 22)))
    assert "compressed" in refused.message
    assert "exactly one tensor" in refusal(with_pickle(b" " * 5000)).message
    assert "too many" in refusal(text(b"PK\x01\x02" * 65)).message


@given(st.binary(max_size=400))
def test_any_pickle_is_read_or_refused(pickled: bytes) -> None:
    refusal(with_pickle(pickled))


@given(st.integers(0, 5000), st.integers(0, 255), st.booleans())
def test_a_file_with_a_wrong_byte_is_read_or_refused(position: int, byte: int, in_pickle: bool) -> None:
    whole = saved(torch.zeros(5, 3))
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        pickled = archive.read(archive.namelist()[0])
    broken = bytearray(pickled if in_pickle else whole)
    broken[position % len(broken)] = byte
    with contextlib.suppress(InvalidRequest):
        given = with_pickle(bytes(broken)) if in_pickle else text(bytes(broken))
        assert read_embeds(given).num_rows > 0
