"""Attention on the CPU: however rows are cut, mixed, paged and spread over threads, a row has the same bytes.

Inputs spread over many powers of two, so another order of additions shows; torch's attention is the control. Pages are
filled as an engine fills them, from NaN: whatever a row reads beyond its own position would be seen.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from isobit.kernels.cpu.features import supported_libraries
from isobit.kernels.cpu.library import ATTENTION_SCHEDULES, CpuLibrary
from isobit.kernels.interface import AttentionInputs, AttentionShape
from isobit.kernels.reference import ops
from isobit.order import attention_order

LIBRARIES = supported_libraries()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PAGE_SIZE = 64
RUNS = [(1, "pages"), (2, "tiles"), (2, "auto"), (3, "auto"), (3, "tiles"), (5, "pages")]  # threads, schedule


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_tokens: int


SHAPES = [
    Shape(9, 3, 64, 300), Shape(8, 8, 64, 200), Shape(8, 2, 128, 200), Shape(4, 1, 96, 150), Shape(3, 1, 34, 130),
    Shape(2, 1, 256, 70), Shape(32, 1, 2, 66),
]  # fmt: skip


class Sequence:
    """One sequence of queries, keys and values, and its pages: scattered, and NaN where nothing was written."""

    def __init__(self, shape: Shape, kv_dtype: str, seed: int = 0, rest: float = float("nan")) -> None:
        generator = torch.Generator().manual_seed(seed)

        def spread(*size: int, low: int, high: int) -> torch.Tensor:
            exponents = torch.randint(low, high, size, generator=generator)
            return torch.randn(*size, generator=generator) * torch.exp2(exponents.float())

        heads, kv_heads, width, length = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.num_tokens
        self.shape, self.kv_dtype = shape, kv_dtype
        self.q = spread(length, heads * width, low=-6, high=2)
        self.k = spread(length, kv_heads, width, low=-6, high=2)
        self.v = spread(length, kv_heads, width, low=-12, high=4)
        num_pages = -(-length // PAGE_SIZE)
        self.table = (torch.randperm(num_pages + 3, generator=generator)[:num_pages]).to(torch.int32)
        self.pages = torch.full((2, num_pages + 3, kv_heads * width * PAGE_SIZE), rest, dtype=DTYPES[kv_dtype])

    def write(self, start: int, stop: int) -> None:
        """Put keys and values of positions start .. stop - 1 into the pages."""
        shape, dtype = self.shape, DTYPES[self.kv_dtype]
        keys = self.pages[0].view(-1, shape.num_kv_heads, shape.head_dim, PAGE_SIZE)
        values = self.pages[1].view(-1, shape.num_kv_heads, PAGE_SIZE, shape.head_dim)
        while start < stop:
            page, first = int(self.table[start // PAGE_SIZE]), start % PAGE_SIZE
            count = min(PAGE_SIZE - first, stop - start)
            keys[page, :, :, first : first + count] = self.k[start : start + count].permute(1, 2, 0).to(dtype)
            values[page, :, first : first + count] = self.v[start : start + count].transpose(0, 1).to(dtype)
            start += count

    def attend(self, library: CpuLibrary, pieces: list[tuple[int, int]], schedule: str = "auto") -> torch.Tensor:
        """Each piece [start, stop) is a request of its own in one batch; rows come back in the order of the pieces."""
        shape = self.shape
        q = torch.cat([self.q[start:stop] for start, stop in pieces])
        query_starts = list(itertools.accumulate((stop - start for start, stop in pieces), initial=0))
        unused = _int32([])
        inputs = AttentionInputs(
            unused, unused, _int32(query_starts), _int32([start for start, _ in pieces]),
            self.table.repeat(len(pieces), 1),
        )  # fmt: skip
        heads = AttentionShape(shape.num_heads, shape.num_kv_heads, shape.head_dim)
        return library.attention(q, self.pages, inputs, heads, shape.head_dim**-0.5, schedule)

    def whole(self, library_name: str = LIBRARIES[0]) -> torch.Tensor:
        """All rows at once, one thread."""
        self.write(0, self.shape.num_tokens)
        return self.attend(CpuLibrary(library_name, 1), [(0, self.shape.num_tokens)], "tiles")


def _int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def assert_same_bytes(actual: torch.Tensor, expected: torch.Tensor, message: object = "") -> None:
    different = (actual.view(torch.int32) != expected.view(torch.int32)).nonzero()
    assert different.numel() == 0, f"{message}: first differing coordinate {different[0].tolist()}"


def cut(length: int, seed: int) -> list[tuple[int, int]]:
    """Rows 0 .. length - 1 in pieces of many lengths, shuffled, with an empty piece among them."""
    generator = np.random.default_rng(seed)
    pieces, start = [(0, 0)], 0
    while start < length:
        size = int(generator.choice([1, 1, 1, 2, 3, 5, 8, 17, 33, 65]))
        pieces.append((start, min(start + size, length)))
        start += size
    return [pieces[i] for i in generator.permutation(len(pieces))]


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_chunking_gives_the_rows_of_the_whole(shape: Shape, kv_dtype: str) -> None:
    expected = Sequence(shape, kv_dtype).whole()
    assert expected.isfinite().all()
    for number, chunk in enumerate([1, 2, 3, 5, 7, 16, 33, 64, 100, 129]):
        sequence = Sequence(shape, kv_dtype)
        library = CpuLibrary(LIBRARIES[0], (1, 2, 3, 5)[number % 4])
        for start in range(0, shape.num_tokens, chunk):
            stop = min(start + chunk, shape.num_tokens)
            sequence.write(start, stop)
            last_page = sequence.pages[:, sequence.table[(stop - 1) // PAGE_SIZE]]
            assert start > 0 or last_page.isnan().any() == (stop % PAGE_SIZE > 0), "the tail of a page holds NaN"
            rows = sequence.attend(library, [(start, stop)], ("tiles", "pages")[start // chunk % 2])
            assert_same_bytes(rows, expected[start:stop], (chunk, start))


@pytest.mark.parametrize("library_name", LIBRARIES)
@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mixed_batches_threads_schedules_and_libraries(shape: Shape, kv_dtype: str, library_name: str) -> None:
    sequence = Sequence(shape, kv_dtype)
    expected = sequence.whole()
    decode = [(position, position + 1) for position in range(shape.num_tokens)]
    for threads, schedule in RUNS[::2] if library_name == "scalar" else RUNS:  # half of them: it is slow
        library = CpuLibrary(library_name, threads)
        for pieces in (cut(shape.num_tokens, threads), decode[-40:]):
            rows = [row for start, stop in pieces for row in range(start, stop)]
            assert_same_bytes(sequence.attend(library, pieces, schedule), expected[rows], (threads, schedule))
        last = decode[-1:]
        assert_same_bytes(sequence.attend(library, last, schedule), expected[-1:], (threads, schedule, "alone"))


def test_page_layout_does_not_matter() -> None:
    shape = SHAPES[0]
    first, second = Sequence(shape, "float32"), Sequence(shape, "float32")
    second.table = second.table.flip(0)
    assert first.table.tolist() != second.table.tolist() and first.table.tolist() != sorted(first.table.tolist())
    assert_same_bytes(first.whole(), second.whole())


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_long_decode_splits_over_threads(kv_dtype: str) -> None:
    sequence = Sequence(Shape(3, 1, 64, 1500), kv_dtype, seed=5)
    expected = sequence.whole()
    pieces = [(1499, 1500), (1490, 1500), (700, 701)]
    rows = [row for start, stop in pieces for row in range(start, stop)]
    for name, threads, schedule in itertools.product(LIBRARIES, (1, 2, 3, 5), ATTENTION_SCHEDULES):
        got = sequence.attend(CpuLibrary(name, threads), pieces, schedule)
        assert_same_bytes(got, expected[rows], (name, threads, schedule))


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("shape", [SHAPES[3], SHAPES[4], SHAPES[6]], ids=str)
def test_equals_the_reference(shape: Shape, kv_dtype: str) -> None:
    sequence = Sequence(shape, kv_dtype, seed=1)
    start = shape.num_tokens - 9
    order = attention_order(shape.head_dim, kv_dtype, "cpu")
    expected = ops.attention(
        order, sequence.q[start:].numpy(), sequence.k.numpy(), sequence.v.numpy(), start, shape.num_heads,
        shape.head_dim**-0.5,
    )  # fmt: skip
    assert_same_bytes(sequence.whole()[start:], torch.from_numpy(expected))


@pytest.mark.parametrize("rest", [float("nan"), float("inf"), float("-inf"), 3e38])
def test_unused_parts_of_pages_have_no_effect(rest: float) -> None:
    shape = SHAPES[0]
    expected = Sequence(shape, "bfloat16", rest=0.0).whole()
    assert_same_bytes(Sequence(shape, "bfloat16", rest=rest).whole(), expected)


@pytest.mark.parametrize("library_name", LIBRARIES)
@pytest.mark.parametrize("schedule", ["tiles", "pages"])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poison_at_a_position_reaches_the_rows_from_there_on(
    poison: float, where: str, schedule: str, library_name: str
) -> None:
    shape, position = SHAPES[0], 70
    clean = Sequence(shape, "float32").whole()
    sequence = Sequence(shape, "float32")
    getattr(sequence, where)[position] = poison
    sequence.write(0, shape.num_tokens)
    rows = sequence.attend(CpuLibrary(library_name, 2), [(0, shape.num_tokens)], schedule)
    assert_same_bytes(rows[:position], clean[:position])
    if where == "v" and poison == float("inf"):
        # 0 * inf is NaN, so a row is infinite or NaN, and the same in every library
        assert not rows[position:].isfinite().any()
        same = sequence.attend(CpuLibrary("scalar", 1), [(0, shape.num_tokens)], "tiles")
        assert torch.equal(rows.nan_to_num(7.0), same.nan_to_num(7.0))
    elif where == "v":
        assert rows[position:].isnan().all()
    else:  # q has both signs in every row, so an infinite key gives inf - inf
        assert rows[position:].isnan().all()


def test_close_to_float64() -> None:
    """Each FMA, exp and sum is within a few 2^-24 of exact; the bound adds these up for each output.

    A score is off by at most D * 2^-24 * sum |q k| (and one rounding of q * scale, one of the subtraction), which
    scales its weight by as much; exp32 and the sums of at most 64 + pages terms add theirs; v is exact in float32.
    """
    for shape in SHAPES:
        sequence = Sequence(shape, "float32", seed=2)
        actual = sequence.whole().double().view(shape.num_tokens, shape.num_heads, shape.head_dim)
        group = shape.num_heads // shape.num_kv_heads
        q = sequence.q.double().view_as(actual).transpose(0, 1) * shape.head_dim**-0.5
        k, v = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (sequence.k, sequence.v))
        visible = torch.ones(shape.num_tokens, shape.num_tokens, dtype=torch.bool).tril()
        scores = (q @ k.transpose(1, 2)).masked_fill(~visible, float("-inf"))
        weights = scores.softmax(-1)
        magnitude = (q.abs() @ k.abs().transpose(1, 2)).masked_fill(~visible, 0.0).amax(-1, keepdim=True)
        unit = 2.0**-24
        relative = 2 * (shape.head_dim + 4) * unit * magnitude + (64 + shape.num_tokens / 64 + 16) * unit
        bound = 2 * relative * (weights @ v.abs())
        error = (actual.transpose(0, 1) - weights @ v).abs()
        assert (error <= bound).all(), (shape, (error / bound).max())
        assert (error > bound / 1000).any(), "the bound says nothing"


def test_control_torch_attention_moves_bits_between_decode_and_prefill() -> None:
    shape = SHAPES[1]
    sequence = Sequence(shape, "float32")
    q, k, v = (
        x.view(shape.num_tokens, shape.num_heads, shape.head_dim).transpose(0, 1)[None].contiguous()
        for x in (sequence.q, sequence.k, sequence.v)
    )
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    decode = [
        torch.nn.functional.scaled_dot_product_attention(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1])
        for t in range(shape.num_tokens)
    ]
    different = (torch.cat(decode, 2).view(torch.int32) != whole.view(torch.int32)).any(-1)
    assert different.sum() > shape.num_tokens // 2, "the control must differ: else the inputs prove nothing"
    ours = sequence.whole().view(shape.num_tokens, shape.num_heads, -1).transpose(0, 1)
    assert torch.allclose(ours, whole[0], rtol=1e-3, atol=1e-4)
