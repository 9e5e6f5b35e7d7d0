"""``generate``: the text of mlx-lm's own loop on stdout, figures on stderr."""

import json
import signal

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.sample_utils import make_sampler

import qwen_metal
from qwen_metal import cli

PROMPT = "The file is read"


@pytest.fixture(scope="module")
def loaded(quick):
    """The same model through the package's own function."""
    return qwen_metal.load(str(quick))


def test_text_is_mlx_lms(run, quick, loaded):
    ended = run("generate", "--model", quick, "--prompt", PROMPT, "--raw", "-m", 12)
    assert ended.status == 0
    assert ended.out.strip() == mlx_lm.generate(*loaded, PROMPT, max_tokens=12).strip()
    assert "tok/s" in ended.err and "peak memory" in ended.err and "routes: " in ended.err


def test_chat_template_is_the_default(run, quick, loaded):
    model, tokenizer = loaded
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": PROMPT}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    ended = run("generate", "--model", quick, "--prompt", PROMPT, "--system-prompt", "s", "-m", 8)
    assert ended.out.strip() == mlx_lm.generate(model, tokenizer, prompt, max_tokens=8).strip()


def test_sampling_options(run, quick, loaded):
    argv = ("generate", "--model", quick, "--prompt", PROMPT, "--raw", "-m", 8)
    argv += ("--temp", 0.9, "--top-p", 0.8, "--seed", 7)
    mx.random.seed(7)
    wanted = mlx_lm.generate(*loaded, PROMPT, max_tokens=8, sampler=make_sampler(0.9, 0.8))
    assert run(*argv).out.strip() == wanted.strip()
    assert run(*argv[:-1], 8).out.strip() != wanted.strip()


def test_json(run, quick, tmp_path):
    file = tmp_path / "g.json"
    ended = run("generate", "--model", quick, "-p", PROMPT, "-m", 4, "--json", file, "--verbose")
    value = json.loads(file.read_text())
    assert value["text"].strip() == ended.out.strip()
    assert value["generation_tokens"] == 4 and value["prompt"] == PROMPT
    assert value["peak_memory_bytes"] > 1e6 and value["generation_tps"] > 0
    # A model that is not ours counts nothing.
    assert value["routes"]["moe_decode"] and value["routes"]["gated_delta_step"]
    assert "moe_decode: " in ended.err
    assert list(tmp_path.iterdir()) == [file]


def test_demo_without_arguments(run):
    """The embedded model, continued as it is, by one command."""
    first = run("generate", "-m", 4)
    assert first.status == 0 and first.out.strip()
    assert run("generate", "-m", 4, "--model", "demo").out == first.out


def test_prompt_from_stdin(process, quick, run):
    argv = ("generate", "--model", quick, "--raw", "-m", 4, "--prompt")
    out, err = process(*argv, "-").communicate(PROMPT, timeout=100)
    assert out == run(*argv, PROMPT).out


def test_empty_stdin(process, quick):
    child = process("generate", "--model", quick, "--prompt", "-")
    out, err = child.communicate("", timeout=100)
    assert (child.returncode, out) == (cli.BAD_INPUT, "")
    assert len(err.splitlines()) == 1 and "the prompt is empty" in err


def test_ctrl_c(process, quick):
    child = process("generate", "--model", quick, "--prompt", PROMPT, "-m", 100000, "--temp", 1.5)
    assert child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=100)
    assert child.returncode == cli.INTERRUPTED and "Traceback" not in err


def test_reader_that_leaves(process, quick):
    child = process("generate", "--model", quick, "--prompt", PROMPT, "-m", 100000, "--temp", 1.5)
    assert child.stdout.read(1)
    child.stdout.close()
    assert child.wait(100) == cli.NO_READER
    assert child.stderr.read() == ""
