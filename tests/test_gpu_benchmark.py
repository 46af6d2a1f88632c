"""The summary of the GPU benchmark, from rows as its parts give them: a figure is read from the rows it speaks of."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu_kernels import format_rows, summarise


def row(op: str, shape: str, m: int, ours: float, **more: Any) -> dict[str, Any]:
    return {"op": op, "shape": shape, "m": m, "ours_us": ours, "bits_equal": True, **more}


ROWS = [
    row("gemm", "2048x768", 1, 2.0, unconstrained_us=4.0),
    row("gemm", "2048x768", 2, 8.0, unconstrained_us=4.0, peer_us=16.0),
    row("attention_prefill", "32/8x128", 2048, 1.0, tflops=1.0),
    row("attention_prefill", "32/8x128", 8192, 1.0, tflops=460.0),
    row("attention_decode", "32/8x128 kv=8192", 1, 15.0, bandwidth_share=0.5),
    row("attention_decode", "32/8x128 kv=8192", 16, 1.0, bandwidth_share=0.9),
    row("attention_decode", "32/8x128 kv=8192", 128, 1.0, bandwidth_share=0.85),
    row("mla_prefill", "1 x 4096 tokens", 4096, 1.0, tflops=430.0, headline=True),
    row("moe", "64x2048x3072 top 4", 1, 14.0, floor_us=10.0),
    row("moe", "64x2048x3072 top 4", 512, 11.0, floor_us=10.0),
    row("moe", "64x2048x3072 top 4", 4096, 15.0, floor_us=10.0, bits_equal=False),
]


def test_summary_reads_the_rows_it_speaks_of() -> None:
    assert summarise(ROWS) == {
        "gemm_geomean_vs_unconstrained": 1.0,
        "gemm_worst_vs_unconstrained": 2.0,
        "attention_prefill_tflops": 460.0,
        "attention_decode_bandwidth_share": 0.85,
        "mla_prefill_tflops": 430.0,
        "moe_worst_vs_floor_small": 1.4,
        "moe_4096_vs_floor": 1.5,
        "bit_mismatches": 1,
        "bit_comparisons": 11,
    }


def test_nothing_measured_is_nothing_said() -> None:
    empty = summarise([])
    assert empty.pop("bit_mismatches") == empty.pop("bit_comparisons") == 0
    assert set(empty.values()) == {None}


def test_table_says_which_rows_differ() -> None:
    lines = format_rows(ROWS).splitlines()
    assert len(lines) == 1 + len(ROWS) and lines[-1].endswith("DIFFER") and lines[1].endswith("equal")
    assert lines[2].split()[4:6] == ["2.00", "0.50"]


def test_plots_are_drawn(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install -e '.[bench]'")
    from benchmarks.gpu import plots

    monkeypatch.setattr(plots, "FOLDER", tmp_path)
    versions = {"torch": "2", "triton": "3"}
    plots.draw({"rows": ROWS, "device": "an NVIDIA H200", "versions": versions, "date": "2026-12-01"})
    assert {path.name for path in tmp_path.iterdir()} >= {"gemm.svg", "gemm.png", "attention.svg", "moe.svg"}
