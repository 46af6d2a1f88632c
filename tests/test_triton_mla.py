"""Absorbed MLA in Triton's interpreter against float64, and the plan of a batch against what it must cover."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from isobit.order import MmaAttentionOrder
from tests.interpreter import DEVICE  # before the kernels

from isobit.kernels.triton.mla import (  # isort: skip
    MlaSchedule,
    MlaWorkspace,
    mla_attention,
    mla_plan,
    mla_schedules,
    pad_plan,
    reference_mla,
    upload_plan,
)

SCALE = 0.1
HEADS = 3


def order_of(latent: int = 64, rope: int = 32, split: int = 128, dtype: str = "float16") -> MmaAttentionOrder:
    return MmaAttentionOrder(latent + rope, latent, dtype, 64, split, "mma")


class Batch:
    """Requests of given lengths in scattered pages, NaN in all that they do not own."""

    def __init__(self, order: MmaAttentionOrder, lengths: Sequence[int], heads: int = HEADS, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        dtype = getattr(torch, order.kv_dtype)
        self.order, self.lengths = order, lengths
        pages = [-(-length // 64) for length in lengths]
        numbers = iter(rng.permutation(sum(pages) + 2))
        layer = np.full((sum(pages) + 2, 64, order.head_dim), np.nan)
        self.tables = np.zeros((len(lengths), max(pages)), np.int32)
        self.keys, self.q = [], []
        for request, length in enumerate(lengths):
            keys = torch.from_numpy(rng.standard_normal((length, order.head_dim))).to(dtype)
            self.keys.append(keys.double().numpy())
            self.q.append(torch.from_numpy(rng.standard_normal((length, heads, order.head_dim)) * 2).to(dtype))
            for page in range(pages[request]):
                self.tables[request, page] = number = next(numbers)
                own = self.keys[-1][64 * page : 64 * page + 64]
                layer[number, : len(own)] = own
        self.layer = torch.from_numpy(layer).to(dtype).to(DEVICE)

    def arrays(self, pieces: Sequence[tuple[int, int, int]]) -> tuple[torch.Tensor, tuple[np.ndarray, ...]]:
        """(q, (query_starts, start_positions, page_tables)) of rows start .. stop of requests."""
        starts = np.cumsum([0] + [stop - start for _, start, stop in pieces]).astype(np.int32)
        first = np.array([start for _, start, _ in pieces], np.int32)
        q = torch.cat([self.q[i][start:stop] for i, start, stop in pieces]).to(DEVICE)
        return q, (starts, first, np.ascontiguousarray(self.tables[[i for i, _, _ in pieces]]))

    def truth(self, request: int, start: int, stop: int) -> np.ndarray:
        keys, q = self.keys[request], self.q[request][start:stop].double().numpy()
        out = np.empty((*q.shape[:2], self.order.value_dim))
        for row in range(stop - start):
            seen = keys[: start + row + 1]
            s = np.einsum("hd,kd->hk", q[row], seen) * SCALE
            p = np.exp(s - s.max(1, keepdims=True))
            out[row] = np.einsum("hk,kd->hd", p / p.sum(1, keepdims=True), seen[:, : self.order.value_dim])
        return out


def run(batch: Batch, pieces: Sequence[tuple[int, int, int]], schedule: MlaSchedule, walk: bool | None) -> torch.Tensor:
    q, arrays = batch.arrays(pieces)
    plan = mla_plan(arrays[0], arrays[1], q.shape[1], batch.order, schedule.rows, 8, walk)
    workspace = MlaWorkspace(q.device, batch.order.value_dim)
    workspace.reserve(plan.partial_rows, 8)
    tables = upload_plan(plan, *arrays, q.device)
    return mla_attention(q, batch.layer, tables, batch.order, SCALE, schedule, workspace)


def assert_close(got: torch.Tensor, truth: np.ndarray) -> None:
    got64 = got.double().cpu().numpy()
    assert np.isfinite(got64).all()
    assert np.linalg.norm(got64 - truth) / np.linalg.norm(truth) < 2e-3


def test_reference_is_attention_and_never_reads_what_a_request_does_not_own() -> None:
    batch = Batch(order_of(), (5, 64, 130))
    pieces = [(0, 0, 5), (2, 126, 130), (1, 60, 64)]
    q, arrays = batch.arrays(pieces)
    got = reference_mla(q, batch.layer, *arrays, batch.order, SCALE)
    assert_close(got, np.concatenate([batch.truth(*piece) for piece in pieces]))


@pytest.mark.parametrize("walk", [True, False])
def test_schedules_over_split_ends(walk: bool) -> None:
    batch = Batch(order_of(latent=128, rope=64, split=64), (70, 131))
    pieces = [(1, 127, 131), (0, 66, 70)]
    truth = np.concatenate([batch.truth(*piece) for piece in pieces])
    for schedule in mla_schedules(batch.order):
        if schedule.kernel == "triton":
            assert_close(run(batch, pieces, schedule, walk), truth)


def test_latent_width_that_is_no_power_of_two() -> None:
    batch = Batch(order_of(latent=192), (66,))
    assert_close(run(batch, [(0, 60, 66)], mla_schedules(batch.order)[0], None), batch.truth(0, 60, 66))


def test_padded_plans_give_the_same_bits_and_must_fit() -> None:
    batch = Batch(order_of(), (200,))
    schedule = mla_schedules(batch.order)[0]
    q, arrays = batch.arrays([(0, 190, 196)])
    plan = mla_plan(*arrays[:2], HEADS, batch.order, schedule.rows, 4, walk=False)
    padded = pad_plan(plan, len(plan.items) + 3, 9, len(plan.merges) + 2)
    workspace = MlaWorkspace(q.device, batch.order.value_dim)
    workspace.reserve(plan.partial_rows, 9)
    results = [
        mla_attention(q, batch.layer, upload_plan(p, *arrays, q.device), batch.order, SCALE, schedule, workspace)
        for p in (plan, padded)
    ]
    assert torch.equal(*results)
    with pytest.raises(ValueError, match="does not fit"):
        pad_plan(plan, len(plan.items) - 1, 9, len(plan.merges))


def test_refuses_what_it_cannot_compute() -> None:
    with pytest.raises(ValueError, match="row_sum='mma'"):
        mla_schedules(MmaAttentionOrder(576, 512, "bfloat16", 64, 512, "tree"))
    with pytest.raises(ValueError, match="steps of 64"):
        mla_schedules(MmaAttentionOrder(96, 80, "bfloat16", 64, 512, "mma"))
    batch = Batch(order_of(), (5,))
    schedule, other = mla_schedules(batch.order)[:2]
    q, arrays = batch.arrays([(0, 0, 5)])
    tables = upload_plan(mla_plan(*arrays[:2], HEADS, batch.order, other.rows, 1), *arrays, q.device)
    with pytest.raises(ValueError, match="tiles of"):
        mla_attention(q, batch.layer, tables, batch.order, SCALE, schedule, MlaWorkspace(q.device, 64))
    with pytest.raises(ValueError, match=r"scale=0\.0"):
        reference_mla(q, batch.layer, *arrays, batch.order, 0.0)


@pytest.mark.parametrize("walk", [None, True, False])
def test_a_plan_covers_every_row_and_split_once(walk: bool | None) -> None:
    order, rows, heads = order_of(split=128), 16, 5
    counts, first = [1, 40, 7, 1, 300], [900, 0, 121, 127, 50]
    starts = np.cumsum([0, *counts]).astype(np.int32)
    plan = mla_plan(starts, np.array(first, np.int32), heads, order, rows, 6, walk)
    assert plan.programs[0] == 0 and plan.programs[-1] == len(plan.items) and (np.diff(plan.programs) >= 0).all()
    seen: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for request, row, split, end, partial, _ in plan.items.tolist():
        seen.setdefault((request, row), []).append((split, end, partial))
    merged = {row: entry for row, *entry in plan.merges.tolist()}
    used = set()
    for request, count in enumerate(counts):
        for row in range(count * heads):
            parts = sorted(seen[request, row // rows * rows])
            tile_end = min(row // rows * rows + rows, count * heads) - 1
            splits = (first[request] + tile_end // heads) // 128 + 1
            assert [split for split, _, _ in parts] == [0, *(end for _, end, _ in parts[:-1])]
            assert parts[-1][1] == splits
            entry = merged.pop(int(starts[request]) * heads + row, None)
            if len(parts) == 1:
                assert entry is None and parts[0][2] == -1
            else:
                at = [partial + row % rows for _, _, partial in parts]
                assert entry == [at[0], rows, splits] and np.array_equal(np.diff(at), [rows] * (splits - 1))
                assert not used & set(at) and max(at) < plan.partial_rows
                used |= set(at)
    assert not merged and (walk is not True or not used) and (walk is not False or used)
