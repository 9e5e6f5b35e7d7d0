"""The command as a user's process."""

import os
import signal
import subprocess
import sys


def popen_command(*arguments, env=(), **popen):
    """The command as a process with text pipes, in which Ctrl-C means what it means at a terminal."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(
        [sys.executable, "-m", "qwen_metal", *map(str, arguments)],
        env={**os.environ, "PYTHONUNBUFFERED": "1", **dict(env)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **{**pipes, **popen},
    )


def stop(child):
    """End a process that is still there, and close its pipes."""
    if child.poll() is None:
        child.kill()
    child.wait(30)
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None and not pipe.closed:
            try:
                pipe.close()
            except BrokenPipeError:
                pass
