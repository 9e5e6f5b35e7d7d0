"""``qwen-metal agree``: ours against stock over a text; the measuring is in ``evidence/agree.py``."""

from __future__ import annotations

import argparse
import json
from importlib import resources
from pathlib import Path
from typing import Any, Optional

from ..evidence import agree
from ..evidence.common import check_room, choose_backend, keep, show, writing
from ..loader import load
from ..policy import Policy
from ..routes import fast_share
from .bench import plot_file
from .common import (
    UserError,
    add_json_option,
    add_model_options,
    announce,
    at_least,
    check_fits,
    checkpoint,
    loading,
    policy as policy_type,
)
from .output import routes_line, say

POSITIONS = 192

#: What ``--against`` may name besides a policy.
STOCK = "stock"


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "agree",
        help="logits of ours and of stock over a text",
        description="Read a text with stock mlx-lm, with this package and with a float32 reference, and "
        "compare: perplexity, likeliest token, KL divergence, greedy continuations. The table goes to stdout.",
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    add_model_options(parser)
    parser.add_argument("--backend", choices=("cpu", "metal", "cuda"), help="default: where MLX runs here")
    parser.add_argument("--file", type=Path, metavar="FILE", help="a UTF-8 text (default: the held-out text)")
    parser.add_argument("--dtype", choices=tuple(agree.DTYPES), default="float32", help="default: %(default)s")
    parser.add_argument(
        "--against", default=STOCK, metavar="WHAT", help="stock (default), or a policy such as numerics=match"
    )
    parser.add_argument("--positions", type=at_least(1), help=f"scored tokens (default: {POSITIONS})")
    parser.add_argument("--continuations", type=at_least(0), default=3, help="greedy ones (default: %(default)s)")
    parser.add_argument("--length", type=at_least(1), default=256, help="of each, in tokens (default: %(default)s)")
    add_json_option(parser)
    parser.add_argument("--plot", type=plot_file, metavar="FILE.png", help="draw a bar chart")


def run(args: argparse.Namespace) -> int:
    """Compare, print, and write what was asked for."""
    backend = choose_backend(args.backend)
    against = _against(args.against)
    text = agree.read_text(args.file) if args.file else held_out()
    plan = agree.Plan(args.dtype, args.positions or POSITIONS, args.continuations, args.length)
    path = checkpoint(args.model)
    check_room(args.json, args.plot)
    check_fits(path, plan.positions + plan.length, args.force)
    announce(path)
    with loading(args.model):
        model, tokenizer = load(str(path))
    config = json.loads((path / "config.json").read_text())
    tokens = tokenizer.encode(text, add_special_tokens=False)
    plan = agree.check_length(tokens, plan, config, asked=args.positions is not None)
    if plan.positions < (args.positions or POSITIONS):
        say(f"the text is short: {plan.positions} positions")
    value = agree.measure(model, tokens, plan, args.policy, against, args.strict)
    value = agree.result(value, _options(args, backend))
    keep("agree", value, args.json)
    _print(value)
    if args.plot:
        with writing(args.plot):
            agree.draw(value, args.plot)
    return 0 if value["complete"] else 130


def held_out() -> str:
    """The text that the demo model was not trained on.

    Raises:
        UserError: an installation without it.
    """
    file = resources.files("qwen_metal").joinpath("demo", "heldout.txt")
    if not file.is_file():
        raise UserError("the held-out text is not in this installation; name a text with --file")
    return file.read_text(encoding="utf-8")


def _against(text: str) -> Optional[Policy]:
    """None for stock, or the policy that ``--against`` names."""
    if text == STOCK:
        return None
    try:
        return policy_type(text)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"argument --against: {error}") from None


def _options(args: argparse.Namespace, backend: str) -> dict[str, Any]:
    return {
        "model": args.model,
        "file": str(args.file) if args.file else None,
        "backend": backend,
        "against": args.against,
        "policy": args.policy.changed(),
    }


def _print(value: dict[str, Any]) -> None:
    other = value["options"]["against"]
    title = f"{value['options']['model']}, {value['dtype']}, {value['positions']} positions, against {other}"
    show(["", other, "qwen_metal", "float32 reference"], agree.lines(value), title)
    print(f"nearer to the float32 reference: {value['nearer_to_ref'] or 'not measured'}")
    print(routes_line(value["routes"]), flush=True)
    if value["routes"] and fast_share(value["routes"]) == 0:
        say("no fused kernel ran: qwen_metal was served by stock code throughout")
