"""The Orders of a model as text: what `python -m isobit.order MODEL` and `isobit orders` print. No torch, no GPU.

Knows how Orders are shown, not how they are chosen (`order.py`).
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping

from isobit import order
from isobit.config import DTYPES, EngineConfig
from isobit.model_config import load_model_config
from isobit.order import NUMERICS_VERSION, Order, model_orders
from isobit.plan import resolve_dtypes

__all__ = ["format_orders", "main"]


def format_orders(orders: Mapping[str, Order]) -> str:
    """The Orders as aligned text, each kind followed once by its sentence of arithmetic."""
    width = max(len(name) for name in orders)
    lines = [f"{name:<{width}}  {value}" for name, value in orders.items()]
    for kind in dict.fromkeys(type(value) for value in orders.values()):
        sentence = f"{kind.__name__}: {' '.join((kind.__doc__ or '').split())}"
        lines.append("\n" + textwrap.fill(sentence, 118, subsequent_indent="  ", break_on_hyphens=False))
    lines.append(f"\nThese are the docstrings of {order.__file__}; kernels/reference/ops.py executes those of a CPU.")
    return "\n".join(lines)


def main() -> None:
    """`python -m isobit.order`."""
    parser = argparse.ArgumentParser(prog="python -m isobit.order", description="Print the Orders of a model.")
    parser.add_argument("model", nargs="?", default="smollm2", help="checkpoint folder, .gguf file, or 'smollm2'")
    parser.add_argument("--device-class", default="cpu", choices=order.DEVICE_CLASSES, help="default: cpu")
    for option in ("--weight-dtype", "--activation-dtype", "--kv-cache-dtype"):
        parser.add_argument(option, default="auto", choices=DTYPES, help="auto: as a server would choose")
    args = parser.parse_args()
    try:
        config = load_model_config(args.model)
        options = EngineConfig(
            device="cpu" if args.device_class == "cpu" else "cuda", dtype=args.weight_dtype,
            activation_dtype=args.activation_dtype, kv_cache_dtype=args.kv_cache_dtype,
        )  # fmt: skip
        dtypes = resolve_dtypes(options, config, args.device_class)[:3]
        orders = model_orders(config, *dtypes, args.device_class)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    print(f"{config.architecture}, numerics version {NUMERICS_VERSION}, device class {args.device_class}\n")
    print(format_orders(orders))
