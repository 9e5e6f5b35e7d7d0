"""``qwen-metal limits``: the machine's limits and our share; the measuring is in ``evidence/limits.py``."""

from __future__ import annotations

import argparse
from typing import Any

from ..evidence import limits
from ..evidence.common import check_room, choose_backend, keep, show, writing
from .bench import plot_file
from .common import add_json_option, at_least
from .output import say


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "limits",
        help="read bandwidth and matrix rate here, and our share of them",
        description="Measure this machine's sustained read bandwidth and matrix rate, this package's "
        "operations as a share of them, and the same passes with their arithmetic removed.",
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    parser.add_argument("--backend", choices=("cpu", "metal", "cuda"), help="default: where MLX runs here")
    parser.add_argument(
        "--seconds", type=at_least(0), default=2, help="of measuring each operation (default: %(default)s)"
    )
    add_json_option(parser)
    parser.add_argument("--plot", type=plot_file, metavar="FILE.png", help="draw a bar chart")


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for."""
    backend = choose_backend(args.backend)
    check_room(args.json, args.plot)
    value = limits.measure(backend, args.seconds)
    keep("limits", value, args.json)
    if value["limits"] is not None:
        found = value["limits"]
        show(limits.HEADS_OF_TABLE, limits.lines(value), "operations of ours, 4-bit group 64, bfloat16")
        print(
            f"\nread {found['read'] / 1e9:.1f} GB/s, matrix {found['matrix'] / 1e9:.1f} GFLOP/s on "
            f"{value['machine']['threads']} threads, measured by {found['by']}"
        )
    if any(row["spread"] > limits.UNSTEADY for row in value["operations"]):
        say("rows marked ! varied by over half of their median: something else is running here")
    if any("stock" in row["route"] for row in value["operations"]):
        say("some operations were served by stock code: their shares are stock's, not ours")
    if args.plot and value["operations"]:
        with writing(args.plot):
            limits.draw(value, args.plot)
    return 0 if value["complete"] else 130
