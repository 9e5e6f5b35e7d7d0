"""``qwen-metal chat``: a conversation whose prompt cache is kept between turns."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from typing import Any, Iterator

import mlx.core as mx
from mlx_lm.generate import stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from .. import routes
from .common import UserError, add_model_options, add_sampling_options, load
from .generate import temperature_of
from .output import gigabytes, routes_line, say

HELP = "/reset starts anew, /history shows the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer"

#: Room for the conversation in the check against memory.
CONTEXT_TOKENS = 8192


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "chat",
        help="talk, turn by turn",
        description=f"Talk to a model, one line a turn. {HELP}.",
    )
    parser.add_argument("--system-prompt", help="for the chat template")
    add_sampling_options(parser, max_tokens=256)
    add_model_options(parser)
    parser.add_argument("--verbose", "-v", action="store_true", help="figures after each answer")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Talk until /quit or the end of input."""
    model, tokenizer = load(args, tokens=CONTEXT_TOKENS)
    if not tokenizer.has_chat_template:
        raise UserError(f"{args.model} has no chat template; use generate --raw")
    mx.random.seed(args.seed)
    routes(reset=True)
    talk = Conversation(model, tokenizer, args)
    say(HELP)
    for line in lines():
        if line in ("/quit", "/exit"):
            break
        elif line == "/reset":
            talk.reset()
            say("a new conversation")
        elif line == "/history":
            for message in talk.messages:
                print(f"{message['role']}: {message['content'].strip()}", flush=True)
        elif line.startswith("/"):
            say(HELP)
        elif line:
            answer(talk, line, args.verbose)
    if args.verbose:
        say(routes_line(routes()))
    return 0


class Conversation:
    """Messages so far, and a prompt cache that holds ``cached``, the text of what it has read."""

    def __init__(self, model: Any, tokenizer: Any, args: argparse.Namespace):
        self.model, self.tokenizer, self.args = model, tokenizer, args
        self.sampler = make_sampler(temperature_of(args), args.top_p)
        self.reset()

    def reset(self) -> None:
        """Forget the conversation."""
        system = self.args.system_prompt
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self._forget_cache()

    def _forget_cache(self) -> None:
        self.cache, self.tokens = make_prompt_cache(self.model), []

    def ask(self, text: str) -> Iterator[Any]:
        """Responses to one more message; closing the iterator early ends the turn cleanly."""
        self.messages.append({"role": "user", "content": text})
        prompt = self._unread()
        written = []
        steps = stream_generate(
            self.model,
            self.tokenizer,
            prompt,
            self.args.max_tokens,
            sampler=self.sampler,
            prompt_cache=self.cache,
        )
        try:
            for response in steps:
                written.append(response.token)
                yield response
        finally:
            steps.close()
            ends = self.tokenizer.eos_token_ids
            # Decoded anew: the streamed text has lost its first space, and would not match the cache.
            text = self.tokenizer.decode([t for t in written if t not in ends])
            self.messages.append({"role": "assistant", "content": text})
            self._remember(prompt + written)

    def _unread(self) -> list[int]:
        """Tokens of the conversation that the cache has not read.

        The text is compared and not the tokens: what a model wrote may be cut
        into tokens in another way when it is read again.
        """
        encode = self.tokenizer.encode
        whole = self.tokenizer.apply_chat_template(
            self.messages, tokenize=False, add_generation_prompt=True
        )
        read = self.tokenizer.decode(self.tokens) if self.tokens else ""
        if read and whole.startswith(read) and whole != read:
            return encode(whole[len(read) :], add_special_tokens=False)
        # A template that rewrites earlier turns (drops their thinking, say): read it all again.
        self._forget_cache()
        return encode(whole, add_special_tokens=False)

    def _remember(self, seen: list[int]) -> None:
        """Note which of ``seen`` the cache has read, by its own count."""
        read = max(getattr(c, "offset", 0) for c in self.cache) - len(self.tokens)
        if 0 <= read <= len(seen):
            self.tokens += seen[:read]
        else:
            self._forget_cache()


def answer(talk: Conversation, text: str, verbose: bool) -> None:
    """Stream one answer; Ctrl-C stops it and keeps what was said."""
    out, last, ended = sys.stdout, None, ""
    steps = talk.ask(text)
    with stoppable() as stopped, contextlib.redirect_stdout(sys.stderr):
        for last in steps:
            out.write(last.text)
            out.flush()
            ended = last.text or ended
            if stopped():
                break
        steps.close()
    if not ended.endswith("\n"):
        out.write("\n")
        out.flush()
    if verbose and last is not None:
        say(
            f"{last.prompt_tokens} tokens read, {last.generation_tokens} written at "
            f"{last.generation_tps:.1f} tok/s; peak memory {gigabytes(last.peak_memory * 1e9)}"
        )


@contextlib.contextmanager
def stoppable() -> Iterator[Any]:
    """Within it the first Ctrl-C only sets what the given function answers; a second one raises.

    An exception in the middle of a step would leave the layers' caches at
    different tokens.
    """
    count = 0

    def note(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: count > 0
    finally:
        signal.signal(signal.SIGINT, before)


def lines() -> Iterator[str]:
    """Lines the user types, or those of a pipe; Ctrl-C twice at the prompt raises."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.strip()
        return
    try:
        import readline  # noqa: F401  (arrow keys, and earlier lines)
    except ImportError:
        pass
    interrupted = False
    while True:
        line = _typed()
        if line is EOF:
            print(file=sys.stderr)
            return
        if line is None:
            if interrupted:
                raise KeyboardInterrupt
            print(file=sys.stderr)
            say("Ctrl-C once more, /quit or Ctrl-D leaves")
        interrupted = line is None
        if line is not None:
            yield line.strip()


#: What ``_typed`` gives at the end of input.
EOF = object()


def _typed() -> Any:
    """One typed line, None for Ctrl-C, or EOF."""
    try:
        return input(">>> ")
    except KeyboardInterrupt:
        return None
    except EOFError:
        return EOF
