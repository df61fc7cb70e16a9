"""Attention on the CPU, by C kernels and by plain torch, beside the same in float64."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from tests.unit.engines.native.cpu_lab import (  # noqa: E402
    TOLERANCE,
    TYPES,
    Case,
    Shape,
    close,
    needed,
    no_kernels,
    rounded_alike,
    threads,
)

from kvolt.engines.native.kernels.cpu_kernels import CpuKernels  # noqa: E402
from kvolt.engines.native.model.attention_cpu import CpuAttention, PagedAttention  # noqa: E402


@pytest.fixture(scope="module")
def native() -> CpuKernels:
    return needed()


def check(case: Case, num_threads: int = 1) -> None:
    """Nothing that was not written is read: it is not a number."""
    expected, expected_slab = case.expected()
    slab = case.slab(float("nan"))
    with threads(num_threads):
        found = case.run(slab)
    count = case.batch.num_decodes
    dtype = case.shape.dtype
    close(found[:count], expected[:count], dtype)
    torch.testing.assert_close(found[count:].double(), expected[count:], rtol=0.02, atol=0.02)
    if dtype is torch.bfloat16 and case.shape.qk_norm:
        # A rotated value is the difference of two rounded ones: one step of theirs is more than one of its own.
        step = 2 * TOLERANCE[dtype]
        torch.testing.assert_close(slab.tensor, expected_slab.tensor, rtol=step, atol=step, equal_nan=True)
    else:
        close(slab.tensor, expected_slab.tensor, dtype)
    rounded_alike(slab.tensor, expected_slab.tensor)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("block_size", [1, 4, 16, 32, 200])
@pytest.mark.parametrize("head_dim", [16, 48, 64, 128])
@pytest.mark.parametrize("dtype", TYPES)
def test_decodes_of_ragged_contexts(
    native: CpuKernels, dtype: torch.dtype, head_dim: int, block_size: int, num_threads: int
) -> None:
    shape = Shape(dtype=dtype, head_dim=head_dim, block_size=block_size)
    check(Case(shape, [1, 2, 63, 64, 65, 150]), num_threads)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3])
@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 7, 8, 9, 18])
def test_query_heads_that_share_a_kv_head(native: CpuKernels, ratio: int, num_kv_heads: int) -> None:
    shape = Shape(dtype=torch.bfloat16, ratio=ratio, num_kv_heads=num_kv_heads, head_dim=32)
    for num_threads in (1, 2):
        check(Case(shape, [70, 3]), num_threads)


@settings(max_examples=40)
@given(
    shape=st.builds(
        Shape,
        dtype=st.sampled_from(TYPES),
        num_kv_heads=st.integers(1, 3),
        ratio=st.sampled_from([1, 3, 4]),
        head_dim=st.sampled_from([16, 64, 80, 128]),
        block_size=st.sampled_from([3, 4, 16, 32]),
        qk_norm=st.booleans(),
    ),
    contexts=st.lists(st.integers(1, 140), max_size=40),
    chunks=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 40)), max_size=3),
    num_threads=st.sampled_from([1, 2]),
)
def test_any_step(
    native: CpuKernels,
    shape: Shape,
    contexts: list[int],
    chunks: list[tuple[int, int]],
    num_threads: int,
) -> None:
    chunks = [(count, count + before) for count, before in chunks]
    if contexts or chunks:
        check(Case(shape, contexts, chunks), num_threads)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_plain_way_gives_the_same(dtype: torch.dtype) -> None:
    case = Case(Shape(dtype=dtype, qk_norm=True), [1, 30, 150], [(7, 7), (5, 21)])
    expected, expected_slab = case.expected()
    with no_kernels():
        slab = case.slab(0.0)
        found = case.run(slab)
    bound = {torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound)
    close(slab.tensor, expected_slab.tensor.nan_to_num(), dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_result_depends_neither_on_threads_nor_on_the_batch(native: CpuKernels, dtype: torch.dtype) -> None:
    """To the last bit: alone, among others, on one thread, and with its context split over two."""
    shape = Shape(dtype=dtype)
    many = Case(shape, [300, *range(1, 40)])
    with threads(1):
        among = many.run(many.slab(0.0))[0]
    single = Case(shape, [300])
    for position in range(299):  # the same keys and values, in other blocks
        (to, to_inside), (row, inside) = divmod(position, 16), divmod(position, 16)
        at, source = int(single.batch.block_tables[0, to]), int(many.batch.block_tables[0, row])
        single.cached[at, 1, :, :, to_inside] = many.cached[source, 1, :, :, inside]
    single.qkv, single.rotation = many.qkv[:1], many.rotation
    for num_threads in (1, 2):
        with threads(num_threads):
            assert torch.equal(single.run(single.slab(0.0))[0], among)


@pytest.mark.parametrize(
    "shape",
    [Shape(dtype=torch.float16), Shape(head_dim=24), Shape(head_dim=528, num_kv_heads=1)],
    ids=["half", "odd heads", "wide heads"],
)
def test_what_attention_kernels_do_not_fit_goes_the_plain_way(native: CpuKernels, shape: Shape) -> None:
    case = Case(shape, [3, 40], [(4, 9)])
    expected, _ = case.expected()
    bound = 0.01 if shape.dtype is torch.float16 else 1e-5
    torch.testing.assert_close(case.run(case.slab(0.0)).double(), expected, rtol=bound, atol=bound)


def test_heads_with_other_strides_go_the_plain_way(native: CpuKernels) -> None:
    case = Case(Shape(), [3, 40], [(4, 9)])
    expected, _ = case.expected()
    slab = case.slab(0.0)
    attention = CpuAttention(slab, case.shape.num_heads, case.shape.head_dim**-0.5)
    q, k, v = case.heads()
    backwards = v.flip(2).contiguous().transpose(0, 1).contiguous().transpose(0, 1).flip(2)
    found = attention.rotate_and_attend(1, q, k, backwards, case.rotation, case.batch)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("contexts", "num_threads", "is_split"),
    [([300], 1, False), ([300], 2, True), ([300] * 7, 2, True), ([300] * 8, 2, False), ([64] * 3, 2, False)],
)
def test_contexts_are_split_where_there_are_more_threads_than_sequences_keep_busy(
    native: CpuKernels, contexts: list[int], num_threads: int, is_split: bool
) -> None:
    case = Case(Shape(), contexts)
    paged = PagedAttention(native, case.slab(0.0), case.shape.num_heads, 0.125)
    with threads(num_threads):
        step = paged.step(case.batch, case.rotation)
    assert step is not None
    assert (step.partials is not None) == is_split


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("slots", slot) for slot in (-1, 7 * 16)),
        *(("positions", position) for position in (-1, 40 + 3)),
        *(("block_tables", block) for block in (-1, 7)),
        *(("context_lens_t", length) for length in (0, 3 * 16 + 1)),
    ],
)
def test_a_step_outside_of_the_slab_is_refused(native: CpuKernels, field: str, value: int) -> None:
    """Of six blocks and a spare one, three to a sequence."""
    case = Case(Shape(), [40, 40])
    getattr(case.batch, field).view(-1)[0] = value
    slab = case.slab(0.0)
    before = slab.tensor.clone()
    with pytest.raises(IndexError, match="exceeds its KV blocks or positions"):
        case.run(slab)
    assert torch.equal(slab.tensor, before)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_an_engine_answers_the_same_with_and_without_kernels(
    native: CpuKernels, tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from tests.unit.engines.native.equality_lab import answers, ask, core_of, make_prompts

    from kvolt.testing.tiny_models import tiny_checkpoint

    folder = tiny_checkpoint(tmp_path / "model", architecture, seed=3)
    requests = [ask(name, prompt, 10, logprobs=2) for name, prompt in make_prompts(1, 900).items()]
    calls = []
    monkeypatch.setattr(native, "attend", lambda *a, run=native.attend: (calls.append(1), run(*a)))
    arguments = {"max_batch_tokens": 37, "block_size": 5}
    found = answers(core_of(folder, **arguments), *requests)
    num_calls = len(calls)
    with no_kernels():
        expected = answers(core_of(folder, **arguments), *requests)
    assert num_calls > 0
    assert len(calls) == num_calls
    for name, one in found.items():
        assert one.tokens == expected[name].tokens
        for left, right in zip(one.logprobs, expected[name].logprobs, strict=True):
            assert left.logprob == pytest.approx(right.logprob, abs=1e-4)
