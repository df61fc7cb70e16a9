"""Products with kept weights: every way of keeping them gives the product, as exactly as it promises."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

from kvolt.engines.native.model.linear import Int8, Packed, projection


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("rows", [1, 5, 17, 32, 33, 64, 321, 330, 512, 1281, 1282])
@pytest.mark.parametrize("biased", [True, False])
def test_packed_is_the_plain_product(rows: int, biased: bool) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(48, 32).bfloat16(), torch.randn(rows, 32).bfloat16()
    bias = torch.randn(48).bfloat16() if biased else None
    kept = projection(weight.clone(), bias)
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bfloat16 products")
    assert isinstance(kept, Packed)
    product = kept(x)
    assert product.is_contiguous()
    torch.testing.assert_close(product, F.linear(x, weight, bias), rtol=2e-2, atol=2e-2)


def test_a_part_of_a_wider_input_is_taken_as_it_is() -> None:
    weight, x = torch.randn(32, 64).bfloat16(), torch.randn(4, 192).bfloat16()
    for kept in (projection(weight, None), projection(weight, None, "int8")):
        torch.testing.assert_close(kept(x[:, 64:128]), kept(x[:, 64:128].contiguous()))


@pytest.mark.parametrize("rows", [7, 64])
def test_int8_is_near_the_plain_product(rows: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(64, 128).bfloat16(), torch.randn(rows, 128).bfloat16()
    weight[3] = 0  # a column of zeros has no scale of its own
    kept = projection(weight, torch.ones(64).bfloat16(), "int8")
    assert isinstance(kept, Int8)
    exact = F.linear(x.float(), weight.float(), torch.ones(64))
    error = (kept(x).float() - exact).abs().max() / exact.abs().max()
    assert error < 0.03
    assert torch.all(kept(x)[:, 3] == 1)


def test_a_weight_that_is_no_whole_number_of_tiles_is_not_quantized() -> None:
    for shape in ((32, 8), (40, 64), (8, 64)):
        assert not isinstance(projection(torch.randn(shape).bfloat16(), None, "int8"), Int8)


def test_float32_is_kept_as_it_is() -> None:
    weight, x = torch.randn(6, 4), torch.randn(3, 4)
    for quantize in ("none", "int8"):
        kept = projection(weight, None, quantize)  # type: ignore[arg-type]
        assert torch.equal(kept(x), F.linear(x, weight))
