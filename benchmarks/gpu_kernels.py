"""GPU kernels against the fastest unconstrained ones, the peers' fixed tile, and the floor: one run, one table.

    python -m benchmarks.gpu_kernels                      # on an NVIDIA GPU: benchmarks/results/gpu_kernels.json
    python -m benchmarks.gpu_kernels --plots              # anywhere: docs/plots/*.svg and *.png from that file

Each part (`benchmarks/gpu/`) times ours and theirs alternating, replayed from CUDA graphs, weights and keys rotated
past the L2 cache, random data, and compares ours with the Order's reference by bytes while it is there. The floor of a
row is the larger of bytes over the measured copy bandwidth and operations over the measured bf16 rate.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results" / "gpu_kernels.json"
PARTS = ("gemm", "attention", "mla", "moe", "pointwise")

Row = dict[str, Any]


def measure_ceilings() -> tuple[float, float]:
    """(bytes a second of a large device-to-device copy, read plus written; bf16 operations a second on random data)."""
    from triton.testing import do_bench

    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.numel() / (do_bench(lambda: target.copy_(source), return_mode="median") * 1e-3)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return copied, 2 * 8192**3 / (do_bench(lambda: torch.mm(a, b), return_mode="median") * 1e-3)


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures that the issue tracker asks for, from the rows."""
    gemm = [row["ours_us"] / row["unconstrained_us"] for row in rows if row["op"] == "gemm"]
    prefill = [row for row in rows if (row["op"], row["shape"], row["m"]) == ("attention_prefill", "32/8x128", 8192)]
    decode = [
        row["bandwidth_share"]
        for row in rows
        if (row["op"], row["shape"]) == ("attention_decode", "32/8x128 kv=8192") and 16 <= row["m"] <= 128
    ]
    mla = [row for row in rows if row["op"] == "mla_prefill" and row.get("headline")]
    small = [row["ours_us"] / row["floor_us"] for row in rows if row["op"] == "moe" and row["m"] <= 512]
    large = [row["ours_us"] / row["floor_us"] for row in rows if row["op"] == "moe" and row["m"] == 4096]
    return {
        "gemm_geomean_vs_unconstrained": _rounded(_geometric_mean(gemm)),
        "gemm_worst_vs_unconstrained": _rounded(max(gemm, default=None)),
        "attention_prefill_tflops": _rounded(min((row["tflops"] for row in prefill), default=None), 1),
        "attention_decode_bandwidth_share": _rounded(min(decode, default=None)),
        "mla_prefill_tflops": _rounded(min((row["tflops"] for row in mla), default=None), 1),
        "moe_worst_vs_floor_small": _rounded(max(small, default=None)),
        "moe_4096_vs_floor": _rounded(max(large, default=None)),
        "bit_mismatches": sum(not row["bits_equal"] for row in rows if "bits_equal" in row),
        "bit_comparisons": sum("bits_equal" in row for row in rows),
    }


def _geometric_mean(values: Sequence[float]) -> float | None:
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else None


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


def measure(parts: Sequence[str], scale: str) -> Row:
    """Run the parts; returns what goes into the file."""
    copy_bytes, flops = measure_ceilings()
    rows: list[Row] = []
    for part in parts:
        module = importlib.import_module(f"benchmarks.gpu.{part}")
        rows += module.run(scale, copy_bytes_per_s=copy_bytes, flops=flops)
    return {
        "summary": summarise(rows),
        "device": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "triton")}
        | {"cuda": str(torch.version.cuda)},
        "copy_tb_per_s": round(copy_bytes / 1e12, 3),
        "bf16_tflops": round(flops / 1e12, 1),
        "rows": rows,
    }


def format_rows(rows: Sequence[Row]) -> str:
    """One line a row: time, and its ratio to the unconstrained best, the peers' tile and the floor."""
    lines = [f"{'op':<20}{'shape':<28}{'m':>7}{'ours us':>10}{'/best':>8}{'/peer':>8}{'/floor':>8}  bits"]
    for row in rows:
        ratios = "".join(
            f"{row['ours_us'] / row[name]:8.2f}" if row.get(name) else f"{'-':>8}"
            for name in ("unconstrained_us", "peer_us", "floor_us")
        )
        bits = {True: "equal", False: "DIFFER", None: "-"}[row.get("bits_equal")]
        lines.append(
            f"{row['op']:<20}{row.get('shape', '')!s:<28}{row.get('m', ''):>7}{row['ours_us']:10.1f}{ratios}  {bits}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--scale", default="full", choices=("full", "quick"))
    parser.add_argument("--plots", action="store_true", help="draw the plots of a file measured before, and end")
    args = parser.parse_args()
    if args.plots:
        from benchmarks.gpu.plots import draw

        draw(json.loads(args.output.read_text(encoding="utf-8")))
        return
    found = measure(args.parts, args.scale)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(format_rows(found["rows"]))
    print(json.dumps({name: value for name, value in found.items() if name != "rows"}, indent=1))


if __name__ == "__main__":
    main()
