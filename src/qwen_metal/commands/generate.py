"""``qwen-metal generate``: text on stdout, figures on stderr."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

import mlx.core as mx
from mlx_lm.generate import stream_generate
from mlx_lm.sample_utils import make_sampler

from .. import routes
from .common import (
    UserError,
    add_json_option,
    add_model_options,
    add_sampling_options,
    is_demo,
    load,
)
from .output import gigabytes, routes_line, routes_lines, say, write_json

#: What the demo model is asked to continue where no prompt is given.
DEMO_PROMPT = "The following example shows"

#: The demo model repeats itself when it always takes the likeliest token.
DEMO_TEMPERATURE = 0.8


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "generate",
        help="continue or answer one prompt",
        description="Stream the answer to one prompt to stdout; figures and routes go to stderr.",
    )
    parser.add_argument("--prompt", "-p", help="the text, or - to read stdin")
    parser.add_argument("--system-prompt", help="for the chat template")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--raw",
        "--ignore-chat-template",
        action="store_true",
        help="continue the prompt as it is (default for the demo)",
    )
    form.add_argument(
        "--chat",
        action="store_true",
        help="put the prompt into the model's chat template (default for every other model)",
    )
    add_sampling_options(parser, max_tokens=100)
    add_model_options(parser)
    add_json_option(parser)
    parser.add_argument("--verbose", "-v", action="store_true", help="each operation's route, and why")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate once."""
    text = prompt_text(args)
    # A token is some four characters; the check only has to find what cannot fit.
    model, tokenizer = load(args, tokens=len(text) // 4 + args.max_tokens)
    raw = is_raw(args, tokenizer)
    tokens = encode(tokenizer, text, raw, args.system_prompt)
    mx.random.seed(args.seed)
    routes(reset=True)
    if raw and sys.stderr.isatty():
        print(f"\033[2m{text}\033[0m", end="", file=sys.stderr, flush=True)
    sampler = make_sampler(temperature_of(args), args.top_p)
    answer, last = stream(model, tokenizer, tokens, args.max_tokens, sampler=sampler)
    counts = routes()
    report(last, counts, args.verbose)
    if args.json:
        write_json(args.json, result(args, text, answer, last, counts))
    return 0


def prompt_text(args: argparse.Namespace) -> str:
    """The prompt, from the option, stdin or the demo's default."""
    text = args.prompt
    if text is None:
        if not is_demo(args.model):
            raise UserError("no prompt; pass --prompt TEXT, or --prompt - to read stdin")
        text = DEMO_PROMPT
    elif text == "-":
        try:
            text = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError as error:
            raise UserError(f"the prompt on stdin is not UTF-8 ({error})") from None
    if not text:
        raise UserError("the prompt is empty; pass --prompt TEXT, or text on stdin for --prompt -")
    return text


def is_raw(args: argparse.Namespace, tokenizer: Any) -> bool:
    """Whether the prompt is continued as it is; the demo model was trained on plain text."""
    if args.chat and not tokenizer.has_chat_template:
        raise UserError(f"{args.model} has no chat template; pass --raw")
    if args.system_prompt is not None:
        if args.raw:
            raise UserError("--system-prompt needs the chat template; drop it, or --raw")
        return False
    return args.raw or not tokenizer.has_chat_template or (is_demo(args.model) and not args.chat)


def encode(tokenizer: Any, text: str, raw: bool, system: str | None = None) -> list[int]:
    """The prompt's tokens, as mlx_lm.generate makes them."""
    if not raw:
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": text})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens = tokenizer.encode(text, add_special_tokens=raw)
    if not tokens:
        raise UserError("the prompt holds no token; pass --prompt TEXT")
    return tokens


def temperature_of(args: argparse.Namespace) -> float:
    """The temperature asked for, or the model's default."""
    if args.temp is not None:
        return args.temp
    return DEMO_TEMPERATURE if is_demo(args.model) else 0.0


def stream(model: Any, tokenizer: Any, tokens: list[int], max_tokens: int, **options: Any) -> tuple:
    """Write an answer to stdout as it comes; gives the text and the last response."""
    out, pieces, response = sys.stdout, [], None
    # mlx-lm warns of a tight wired limit on stdout, which is for the answer alone.
    with contextlib.redirect_stdout(sys.stderr):
        for response in stream_generate(model, tokenizer, tokens, max_tokens, **options):
            pieces.append(response.text)
            out.write(response.text)
            out.flush()
    text = "".join(pieces)
    if not text.endswith("\n"):
        out.write("\n")
        out.flush()
    return text, response


def report(last: Any, counts: dict, verbose: bool) -> None:
    """Figures and routes, on stderr."""
    say(
        f"prompt {last.prompt_tokens} tokens, {last.prompt_tps:.1f} tok/s; "
        f"generation {last.generation_tokens} tokens, {last.generation_tps:.1f} tok/s; "
        f"peak memory {gigabytes(last.peak_memory * 1e9)}"
    )
    say(routes_line(counts))
    if verbose:
        for line in routes_lines(counts):
            say(f"  {line}")


def result(args: argparse.Namespace, prompt: str, text: str, last: Any, counts: dict) -> dict:
    """What ``--json`` holds."""
    return {
        "model": args.model,
        "policy": args.policy.changed(),
        "prompt": prompt,
        "text": text,
        "finish_reason": last.finish_reason,
        "prompt_tokens": last.prompt_tokens,
        "prompt_tps": last.prompt_tps,
        "generation_tokens": last.generation_tokens,
        "generation_tps": last.generation_tps,
        "peak_memory_bytes": round(last.peak_memory * 1e9),
        "routes": counts,
    }
