"""Agreement with stock over a text: its figures, what it refuses, and what must hold."""

import json
import math

import mlx.core as mx
import numpy as np
import pytest
from models.tiny import tiny

from qwen_metal import Policy, extension
from qwen_metal.evidence import agree, common
from qwen_metal.routes import fast_share

KEYS = {
    "dtype", "positions", "ppl_stock", "ppl_ours", "ppl_ref", "same_top", "kl_mean", "kl_ref_ours",
    "kl_ref_stock", "first_divergence",
}  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 128, 80).tolist()
needs_kernels = pytest.mark.skipif(not extension.status().available, reason="no CPU kernels to judge")


@pytest.fixture(autouse=True)
def on_cpu():
    with common.on_device(mx.cpu):
        yield


# -- figures ------------------------------------------------------------------------------------


def test_figures_of_known_logits():
    stock = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], np.float32)) + 3
    ours = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]], np.float32))
    value = agree.figures({"stock": stock, "ours": ours, "ref": stock}, np.array([0, 1]))
    assert value["ppl_stock"] == pytest.approx(1 / math.sqrt(0.5 * 0.8))
    assert value["ppl_ours"] == pytest.approx(1 / math.sqrt(0.25 * 0.8))
    assert value["same_top"] == 0.5
    assert value["kl_max"] == pytest.approx(0.25 * math.log(2), rel=1e-6)
    assert value["kl_mean"] == value["kl_ref_ours"] == pytest.approx(value["kl_max"] / 2)
    assert value["kl_ref_stock"] == 0 and agree.nearer(value) == "stock"


def test_figures_that_were_not_measured_are_null():
    value = agree.figures({}, np.array([0]))
    assert set(value.values()) == {None} and agree.nearer(value) is None


@pytest.mark.parametrize(
    "tokens, loop",
    [
        ([1, 2, 3] * 30, True),
        (list(range(50)) + [7] * 16, True),
        (list(range(50)) + [7] * 15, False),
        (list(range(64)) * 4, True),
        (list(range(65)) * 4, False),  # longer than any period that counts
        ([1, 2, 3] * 30 + [9], False),
        ([], False),
    ],
)
def test_loops(tokens, loop):
    assert agree.loops(tokens) == loop


def test_first_divergence_is_the_lowest():
    plan = agree.Plan(length=3)
    texts = {"stock": [[1, 2, 3], [1, 2, 3]], "ours": [[1, 2, 4], [1, 2, 3]]}
    value = agree.continued(texts, plan)
    assert value["first_divergence"] == 2 and value["first_divergences"] == [2, None]
    assert agree.continued({"stock": [], "ours": []}, plan)["first_divergence"] is None


# -- models -------------------------------------------------------------------------------------


def measured(family="qwen3_5_moe", dtype="float32", against=None, policy=Policy(), **sizes):
    plan = agree.Plan(dtype, **{"positions": 65, "continuations": 2, "length": 12, **sizes})
    return agree.measure(tiny(family, dtype=mx.bfloat16), TOKENS, plan, policy, against, False)


def test_the_stock_policy_is_stock():
    value = measured(dtype="bfloat16", policy=Policy(kernels="stock"))
    assert value["same_top"] == 1 and value["kl_max"] == 0 and value["first_divergence"] is None
    assert value["ppl_ours"] == value["ppl_stock"] and value["kl_ref_ours"] == value["kl_ref_stock"] > 0


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_5", "qwen3_next", "qwen3_moe"])
def test_float32_agrees(family):
    value = measured(family)
    assert value["same_top"] == 1
    assert value["ppl_ours"] == pytest.approx(value["ppl_stock"], rel=1e-4)
    assert value["ppl_ref"] == value["ppl_stock"]


@needs_kernels
def test_bfloat16_is_nearer_to_the_reference_than_stock():
    value = measured(dtype="bfloat16", continuations=0)
    assert value["kl_ref_ours"] < value["kl_ref_stock"]
    assert fast_share(value["routes"]) == 1


def test_against_another_policy():
    value = measured(against=Policy(numerics="match"), positions=9, continuations=0)
    assert value["ppl_stock"] is not None and value["loop_rate_ours"] is None


def test_a_cast_keeps_what_mlx_lm_keeps_in_float32():
    model = tiny("qwen3_5_moe", dtype=mx.float32)
    agree.cast(model, mx.bfloat16)
    kinds = {p.rsplit(".", 1)[-1]: v.dtype for p, v in agree_parameters(model)}
    assert kinds["A_log"] == mx.float32 and kinds["dt_bias"] == mx.bfloat16


def agree_parameters(model):
    from mlx.utils import tree_flatten

    return tree_flatten(model.parameters())


# -- text ---------------------------------------------------------------------------------------


def test_texts_that_cannot_be_read(command, tmp_path):
    file = tmp_path / "text"
    assert "No such file" in command("agree", "--file", file).complaint
    assert "Is a directory" in command("agree", "--file", tmp_path).complaint
    for content in (b"", b" \n\t", b"\xef\xbb\xbf"):
        file.write_bytes(content)
        assert "is empty" in command("agree", "--file", file).complaint
    for encoding in ("latin1", "utf-16"):
        file.write_bytes("Grüße aus Köln".encode(encoding))
        assert "is not UTF-8" in command("agree", "--file", file).complaint


def test_a_byte_order_mark_is_no_text(tmp_path):
    file = tmp_path / "text"
    file.write_bytes("text".encode("utf-8-sig"))
    assert agree.read_text(file) == "text"


def test_lengths_beyond_the_model_or_the_text():
    config = {"text_config": {"max_position_embeddings": 100}}
    with pytest.raises(common.UserError, match="beyond the model's limit of 100 tokens"):
        agree.check_length(range(1000), agree.Plan(positions=101, length=8), config, True)
    with pytest.raises(common.UserError, match="--length 90 is beyond"):
        agree.check_length(range(1000), agree.Plan(positions=9, length=90), config, True)
    with pytest.raises(common.UserError, match="the text has 8 tokens, 10 are needed"):
        agree.check_length(range(8), agree.Plan(positions=9, length=8), config, True)
    assert agree.check_length(range(8), agree.Plan(positions=9, length=8), config, False).positions == 7
    with pytest.raises(common.UserError, match="the text has 1 tokens"):
        agree.check_length(range(1), agree.Plan(positions=9, length=8), config, False)


def test_other_refusals(command, tmp_path):
    file = tmp_path / "text"
    file.write_text("some words")
    assert "unknown field" in command("agree", "--file", file, "--against", "speed=high").complaint
    assert "--against" in command("agree", "--file", file, "--against", "nonsense").complaint
    assert "1 or more" in command("agree", "--positions", "0").complaint
    assert "No space left" in command("agree", "--file", file, "--json", "/dev/full").complaint
    assert "no such model folder" in command("agree", "--file", file, "--model", tmp_path / "none").complaint


# -- the demo model -----------------------------------------------------------------------------


@pytest.fixture
def text(demo_path, tmp_path):
    """The held-out text's file, or a few sentences where it is not there yet."""
    held_out = demo_path / "heldout.txt"
    if held_out.is_file():
        return held_out
    file = tmp_path / "text"
    file.write_text("The function returns a list of the values that it found in the file. " * 8)
    return file


def test_the_command(command, demo_path, text, tmp_path):
    pytest.importorskip("matplotlib")
    files = tmp_path / "a.json", tmp_path / "a.png"
    sizes = ("--positions", 40, "--continuations", 1, "--length", 8)
    ended = command("agree", "--model", demo_path, "--file", text, *sizes, "--json", files[0], "--plot", files[1])
    assert ended.status == 0, ended.err
    value = json.loads(files[0].read_text())
    common.check_result("agree", value)
    assert KEYS <= set(value) and value["positions"] == 40
    assert value["same_top"] == 1 and value["ppl_ours"] == pytest.approx(value["ppl_stock"], rel=1e-4)
    assert "| perplexity |" in ended.out and "nearer to the float32 reference" in ended.out
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_keeps_what_is_done(command, demo_path, text, tmp_path, monkeypatch):
    score, file = agree.score, tmp_path / "a.json"

    def interrupted(model, tokens, progress, name):
        if name.startswith("float32"):
            raise KeyboardInterrupt
        return score(model, tokens, progress, name)

    monkeypatch.setattr(agree, "score", interrupted)
    ended = command("agree", "--model", demo_path, "--file", text, "--positions", 12, "--json", file)
    value = json.loads(file.read_text())
    common.check_result("agree", value)
    assert ended.status == 130 and not value["complete"]
    assert value["same_top"] == 1 and value["ppl_ref"] is None and value["nearer_to_ref"] is None
