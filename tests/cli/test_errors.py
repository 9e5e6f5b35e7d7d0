"""Bad input: one line on stderr that says what is wrong and what to do, status 2, nothing on stdout."""

import json
import shutil

import mlx.core as mx
import pytest

from qwen_metal import cli
from qwen_metal.commands import memory

COMMANDS = ("generate", "chat", "serve", "bench")


@pytest.fixture
def broken(demo_path, tmp_path):
    """A copy of the demo model, to be damaged."""
    folder = tmp_path / "broken"
    shutil.copytree(demo_path, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return folder


def arguments(command, model):
    """The least that a command needs, with a model."""
    prompt = ("--prompt", "a") if command == "generate" else ()
    return (command, "--model", model, *prompt)


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], "COMMAND"),
        (["nonsense"], "nonsense"),
        (["generate", "--nonsense"], "'--nonsense'"),
        (["generate", "--max", "3"], "'--max'"),
        (["generate", "extra"], "'extra'"),
        (["generate", "--max-tokens", "-3"], "--max-tokens/-m: -3 is out of range, 1 or more"),
        (["generate", "--max-tokens", "0"], "1 or more"),
        (["generate", "--max-tokens", "many"], "'many' is not a whole number"),
        (["generate", "--max-tokens", "9" * 30], "out of range"),
        (["generate", "--temp", "-1"], "--temp: -1 is out of range, 0 or more"),
        (["generate", "--temp", "nan"], "out of range"),
        (["generate", "--top-p", "1.5"], "0 to 1"),
        (["generate", "--seed", "x"], "'x' is not a whole number"),
        (["generate", "--prompt", ""], "the prompt is empty; pass --prompt TEXT"),
        (["generate", "--raw", "--chat"], "not allowed with"),
        (["generate", "--policy", "speed=high"], "unknown field 'speed', supported are kernels"),
        (["generate", "--policy", "numerics=loose"], "'precise', 'match'"),
        (["generate", "--policy", "numerics"], "field=value"),
        (["generate", "--policy", "tile_rows=32"], "does nothing on"),
        (["chat", "--max-tokens", "-3"], "1 or more"),
        (["bench", "--rounds", "0"], "--rounds"),
        (["bench", "--prompt-tokens", "-1"], "--prompt-tokens"),
        (["bench", "--plot", "chart.jpg"], ".png"),
        (["doctor", "--model", "x"], "'--model'"),
        (["serve", "--nonsense"], "--nonsense"),
        (["serve", "--port", "web"], "--port"),
        (["serve", "--port", "70000"], "--port 70000 is out of range, 0 to 65535"),
        (["serve", "--max-tokens", "-3"], "--max-tokens -3 is out of range"),
        (["serve", "--prompt-cache-bytes", "lots"], "lots"),
    ],
)
def test_bad_argument(run, argv, words):
    assert words in run(*argv).complaint


@pytest.mark.parametrize("command", COMMANDS)
def test_no_such_path(run, command):
    assert "no such model folder: /no/such/model" in run(*arguments(command, "/no/such/model")).complaint


@pytest.mark.parametrize("command", COMMANDS)
def test_no_weights(run, command, broken):
    (broken / "model.safetensors").unlink()
    assert "no weights" in run(*arguments(command, broken)).complaint


@pytest.mark.parametrize("command", COMMANDS)
def test_truncated_weights(run, command, broken):
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert "is truncated" in run(*arguments(command, broken)).complaint


@pytest.mark.parametrize("command", COMMANDS)
def test_another_family(run, command, broken):
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    complaint = run(*arguments(command, broken)).complaint
    assert "'llama'" in complaint and "qwen3_5_moe" in complaint


def test_config_that_mlx_lm_cannot_use(run, broken):
    config = json.loads((broken / "config.json").read_text())
    del config["text_config"]["num_hidden_layers"]
    (broken / "config.json").write_text(json.dumps(config))
    assert "cannot load" in run(*arguments("generate", broken)).complaint


def test_weights_of_other_shapes(run, broken):
    mx.save_safetensors(str(broken / "model.safetensors"), {"x": mx.zeros((2,))})
    assert "cannot load" in run(*arguments("generate", broken)).complaint


def test_no_model_name(run):
    assert "--model is empty" in run(*arguments("generate", "")).complaint


def test_unknown_repository_offline(run):
    complaint = run(*arguments("generate", "no-such-owner/no-such-model")).complaint
    assert "no such folder, and not to be had from Hugging Face" in complaint


def test_no_network(process):
    child = process(
        *arguments("generate", "no-such-owner/no-such-model"),
        env={"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"},
    )
    out, err = child.communicate(timeout=100)
    assert (child.returncode, out) == (cli.BAD_INPUT, "")
    assert len(err.splitlines()) == 1 and "check the name and the network" in err


@pytest.mark.parametrize("command", ("generate", "bench", "doctor"))
def test_json_that_cannot_be_written(run, command, tmp_path):
    (tmp_path / "file").write_text("")
    for target in (tmp_path, tmp_path / "missing" / "f.json", tmp_path / "file" / "f.json", "-", ""):
        assert "--json" in run(command, "--json", target).complaint
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_json_kept_where_the_command_fails(run, tmp_path):
    target = tmp_path / "result.json"
    target.write_text("earlier")
    run("generate", "--prompt", "", "--json", target).complaint
    assert target.read_text() == "earlier"


def test_no_matplotlib(run, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    complaint = run("bench", "--plot", tmp_path / "chart.png").complaint
    assert "pip install 'qwen-metal[plots]'" in complaint


def test_no_prompt_for_another_model(run, quick):
    assert "no prompt; pass --prompt TEXT" in run("generate", "--model", quick).complaint


def test_system_prompt_without_template(run, quick):
    argv = ("--prompt", "a", "--raw", "--system-prompt", "b")
    assert "--system-prompt" in run("generate", "--model", quick, *argv).complaint


@pytest.mark.parametrize("command", COMMANDS)
def test_too_large_for_memory(run, command, monkeypatch):
    monkeypatch.setattr(memory, "capacity", lambda: (5_000_000, "wired limit"))
    complaint = run(*arguments(command, "demo")).complaint
    assert "the wired limit is 0.01 GB" in complaint and "--force" in complaint


def test_force_loads_it_all_the_same(run, monkeypatch, quick):
    monkeypatch.setattr(memory, "capacity", lambda: (5_000_000, "memory"))
    assert run("generate", "--model", quick, "--prompt", "a", "-m", 1, "--force").status == 0


def test_strict_names_the_operation(run, quick):
    """Under kernels=stock nothing fused may serve, so strict has to refuse."""
    argv = ("--prompt", "a", "-m", 1, "--strict", "--policy", "kernels=stock")
    ended = run("generate", "--model", quick, *argv)
    assert ended.complaint.startswith("qwen-metal: error: ")
    assert "kernels='stock'" in ended.complaint
