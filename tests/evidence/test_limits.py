"""The machine's limits and the operations' share of them."""

import json

import mlx.core as mx
import pytest

from qwen_metal import extension
from qwen_metal.evidence import common, limits


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Sizes of a few seconds; figures from them mean nothing."""
    with common.on_device(mx.cpu):
        small = {"STREAM": 1 << 20, "PASS": 1 << 18, "QKV": 256, "EXPERTS": 16, "ROWS": 16, "SCAN_TOKENS": 9}
        for name, value in {**small, "PROMPT_TOKENS": 33, "CONTEXTS": (64, 300)}.items():
            monkeypatch.setattr(limits, name, value)
        yield


def test_every_kind_is_measured_and_the_count_is_right():
    kinds = [job.kind for job in limits.jobs()]
    assert len(kinds) == limits.JOBS
    assert set(kinds) == {"gemv", "gemm", "scan", "attention"}


@pytest.mark.skipif(not extension.status().available, reason="without kernels stock takes minutes here")
def test_the_command(command, tmp_path):
    pytest.importorskip("matplotlib")
    files = tmp_path / "a.json", tmp_path / "a.png"
    ended = command("limits", "--backend", "cpu", "--seconds", 0, "--json", files[0], "--plot", files[1])
    assert ended.status == 0, ended.err
    value = json.loads(files[0].read_text())
    common.check_result("limits", value)
    assert len(value["operations"]) == limits.JOBS
    for row in value["operations"]:
        streams = row["op"] in ("projections", "moe_decode", "grouped_qmm", "gqa_decode")
        assert (row["without_arithmetic_share"] is not None) == streams
        assert row["share_read"] > 0 and row["share_matrix"] > 0 and row["route"] == "cpu"
    assert "measured by the extension" in ended.out
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_without_the_extension_numpy_measures(monkeypatch):
    monkeypatch.setattr(limits.extension, "load", lambda: None)
    monkeypatch.setattr(limits, "_numpy_matrix", lambda seconds: 1.0)
    found = limits.machine_limits(0)
    assert found["read"] > 0 and "numpy" in found["by"]


def test_weights_read_are_the_weights_used():
    job = next(limits.jobs())
    assert sum(a.nbytes for a in job.streams(0)) == job.bytes
    assert job.streams(0)[0] is not job.streams(1)[0]


def test_ctrl_c_keeps_what_is_done(command, tmp_path, monkeypatch):
    def interrupted(job, seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(limits, "_measured", interrupted)
    file = tmp_path / "a.json"
    ended = command("limits", "--backend", "cpu", "--seconds", 0, "--json", file)
    value = json.loads(file.read_text())
    common.check_result("limits", value)
    assert ended.status == 130 and value["operations"] == [] and value["limits"]["read"] > 0


def test_refusals(command, tmp_path):
    assert "--backend" in command("limits", "--backend", "host").complaint
    assert "0 or more" in command("limits", "--seconds", -1).complaint
    assert "cannot be written" in command("limits", "--json", tmp_path / "no" / "f").complaint
