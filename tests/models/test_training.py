"""Gradients and adapters: a model in training mode is mlx-lm's, and an eval-mode one has gradients."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlx_lm
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.trainer import grad_checkpoint
from mlx_lm.tuner.utils import linear_to_lora_layers
from models.agree import prompt, rrmse, run, steps
from models.tiny import tiny

import qwen_metal

LORA = {"rank": 4, "scale": 10.0, "dropout": 0.0}


def loss(model, tokens):
    logits = model(tokens[:, :-1])
    return nn.losses.cross_entropy(logits, tokens[:, 1:]).mean()


def gradients(model, tokens) -> dict:
    """Loss and gradients by parameter name."""
    value, grads = nn.value_and_grad(model, loss)(model, tokens)
    return {"loss": value, **dict(tree_flatten(grads))}


def assert_same_gradients(got, want):
    # Not bit-equal even where the forward is: sums over the uses of an array run in another order.
    assert list(got) == list(want)
    for name in want:
        assert got[name].dtype == want[name].dtype, name
        error = rrmse(got[name], want[name])
        assert error <= 1e-4, f"{name}: relative RMSE {error:.1e}"


@pytest.mark.parametrize("length", [2, 6, 18])
def test_gradient_in_eval_mode(length, family, pair, route):
    # 1, 5 and 17 tokens: the decode and the prefill operations. A kernel has no gradient
    # of its own (mlx-lm 482, 1217).
    stock, ours = pair(family, quantised=False)
    assert not ours.training
    want = gradients(stock, prompt(length))
    assert_same_gradients(gradients(ours, prompt(length)), want)
    assert any(mx.abs(g).max().item() > 0 for n, g in want.items() if "layers.0" in n)


def test_gradient_of_a_quantised_model_in_eval_mode(family, pair, route):
    # What is frozen has no gradient, and the rest (norms, gates) has mlx-lm's.
    stock, ours = pair(family)
    want = gradients(stock, prompt(10))
    assert_same_gradients(gradients(ours, prompt(10)), want)


def test_gradient_by_the_input(pair, route):
    stock, ours = pair("qwen3_5_moe")
    x = stock.model.embed_tokens(prompt(9))

    def gradient(model):
        return mx.grad(lambda e: (model(prompt(9), input_embeddings=e) ** 2).sum())(x)

    assert rrmse(gradient(ours), gradient(stock)) <= 1e-5


def test_training_mode_is_stock_and_counted(family, pair):
    stock, ours = pair(family, quantised=False)
    ours.train()
    stock.train()
    qwen_metal.routes(reset=True)
    got, want = gradients(ours, prompt(18)), gradients(stock, prompt(18))
    counts = qwen_metal.routes(reset=True)
    for name in want:
        assert mx.array_equal(got[name], want[name]), name
    blocks = {"attention", "moe", "head"} | ({"deltanet"} if family != "qwen3_moe" else set())
    assert set(counts) == blocks, "no operation of ours took part"
    for name in blocks:
        assert counts[name] == {
            "stock": counts[name]["stock"],
            "reasons": {"training mode takes the stock path": counts[name]["stock"]},
        }
    ours.eval()
    run(ours, [prompt(9)])
    assert "attention" not in qwen_metal.routes(reset=True)


def test_gradient_checkpoints_are_kept(pair, monkeypatch):
    # mlx-lm's trainer replaces __call__ on the class of a layer: a body that does not call
    # its layers would train without checkpoints, and run out of memory.
    _, ours = pair("qwen3_5_moe", quantised=False)
    kind = type(ours.layers[0])
    monkeypatch.setattr(kind, "__call__", kind.__call__)  # put back afterwards
    want = gradients(ours, prompt(10))
    grad_checkpoint(ours.layers[0])
    calls, checkpointed = [], kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda *a, **k: calls.append(1) or checkpointed(*a, **k))
    ours.train()
    got = gradients(ours, prompt(10))
    assert len(calls) == len(ours.layers)
    for name in want:
        assert rrmse(got[name], want[name]) <= 1e-4, name


def test_lora_trains_and_fuses(family, pair, route):
    # Adapters on an accelerated model, one step, fused: at each stage what stock computes.
    results = []
    for model in pair(family):
        model.freeze()
        mx.random.seed(3)
        linear_to_lora_layers(model, 2, LORA)
        model.train()
        optimizer = optim.SGD(learning_rate=0.5)
        value, grads = nn.value_and_grad(model, loss)(model, prompt(18))
        optimizer.update(model, grads)
        mx.eval(model.parameters())
        model.eval()
        adapted = run(model, steps(9, 1))[0]
        fused = [(n, m.fuse()) for n, m in model.named_modules() if hasattr(m, "fuse")]
        assert fused
        model.update_modules(tree_unflatten(fused))
        results.append((value, adapted, run(model, steps(9, 1))[0]))
    for what, want, got in zip(("loss", "adapted", "fused"), *results):
        route.agree(got, want, what)
    untrained = run(tiny(family), steps(9, 1))[0]
    # Packed into 4 bits again, so only near; and not the model without its adapters.
    assert rrmse(results[0][2], results[0][1]) < 0.5 < rrmse(untrained, results[0][1])


def test_adapters_of_the_demo_load_train_and_fuse(demo_path, tmp_path, route):
    # By the public calls: save adapters as mlx-lm's trainer does, load them through us.
    base, _ = mlx_lm.load(str(demo_path))
    base.set_dtype(mx.float32)
    base.freeze()
    linear_to_lora_layers(base, 1, LORA)
    for _, module in base.named_modules():  # an untrained adapter adds nothing: make it matter
        if "lora_b" in module:
            module.lora_b = mx.random.normal(module.lora_b.shape, key=mx.random.key(0)) * 0.02
    adapters = dict(tree_flatten(base.trainable_parameters()))
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), adapters)
    (tmp_path / "adapter_config.json").write_text(
        '{"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": '
        '{"rank": 4, "scale": 10.0, "dropout": 0.0}}'
    )
    model, _ = qwen_metal.load(str(demo_path), adapter_path=str(tmp_path), policy=route.policy)
    model.set_dtype(mx.float32)
    base.eval()
    tokens = prompt(9, 8192)
    route.agree(model(tokens), base(tokens))

    model.train()
    value, grads = nn.value_and_grad(model, loss)(model, tokens)
    optim.SGD(learning_rate=1e-3).update(model, grads)
    model.eval()
    assert loss(model, tokens).item() < value.item()

    fused = [(n, m.fuse()) for n, m in model.named_modules() if hasattr(m, "fuse")]
    model.update_modules(tree_unflatten(fused))
    qwen_metal.routes(reset=True)
    model(tokens)
    assert "deltanet" not in qwen_metal.routes(reset=True)  # no block is refused for an adapter


def test_an_adapter_takes_the_stock_path_and_is_counted(route):
    model = qwen_metal.accelerate(tiny("qwen3_5_moe"), route.policy)
    linear_to_lora_layers(model, 1, {**LORA, "keys": ["self_attn.q_proj", "mlp.gate"]})
    qwen_metal.routes(reset=True)
    run(model, [prompt(9)])
    counts = qwen_metal.routes(reset=True)
    assert counts["attention"]["reasons"] == {"a LoRALinear layer has no fused kernel": 1}
    assert counts["moe"]["reasons"] == {"a LoRALinear layer has no fused kernel": 1}
