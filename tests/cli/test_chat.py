"""``chat``: turns, the kept cache, and the ways to stop."""

import argparse
import os
import pty
import select
import signal
import sys
import time

import mlx_lm
import pytest

import qwen_metal
from qwen_metal.commands import chat


@pytest.fixture
def talk(quick):
    """A conversation with the quick model."""
    model, tokenizer = qwen_metal.load(str(quick))
    args = argparse.Namespace(system_prompt=None, temp=0.0, top_p=1.0, max_tokens=8, model=str(quick))
    return chat.Conversation(model, tokenizer, args)


def offset(talk):
    """Tokens that the conversation's cache has read."""
    return max(getattr(c, "offset", 0) for c in talk.cache)


def test_second_turn_reads_only_what_is_new(talk):
    first = list(talk.ask("Hello"))
    kept = len(talk.tokens)
    assert kept == offset(talk) and kept >= first[-1].prompt_tokens
    second = list(talk.ask("Again"))
    assert second[-1].prompt_tokens < first[-1].prompt_tokens + len("Again") + 8
    assert len(talk.tokens) == offset(talk) > kept + second[-1].prompt_tokens - 1


def test_kept_cache_answers_as_a_fresh_one(talk):
    list(talk.ask("Hello"))
    kept = len(talk.tokens)
    second = list(talk.ask("Again"))
    prompt = talk.tokens[: kept + second[-1].prompt_tokens]
    assert talk.tokenizer.decode(prompt).endswith("Again<|im_end|>\n<|im_start|>assistant\n")
    text = "".join(r.text for r in second)
    assert mlx_lm.generate(talk.model, talk.tokenizer, prompt, max_tokens=8) == text
    assert talk.messages[-1]["content"].strip() == text.strip()


def test_a_template_that_rewrites_the_past_is_read_again(talk):
    list(talk.ask("Hello"))
    talk.messages[0]["content"] = "Goodbye"
    last = list(talk.ask("Again"))[-1]
    assert last.prompt_tokens > 20 and len(talk.tokens) == offset(talk)


def test_reset(talk):
    list(talk.ask("Hello"))
    talk.reset()
    assert talk.messages == [] and talk.tokens == [] and offset(talk) == 0


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(talk, monkeypatch, capsys):
    talk.args.max_tokens = 1000
    written = []

    class Out:
        def write(self, text):
            written.append(text)
            if len(written) == 3:
                signal.raise_signal(signal.SIGINT)

        def flush(self):
            pass

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("sys.stdout", Out())
    chat.answer(talk, "Hello", verbose=True)
    assert len(written) <= 4 and signal.getsignal(signal.SIGINT) is before
    assert len(talk.tokens) == offset(talk)
    assert [m["role"] for m in talk.messages] == ["user", "assistant"]
    talk.args.max_tokens = 4
    assert list(talk.ask("Again"))[-1].prompt_tokens < 20


def test_second_ctrl_c_leaves():
    with pytest.raises(KeyboardInterrupt), chat.stoppable() as stopped:
        signal.raise_signal(signal.SIGINT)
        assert stopped()
        signal.raise_signal(signal.SIGINT)


def test_pipe(process, quick):
    """Commands, and an end of input without /quit."""
    child = process("chat", "--model", quick, "-m", 4, "--verbose")
    out, err = child.communicate("Hello\n\n/history\n/reset\n/history\n/nonsense\nHello", timeout=100)
    assert child.returncode == 0, err
    lines = out.splitlines()
    assert "user: Hello" in lines and lines.count("user: Hello") == 1
    assert lines[0] == lines[-1], "the same answer after /reset"
    assert err.count("/reset starts anew") == 2 and "a new conversation" in err
    assert "routes: " in err and "Traceback" not in err


def test_terminal(quick):
    """Ctrl-C in an answer, Ctrl-C at the prompt, and Ctrl-D, as typed."""
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        command = [sys.executable, "-m", "qwen_metal", "chat", "--model", str(quick)]
        os.execv(sys.executable, [*command, "-m", "30000", "--temp", "8"])
    expect(terminal, ">>> ")
    os.write(terminal, b"Hello\n")
    expect(terminal, "Hello\r\n")
    seen = expect(terminal, lambda text: len(text) > 4)
    os.write(terminal, b"\x03")
    seen += expect(terminal, ">>> ")
    assert "once more" not in seen and "Traceback" not in seen
    assert "Ctrl-C once more" in pressed(terminal, b"\x03", "leaves\r\n>>> ")
    os.write(terminal, b"\x04")
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        drain(terminal)
    os.close(terminal)
    assert ended[0] == child and os.waitstatus_to_exitcode(ended[1]) == 0


def pressed(terminal, key, wanted):
    """What the terminal shows after ``key``, pressed again where it fell just before the read began.

    Python's input() shows its prompt a moment before it can be interrupted.
    """
    for seconds in (5, 5, 100):
        os.write(terminal, key)
        try:
            return expect(terminal, wanted, seconds)
        except AssertionError as nothing:
            if str(nothing).strip():
                raise
    raise AssertionError(f"no answer to {key!r}")


def expect(terminal, wanted, seconds=100):
    """What the terminal shows, up to and with ``wanted``."""
    there = wanted if callable(wanted) else lambda text: wanted in text
    text, deadline = "", time.monotonic() + seconds
    while not there(text):
        if time.monotonic() >= deadline:
            raise AssertionError(text)
        text += drain(terminal)
    return text


def drain(terminal):
    """What the terminal has to show within a tenth of a second."""
    if not select.select([terminal], [], [], 0.1)[0]:
        return ""
    try:
        return os.read(terminal, 4096).decode(errors="replace")
    except OSError:  # the other end is closed
        return ""
