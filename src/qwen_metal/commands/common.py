"""Options and checks that several commands share."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any, Callable, Optional

import mlx.core as mx
from mlx_lm.utils import _download

from .. import demo, loader
from ..policy import Policy
from . import memory
from .output import check_writable, gigabytes, one_line, say

#: ``--model`` for the embedded model, where no folder has that name.
DEMO = "demo"

#: A load is announced from this size on.
SLOW_BYTES = 1 << 30


class UserError(Exception):
    """Bad input: ends the command with this one line and status 2."""


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options of every command that loads a model."""
    parser.add_argument(
        "--model", default=DEMO, help="folder or Hugging Face repository (default: the embedded demo)"
    )
    parser.add_argument(
        "--policy", type=policy, default=Policy(), help="fields such as numerics=match,prefill_chunk=512"
    )
    parser.add_argument("--strict", action="store_true", help="fail where stock code would serve")
    parser.add_argument("--force", action="store_true", help="load a model that is too large for memory")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """``--json FILE``, checked before any work."""
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the result here too")


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """How tokens are chosen."""
    parser.add_argument("--max-tokens", "-m", type=at_least(1), default=max_tokens, metavar="N")
    parser.add_argument(
        "--temp", type=temperature, help="0: always the likeliest token (default; 0.8 for the demo)"
    )
    parser.add_argument("--top-p", type=probability, default=1.0)
    parser.add_argument("--seed", type=at_least(0), default=0, help="default: %(default)s")


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type: a whole number, ``least`` or more."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not least <= value < 2**63:
            raise argparse.ArgumentTypeError(f"{text} is out of range, {least} or more is needed")
        return value

    return number


def temperature(text: str) -> float:
    """An argparse type: a finite number, 0 or more."""
    return _real(text, math.inf)


def probability(text: str) -> float:
    """An argparse type: a number from 0 to 1."""
    return _real(text, 1.0)


def _real(text: str, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not (math.isfinite(value) and 0 <= value <= most):
        wanted = "0 or more" if most == math.inf else f"0 to {most:g}"
        raise argparse.ArgumentTypeError(f"{text} is out of range, {wanted} is needed")
    return value


def policy(text: str) -> Policy:
    """An argparse type: a policy that this machine's backend acts on."""
    try:
        value = Policy.of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(one_line(error)) from None
    if why := value.inactive(backend()):
        raise argparse.ArgumentTypeError(why)
    return value


def output_file(text: str) -> Path:
    """An argparse type: a file that can be written, so that no long work is lost."""
    path = Path(text).expanduser()
    try:
        if text in ("", "-"):
            raise OSError(f"{text!r} is no file name")
        check_writable(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(one_line(error)) from None
    return path


def backend() -> str:
    """Where MLX runs here: ``cpu``, ``metal`` or ``cuda``."""
    if mx.default_device() == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def is_demo(name: str) -> bool:
    """Whether ``--model`` names the embedded model."""
    return name == DEMO and not Path(DEMO).exists()


def checkpoint(name: str) -> Path:
    """The folder of a whole checkpoint of a known family, fetched if need be.

    Raises:
        UserError: no such checkpoint, or a damaged one.
    """
    if is_demo(name):
        path = Path(demo.path())
    elif not name:
        raise UserError("--model is empty; name a folder or a Hugging Face repository")
    elif loader.looks_local(name):
        path = Path(name).expanduser()
    else:
        path = _fetched(name)
    try:
        loader.check_checkpoint(path)
    except (ValueError, OSError) as error:
        raise UserError(one_line(error)) from None
    return path


def _fetched(name: str) -> Path:
    """A Hugging Face repository's local folder."""
    try:
        return Path(_download(name))
    except Exception as error:  # every kind of network trouble there is
        first = str(error).strip().splitlines() or [type(error).__name__]
        why = first[0].removeprefix("Got: ").split(". ")[0].rstrip(".")
        raise UserError(
            f"{name}: no such folder, and not to be had from Hugging Face ({why}); "
            "check the name and the network"
        ) from None


def check_fits(path: Path, tokens: int, force: bool, extra: int = 0) -> None:
    """Raise a UserError where weights, a cache of ``tokens`` and ``extra`` bytes exceed memory."""
    config = json.loads((path / "config.json").read_text())
    weights = memory.weight_bytes(path)
    needed = weights + memory.cache_bytes(config, tokens) + extra
    limit, what = memory.capacity()
    if needed > limit and not force:
        raise UserError(
            f"{path} needs {gigabytes(needed)} ({gigabytes(weights)} of weights, the rest for "
            f"{tokens:,} tokens of cache{' and float32 copies' if extra else ''}), the {what} is "
            f"{gigabytes(limit)}; choose a smaller model, or pass --force"
        )


def load(args: argparse.Namespace, tokens: int) -> tuple[Any, Any]:
    """The model and tokenizer that the options name, for up to ``tokens`` tokens."""
    path = checkpoint(args.model)
    check_fits(path, tokens, args.force)
    announce(path)
    with loading(args.model):
        return loader.load(str(path), policy=args.policy, strict=args.strict)


def announce(path: Path) -> None:
    """Say that a large model is being loaded."""
    if (size := memory.weight_bytes(path)) >= SLOW_BYTES:
        say(f"loading {gigabytes(size)} from {path}")


class loading:
    """A context in which a failure to load becomes a UserError that names the model."""

    def __init__(self, name: str):
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Optional[type], error: Optional[BaseException], _trace: Any) -> None:
        # mlx-lm answers a checkpoint it cannot use with any of these.
        if isinstance(error, (ValueError, OSError, RuntimeError, KeyError, TypeError, AttributeError)):
            text = one_line(error)
            if not isinstance(error, (ValueError, OSError)):
                text = f"{type(error).__name__}: {text}"
            raise UserError(f"cannot load {self.name}: {text}") from error
