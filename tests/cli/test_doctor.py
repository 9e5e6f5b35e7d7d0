"""``doctor``, the cache folder, and the check against memory."""

import json
import os
import sys

import pytest

from qwen_metal import Policy, cachedir, extension, ops
from qwen_metal.commands import doctor, memory


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of this test's own."""
    monkeypatch.setenv("QWEN_METAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_report(run, cache, tmp_path):
    file = tmp_path / "d.json"
    ended = run("doctor", "--json", file)
    assert ended.status == 0, ended.err
    value = json.loads(file.read_text())
    for name in ("mlx", "mlx_lm", "transformers", "python", "qwen_metal"):
        assert value[name] in ended.out
    assert str(cache) in ended.out and value["cache"] == {"path": str(cache), "error": ""}
    assert [row["name"] for row in value["policy"]] == [row["name"] for row in Policy.table()]
    assert all(row["acts_here"] == (value["backend"] in row["on"]) for row in value["policy"])
    assert value["warmup"]["ran"] and set(value["warmup"]["routes"]) & set(ops.NAMES)
    assert value["extension"]["available"] == (extension.load() is not None)
    assert value["backends"]["cpu"] and value["memory"]["bytes"] > 1e9
    for line in value["trouble"]:
        assert line in ended.out


def test_without_warm_up(run, cache):
    ended = run("doctor", "--no-warmup")
    assert ended.status == 0 and ended.err == "" and "warm-up" not in ended.out


def test_why_there_is_no_extension(process, cache):
    child = process("doctor", "--no-warmup", env={"QWEN_METAL_NO_EXTENSION": "1"})
    out, _ = child.communicate(timeout=100)
    assert child.returncode == 0
    assert "not used: switched off by QWEN_METAL_NO_EXTENSION" in out
    assert "the compiled extension is not used: switched off" in out


def test_cache_folder_that_cannot_be_written(run, tmp_path, monkeypatch):
    """The report all the same, then one line and status 2."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QWEN_METAL_CACHE", str(tmp_path / "file" / "cache"))
    ended = run("doctor", "--no-warmup")
    assert ended.status == 2 and "cannot be written" in ended.out
    assert len(ended.err.splitlines()) == 1
    assert "cannot be written (Not a directory); set QWEN_METAL_CACHE" in ended.err


def test_nothing_else_needs_the_cache_folder(run, quick, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QWEN_METAL_CACHE", str(tmp_path / "file" / "cache"))
    assert run("generate", "--model", quick, "--prompt", "a", "-m", 1).status == 0


def test_demo_that_does_not_run(run, cache, monkeypatch):
    monkeypatch.setattr(doctor.loader, "load", lambda path: 1 / 0)
    ended = run("doctor")
    assert ended.status == 1 and "the demo model does not run: ZeroDivisionError" in ended.err


def test_cache_dir_makes_the_folder(cache):
    assert cachedir.cache_dir() == cache and cache.is_dir() and list(cache.iterdir()) == []


@pytest.mark.parametrize(
    "platform, variables, wanted",
    [
        ("linux", {}, "~/.cache/qwen-metal"),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/qwen-metal"),
        ("darwin", {}, "~/Library/Caches/qwen-metal"),
        ("darwin", {"QWEN_METAL_CACHE": "~/mine"}, "~/mine"),
        ("linux", {"QWEN_METAL_CACHE": ""}, "~/.cache/qwen-metal"),
    ],
)
def test_cache_path(monkeypatch, platform, variables, wanted):
    monkeypatch.setattr(sys, "platform", platform)
    for name in ("QWEN_METAL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(cachedir.cache_path()) == os.path.expanduser(wanted)


def test_cache_bytes():
    """The published shapes: 20.5 KB of keys and values a token, 63 MB of states."""
    text = dict(num_hidden_layers=40, full_attention_interval=4, num_attention_heads=16)
    text |= dict(num_key_value_heads=2, head_dim=256, linear_num_value_heads=32)
    text |= dict(linear_value_head_dim=128, linear_key_head_dim=128)
    states = memory.cache_bytes({"text_config": text}, 0)
    assert states == 30 * 32 * 128 * 128 * 4
    assert memory.cache_bytes({"text_config": text}, 1000) - states == 20_480 * 1000
    plain = dict(num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128)
    assert memory.cache_bytes(plain, 1) == 48 * 4 * 128 * 2 * 2


def test_weight_bytes(demo_path, quick):
    size = memory.weight_bytes(demo_path)
    assert size == (demo_path / "model.safetensors").stat().st_size
    assert memory.float32_bytes(demo_path) == memory.float32_bytes(quick) > 0
    assert memory.float32_bytes(demo_path) < size


def test_wired_limit_counts(monkeypatch):
    info = {"max_recommended_working_set_size": 1000, "device_name": "x"}
    monkeypatch.setattr(memory.mx, "device_info", lambda: info)
    assert memory.capacity() == (1000, "wired limit")
