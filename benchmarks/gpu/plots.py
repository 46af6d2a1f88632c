"""Plots of `benchmarks/results/gpu_kernels.json`, as SVG and PNG in `docs/plots`. Needs matplotlib (extra `bench`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "plots"
OURS, PEER, BEST = "#1b7837", "#b2182b", "#4d4d4d"

Row = dict[str, Any]


def draw(found: dict[str, Any]) -> None:
    """Draw every plot for which there are rows."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "isobit", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    FOLDER.mkdir(parents=True, exist_ok=True)
    versions = found["versions"]
    title = f"{found['device']}, torch {versions['torch']}, Triton {versions['triton']}, {found['date']}"
    plots: dict[str, Callable[[Any, Sequence[Row]], None]] = {"gemm": _gemm, "attention": _attention, "moe": _moe}
    for name, plot in plots.items():
        rows = [row for row in found["rows"] if row["op"].startswith(name)]
        if not rows:
            continue
        figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
        plot(axes, rows)
        axes.grid(True, axis="y", alpha=0.3)
        figure.suptitle(title, fontsize=8)
        for suffix in ("svg", "png"):
            figure.savefig(FOLDER / f"{name}.{suffix}", dpi=150, metadata={"Date": None} if suffix == "svg" else None)
        pyplot.close(figure)


def _gemm(axes: Any, rows: Sequence[Row]) -> None:
    """Time over the fastest unconstrained kernel, by rows: one thin line a shape for ours, one for the fixed tile."""
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    for at, shape in enumerate(shapes):
        own = [row for row in rows if row["shape"] == shape]
        rows_of = [row["m"] for row in own]
        for color, key, label in ((OURS, "ours_us", "isobit"), (PEER, "peer_us", "one 128x128x64 tile for every M")):
            pairs = zip(rows_of, own, strict=True)
            points = [(m, row[key] / row["unconstrained_us"]) for m, row in pairs if row.get(key)]
            name = label if at == 0 else None
            axes.plot(*zip(*points, strict=True), color=color, alpha=0.6, lw=1, marker=".", label=name)
    axes.axhline(1, color=BEST, lw=1, ls="--", label="cuBLAS, unconstrained")
    axes.set(xscale="log", yscale="log", xlabel="rows M", ylabel="time / fastest unconstrained")
    axes.set_xticks([1, 4, 16, 64, 256, 1024, 4096], ["1", "4", "16", "64", "256", "1024", "4096"])
    axes.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    axes.set_title(f"bf16 linear, {len(shapes)} shapes")
    axes.legend()


def _attention(axes: Any, rows: Sequence[Row]) -> None:
    _bars(axes, [row for row in rows if row.get("unconstrained_us") or row.get("floor_us")], "Paged attention")


def _moe(axes: Any, rows: Sequence[Row]) -> None:
    _bars(axes, rows, "Mixture of experts, grouped linear")


def _bars(axes: Any, rows: Sequence[Row], title: str) -> None:
    """Time over the floor: ours beside the fastest unconstrained kernel."""
    labels = [f"{row['op'].split('_')[-1]} {row.get('shape', '')}\n{row.get('m', '')}" for row in rows]
    kinds = ((OURS, "ours_us", "isobit"), (BEST, "unconstrained_us", "unconstrained"))
    for at, (color, key, label) in enumerate(kinds):
        heights = [row[key] / row["floor_us"] if row.get(key) else 0.0 for row in rows]
        axes.bar([i + 0.4 * at - 0.2 for i in range(len(rows))], heights, 0.38, color=color, label=label)
    axes.axhline(1, color=BEST, lw=1, ls="--")
    axes.set_xticks(range(len(rows)), labels, rotation=60, ha="right", fontsize=6)
    axes.set(ylabel="time / floor")
    axes.set_title(title)
    axes.legend()
