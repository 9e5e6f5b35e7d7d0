"""``load``, ``accelerate``, ``restore``, ``warmup``: what they return, and what they refuse in one line."""

import inspect
import json
import os
import shutil
import struct
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama, qwen3_next
from models.tiny import tiny

import qwen_metal
from qwen_metal import loader

SUPPORTED = "qwen3_5_moe, qwen3_5, qwen3_next, qwen3_moe"


@pytest.fixture
def checkpoint(demo_path, tmp_path):
    """A copy of the demo model's folder, to be damaged."""
    return shutil.copytree(demo_path, tmp_path / "checkpoint")


def one_line(error) -> str:
    message = str(error.value)
    assert "\n" not in message and len(message) < 600
    return message


# --- load -----------------------------------------------------------------------------------


def test_signature_is_mlx_lms_and_two_settings():
    ours, stock = (inspect.signature(f).parameters for f in (qwen_metal.load, mlx_lm.load))
    assert list(ours) == [*stock, "policy", "strict"]
    for name in stock:
        assert (ours[name].default, ours[name].kind) == (stock[name].default, stock[name].kind), name


def test_load_returns_what_mlx_lm_returns(demo_path):
    stock, stock_tokenizer, stock_config = mlx_lm.load(str(demo_path), return_config=True)
    model, tokenizer, config = qwen_metal.load(str(demo_path), return_config=True)
    assert config == stock_config and type(tokenizer) is type(stock_tokenizer)
    assert type(model) is type(stock) and qwen_metal.is_accelerated(model)
    ours, theirs = (dict(tree_flatten(m.parameters())) for m in (model, stock))
    assert list(ours) == list(theirs)
    assert all(mx.array_equal(ours[n], theirs[n]) for n in theirs)
    assert len(qwen_metal.load(str(demo_path), lazy=True)) == 2


def test_load_passes_everything_on(monkeypatch, demo_path):
    seen = {}
    monkeypatch.setattr(mlx_lm, "load", lambda path, **settings: seen.update(settings) or (tiny("qwen3_moe"), "t"))
    settings = dict(
        tokenizer_config={"a": 1}, model_config={"b": 2}, adapter_path="x", lazy=True,
        return_config=False, revision="main", trust_remote_code=True,
    )
    model, tokenizer = qwen_metal.load(str(demo_path), **settings)
    assert seen == settings and tokenizer == "t"


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing", "nothing", "a/b/c"])
def test_no_such_folder(path):
    with pytest.raises(FileNotFoundError, match="no such model folder") as error:
        qwen_metal.load(path)
    assert path.removeprefix("./") in one_line(error)


def test_no_weights(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no weights") as error:
        qwen_metal.load(str(checkpoint))
    assert str(checkpoint) in one_line(error)


def test_no_config(checkpoint):
    (checkpoint / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="no config.json"):
        qwen_metal.load(str(checkpoint))


@pytest.mark.parametrize("text", ["{", "[1]", "", "\udcff"])
def test_a_config_that_is_no_object(text, checkpoint):
    (checkpoint / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match="config.json") as error:
        qwen_metal.load(str(checkpoint))
    one_line(error)


def test_a_config_of_another_family(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(ValueError, match=SUPPORTED) as error:
        qwen_metal.load(str(checkpoint))
    assert "'llama'" in one_line(error)
    # model_config goes over the file's, as in mlx-lm.
    model, _ = qwen_metal.load(str(checkpoint), model_config={"model_type": "qwen3_5_moe"})
    assert qwen_metal.is_accelerated(model)


@pytest.mark.parametrize("keep", [0, 5, 100, 5000, 1_000_000])
def test_a_truncated_file(keep, checkpoint):
    file = checkpoint / "model.safetensors"
    with open(file, "r+b") as stream:
        stream.truncate(keep)
    with pytest.raises(ValueError, match="truncated|no safetensors") as error:
        qwen_metal.load(str(checkpoint))
    assert str(file) in one_line(error)


@pytest.mark.parametrize("header", [b"not json", b"[]", b'{"x": 3}', b'{"x": {"data_offsets": ["a", "b"]}}', b'{"x": {"data_offsets": []}}'])
def test_a_damaged_header(header, checkpoint):
    (checkpoint / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ValueError, match="damaged safetensors header") as error:
        qwen_metal.load(str(checkpoint))
    one_line(error)


def test_a_missing_shard(checkpoint):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002.safetensors"):
        qwen_metal.load(str(checkpoint))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_damaged_index(text, checkpoint):
    (checkpoint / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="index") as error:
        qwen_metal.load(str(checkpoint))
    one_line(error)


def test_a_bad_policy_is_found_before_anything_is_loaded(monkeypatch, demo_path):
    monkeypatch.setattr(mlx_lm, "load", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ValueError, match="unknown field 'tiles'"):
        qwen_metal.load(str(demo_path), policy={"tiles": 3})


@pytest.mark.parametrize("path, local", [("owner/name", False), ("/a/b", True), ("./a/b", True), ("~/m", True), ("name", True)])
def test_what_looks_local(path, local, tmp_path, monkeypatch):
    assert loader.looks_local(path) is local
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert loader.looks_local("owner/name")


# --- accelerate -----------------------------------------------------------------------------


def other_families():
    args = llama.ModelArgs(
        model_type="llama", hidden_size=32, num_hidden_layers=1, intermediate_size=32,
        num_attention_heads=2, rms_norm_eps=1e-6, vocab_size=16,
    )
    renamed = tiny("qwen3_moe")
    renamed.model_type = "qwen9"
    return {
        "Model": (llama.Model(args), "'llama'"),
        "Linear": (nn.Linear(4, 4), "Linear"),
        "dict": ({}, "dict"),
        "None": (None, "NoneType"),
        "Qwen3NextModel": (tiny("qwen3_next").model, "Qwen3NextModel"),
        "renamed": (renamed, "'qwen9'"),
    }


@pytest.mark.parametrize("name", ["Model", "Linear", "dict", "None", "Qwen3NextModel", "renamed"])
def test_another_family_is_refused_unchanged(name):
    model, found = other_families()[name]
    before = [type(m) for _, m in model.named_modules()] if isinstance(model, nn.Module) else None
    with pytest.raises(ValueError, match=SUPPORTED) as error:
        qwen_metal.accelerate(model)
    assert found in one_line(error)
    if before:
        assert [type(m) for _, m in model.named_modules()] == before
        assert not qwen_metal.is_accelerated(model)


def test_a_language_model_inside_another_is_accelerated():
    # A vision wrapper hands over its text model.
    model = tiny("qwen3_5_moe").language_model
    model.model_type = "qwen3_5_moe_text"
    assert qwen_metal.is_accelerated(qwen_metal.accelerate(model))


@pytest.mark.parametrize("policy, message", [
    ({"tile": 1}, "unknown field 'tile'"),
    ({"tile_rows": 7}, "tile_rows is 7, supported are 0, 16, 32, 64"),
    ("kernels", "not of the form field=value"),
    (3, "got int"),
    ({"kv_reads": "strided"}, "does nothing on"),
])
def test_a_bad_policy_changes_nothing(policy, message):
    model = tiny("qwen3_moe")
    with pytest.raises(ValueError, match=message) as error:
        qwen_metal.accelerate(model, policy)
    one_line(error)
    assert not qwen_metal.is_accelerated(model)


def strict_cases():
    trained = tiny("qwen3_5_moe")
    trained.train()
    adapted = tiny("qwen3_5_moe")
    adapted.layers[3].self_attn.q_proj = nn.Sequential()
    convolved = tiny("qwen3_next")
    convolved.layers[1].linear_attn.conv1d.bias = mx.zeros((1,))
    return {
        "training": (trained, "training mode"),
        "adapter": (adapted, "layers.3.self_attn: a Sequential layer has no fused kernel"),
        "convolution": (convolved, "layers.1.linear_attn: a convolution other than"),
    }


@pytest.mark.parametrize("case", ["training", "adapter", "convolution"])
def test_strict_names_the_block_and_changes_nothing(case):
    model, reason = strict_cases()[case]
    with pytest.raises(qwen_metal.Unsupported, match=reason) as error:
        qwen_metal.accelerate(model, strict=True)
    one_line(error)
    assert not qwen_metal.is_accelerated(model)
    qwen_metal.accelerate(model)  # and without strict it is accelerated, and counted


def test_strict_leaves_the_settings_of_an_accelerated_model():
    model, _ = strict_cases()["adapter"]
    qwen_metal.accelerate(model, "prefill_chunk=64")
    with pytest.raises(qwen_metal.Unsupported):
        qwen_metal.accelerate(model, "prefill_chunk=128", strict=True)
    assert model.layers[0]._qwen_metal.policy.prefill_chunk == 64


def test_a_strict_call_raises_with_operation_and_reason():
    model = qwen_metal.accelerate(tiny("qwen3_5_moe"), "kernels=stock", strict=True)
    with pytest.raises(qwen_metal.Unsupported, match="embed: policy: kernels='stock'"):
        model(mx.array([[1, 2]]))
    qwen_metal.accelerate(model, "kernels=stock")
    mx.eval(model(mx.array([[1, 2]])))


def test_a_strict_call_raises_for_a_users_own_block():
    class Own(qwen3_next.Qwen3NextMLP):
        pass

    model = tiny("qwen3_next")
    model.layers[1].mlp.__class__ = Own
    qwen_metal.accelerate(model, strict=True)
    # Whatever has kernels here, this block has none.
    seen = []
    loader._routes.stock, stock = lambda op, reason: seen.append((op, reason)), loader._routes.stock
    try:
        model(mx.array([[1, 2]]))
    finally:
        loader._routes.stock = stock
    assert ("moe", "a Own is called as it is") in seen


# --- warmup ---------------------------------------------------------------------------------


def test_warmup_counts_apart():
    model = qwen_metal.accelerate(tiny("qwen3_5_moe"))
    mx.eval(model(mx.array([[1]])))
    before = qwen_metal.routes()
    counts = qwen_metal.warmup(model, 9)
    assert qwen_metal.routes() == before
    calls = {op: sum(n for r, n in v.items() if r != "reasons") for op, v in counts.items()}
    assert calls["gated_delta_step"] == 2 * 3 and calls["gated_delta_scan"] == 3
    assert calls["gqa_decode"] == 2 and calls["attention_prefill"] == 1
    assert calls["moe_decode"] == 2 * 4 and calls["grouped_qmm"] == 2 * 4


def test_warmup_refuses():
    with pytest.raises(ValueError, match="not accelerated"):
        qwen_metal.warmup(tiny("qwen3_moe"))
    with pytest.raises(ValueError, match="tokens is 0"):
        qwen_metal.warmup(qwen_metal.accelerate(tiny("qwen3_moe")), 0)


# --- import ---------------------------------------------------------------------------------

IMPORT = """
import mlx.core as mx, mlx_lm, mlx_lm.models.qwen3_5, mlx_lm.models.qwen3_moe, mlx_lm.models.qwen3_next
import sys

made = []
def watched(owner, name):
    real = getattr(owner, name)
    setattr(owner, name, lambda *a, **k: made.append(name) or real(*a, **k))
for name in ("compile", "custom_function", "new_stream", "new_thread_local_stream", "zeros", "ones",
             "arange", "full", "eval", "async_eval", "set_default_device", "default_stream"):
    watched(mx, name)
watched(mx.fast, "metal_kernel")
watched(mx.random, "key")
memory = mx.get_active_memory()
{statement}
if mx.get_active_memory() != memory:
    made.append("memory")
for name, module in list(sys.modules.items()):
    if name.split(".")[0] == "qwen_metal":
        for key, value in vars(module).items():
            for part in (value.values() if isinstance(value, dict) and key != "__builtins__" else
                         value if isinstance(value, (tuple, list)) else [value]):
                if isinstance(part, (mx.array, mx.Stream)):
                    made.append(f"{{name}}.{{key}}")
print(made)
"""


def child(statement: str) -> str:
    """What an interpreter of its own saw being made while it ran the statement."""
    code = IMPORT.format(statement=statement)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_makes_no_array_stream_or_compiled_function():
    # mlx-lm 1181, 1256; mlx 3727: what a thread makes at import belongs to that thread.
    everything = "import qwen_metal, qwen_metal.ops, qwen_metal.extension, qwen_metal.kernels.cpu"
    assert child(everything) == "[]"
    # The watch itself sees each of them.
    made = child("import qwen_metal; mx.compile(abs); qwen_metal.x = (mx.zeros(3) + mx.array([1.0]),)")
    assert made == "['compile', 'zeros', 'memory', 'qwen_metal.x']"
