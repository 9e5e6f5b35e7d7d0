"""``qwen-metal accuracy``: errors against float64; the measuring is in ``evidence/``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..evidence import accuracy, grid
from ..evidence.common import BACKENDS, check_room, choose_backend, keep, markdown, read_result, show, writing
from .bench import plot_file
from .common import UserError, add_json_option, output_file
from .output import say


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "accuracy",
        help="errors of quantised products against float64",
        description="Measure the published grid of 160 cases, each twice, for this package and for the "
        "installed MLX: the error against float64 of the dequantised weights, over that of merely "
        "rounding the result. The table goes to stdout, as Markdown where that is no terminal.",
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    parser.add_argument("--backend", choices=BACKENDS, help="default: where MLX runs here")
    parser.add_argument("--engine", choices=grid.ENGINES, help="measure only this one")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--third", action="store_true", help="a fixed third of the grid")
    part.add_argument(
        "--wide",
        action="store_true",
        help="instead: more formats, row counts, attention, the recurrence, compiled calls",
    )
    part.add_argument("--upstream", action="store_true", help="instead: the reproduction of MLX issue 4631")
    parser.add_argument("--compare", type=Path, metavar="OLD.json", help="an earlier result, to the last digit")
    add_json_option(parser)
    parser.add_argument("--markdown", type=output_file, metavar="FILE.md", help="write the tables here too")
    parser.add_argument("--plot", type=plot_file, metavar="FILE.png", help="draw the grid as a heat map")


def run(args: argparse.Namespace) -> int:
    """Measure, print, compare, and write what was asked for.

    Returns:
        0; 1 where a fast route misses its bound or a comparison finds a change; 130 after Ctrl-C.
    """
    part = "wide" if args.wide else "upstream" if args.upstream else "grid"
    if args.plot and part != "grid":
        raise UserError(f"--plot draws the published grid; it does not go with --{part}")
    old = read_result("accuracy", args.compare) if args.compare else None
    check_room(args.json, args.markdown, args.plot)
    backend = choose_backend(args.backend)
    if backend == "host":
        accuracy.host_operations()
    engines = [args.engine] if args.engine else list(grid.ENGINES)
    value = accuracy.measure(backend, engines, part, args.third)
    keep("accuracy", value, args.json)
    _print(value, args)
    status = _judge(value)
    if old is not None:
        answer = accuracy.compare(value, old)
        print("\n".join(accuracy.comparison_lines(answer)))
        status = status or int(bool(answer["changed"]))
    return status if value["complete"] else 130


def _print(value: dict[str, Any], args: argparse.Namespace) -> None:
    tables = accuracy.tables(value)
    for title, heads, rows in tables:
        show(heads, rows, title)
    if args.markdown:
        text = "\n\n".join(f"**{title}**\n\n{markdown(heads, rows)}" for title, heads, rows in tables)
        with writing(args.markdown):
            args.markdown.write_text(text + "\n", encoding="utf-8")
    if args.plot and value["cases"]:
        with writing(args.plot):
            accuracy.draw(value, args.plot)


def _judge(value: dict[str, Any]) -> int:
    """Say what misses its bound: 1 if anything does, else 0."""
    failed = accuracy.failures(value)
    for row in failed:
        say("over its bound: " + " ".join(str(row[k]) for k in (*accuracy.KEYS, "ratio", "bad_rows", "repeat_equal")))
    ours = [row for row in value["cases"] if row["engine"] == "qwen_metal"]
    slow = [row for row in ours if "stock" in row["route"]]
    if slow:
        say(f"{len(slow)} of {len(ours)} cases of ours were served by stock code and are not judged")
    return int(bool(failed))
