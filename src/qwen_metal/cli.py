"""The ``qwen-metal`` command: its parser, and the ways in which a command may end.

Each command is one file of ``commands/`` with ``add(subparsers)`` and ``run(args)``.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn, Optional, Sequence

from . import __version__
from .commands import accuracy, agree, bench, chat, doctor, generate, limits, serve
from .commands.common import UserError
from .commands.output import one_line, say
from .routes import Unsupported

COMMANDS = (generate, chat, serve, bench, accuracy, agree, limits, doctor)

#: Exit statuses: bad input, Ctrl-C, and a reader that left (as a shell shows SIGPIPE).
BAD_INPUT, INTERRUPTED, NO_READER = 2, 130, 141


class Parser(argparse.ArgumentParser):
    """argparse with whole option names only, and one line where it would print usage too."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def parser() -> Parser:
    """The parser of the whole command line."""
    top = Parser(prog="qwen-metal", description="Qwen's hybrid MoE models on MLX, with fused kernels.")
    top.add_argument("--version", action="version", version=f"qwen-metal {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return top


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name; the process's own by default.

    Returns:
        The exit status: 0, or 2 for bad input, 130 for Ctrl-C, 141 for a closed pipe.
    """
    try:
        _lenient_output()
        args, rest = parser().parse_known_args(argv)
        if rest and args.command != "serve":
            raise UserError(f"unknown argument {rest[0]!r}; see qwen-metal {args.command} --help")
        args.rest = rest
        status = args.run(args)
        sys.stdout.flush()
        return status
    except (UserError, Unsupported) as error:
        say(f"error: {one_line(error)}")
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # What Python still holds goes nowhere, or its last flush would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER


def _lenient_output() -> None:
    """A terminal that cannot show a character gets a question mark, not a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
