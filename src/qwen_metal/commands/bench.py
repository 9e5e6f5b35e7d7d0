"""``qwen-metal bench``: stock and ours side by side; the measuring is in ``evidence/bench.py``."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any, Optional

from ..evidence import bench
from ..routes import fast_share
from . import memory
from .common import (
    add_json_option,
    add_model_options,
    announce,
    at_least,
    check_fits,
    checkpoint,
    loading,
    output_file,
)
from .output import routes_line, say, write_json

#: Seconds of measuring in a default run: with imports and loading it stays under 50.
BUDGET = 42.0

ROUNDS = 3


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "bench",
        help="prefill and decode speed of stock and ours",
        description="Measure prefill and decode of stock mlx-lm (the checkpoint's dtype and float32) "
        "and of this package, in alternating rounds; the table goes to stdout.",
    )
    add_model_options(parser)
    parser.add_argument("--prompt-tokens", type=at_least(1), help="default: 128")
    parser.add_argument("--decode-tokens", type=at_least(1), help="default: 32")
    parser.add_argument(
        "--rounds",
        type=at_least(1),
        help=f"run all of them (default: {ROUNDS}, fewer of a slow engine to stay under 50 s)",
    )
    parser.add_argument("--full", action="store_true", help="512-token prefill, all rounds")
    add_json_option(parser)
    parser.add_argument("--plot", type=plot_file, metavar="FILE.png", help="draw a bar chart")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for."""
    path, plan = checkpoint(args.model), plan_of(args)
    check_fits(path, plan.prompt_tokens + plan.decode_tokens, args.force, memory.float32_bytes(path))
    announce(path)
    with loading(args.model):
        engines, tokenizer = bench.load_engines(path, args.policy, args.strict)
    prompt = bench.prompt_of(tokenizer, plan.prompt_tokens)
    with Progress() as progress:
        samples, counts = bench.run(engines, prompt, plan, progress)
    value = bench.result(samples, counts, plan, bench.machine(engines, args.model, args.policy))
    show(value, plan)
    if args.json:
        write_json(args.json, value)
    if args.plot:
        bench.draw(value, args.plot)
    return 0


def plan_of(args: argparse.Namespace) -> bench.Plan:
    """Sizes and rounds from the options; only rounds that nobody asked for may be cut."""
    return bench.Plan(
        prompt_tokens=args.prompt_tokens or (512 if args.full else 128),
        decode_tokens=args.decode_tokens or 32,
        rounds=args.rounds or ROUNDS,
        budget=None if args.rounds or args.full else BUDGET,
    )


def plot_file(text: str) -> Path:
    """An argparse type: a PNG file that can be written and drawn."""
    path = output_file(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"{text} does not end in .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("matplotlib is missing; pip install 'qwen-metal[plots]'")
    return path


def show(value: dict[str, Any], plan: bench.Plan) -> None:
    """The table, what was cut, and the route that ran."""
    from rich.console import Console

    # Rich would cut a table short at 80 columns where stdout is a file.
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(bench.table(value))
    for name in bench.ENGINES:
        if (ran := value[name]["rounds"]) < plan.rounds:
            say(
                f"{name}: {ran} of {plan.rounds} rounds, to stay under 50 s; "
                f"--rounds {plan.rounds} runs them all"
            )
    print(routes_line(value["routes"]), flush=True)
    if fast_share(value["routes"]) == 0:
        say("no fused kernel ran: qwen_metal was served by stock code throughout")


class Progress:
    """Progress on stderr: a bar on a terminal, plain lines elsewhere."""

    def __enter__(self) -> "Progress":
        self.start, self.bar = time.perf_counter(), None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self.bar.start()
            self.task = self.bar.add_task("")
        return self

    def __call__(self, what: str, done: int, total: int, left: Optional[float]) -> None:
        text = what + (f", about {left:.0f} s left" if left is not None else "")
        if self.bar is not None:
            self.bar.update(self.task, description=text, completed=done, total=total)
        else:
            say(f"[{time.perf_counter() - self.start:4.0f} s] {text}")

    def __exit__(self, *_: Any) -> None:
        if self.bar is not None:
            self.bar.stop()
