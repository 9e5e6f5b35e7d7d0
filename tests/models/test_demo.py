"""The embedded model in float32: against PyTorch's own logits, and against mlx-lm."""

import functools
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.cache import (
    QuantizedKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)
from models.agree import FLOAT32_RRMSE, greedy, rrmse, run
from models.test_batches import batch_cache, joining_and_leaving
from tokenizers import Tokenizer

import qwen_metal
import qwen_metal.demo

PYTORCH = Path(__file__).parents[1] / "data" / "demo_logits.npz"

#: Relative RMSE between two float32 engines that sum in their own orders.
ENGINES_RRMSE = 1e-4


PROSE = (
    "The database server listens for connections on one port. Each connection is served by a process of its "
    "own, which reads the configuration file when it starts. To install the package, run the command below; "
    "the compiler and the library headers must be present. When a request arrives, the module checks whether "
    "the key exists, and returns the value, or raises an error that names the key."
)


@functools.cache
def prose() -> list[int]:
    """Token numbers of PROSE."""
    return Tokenizer.from_file(str(qwen_metal.demo.path() / "tokenizer.json")).encode(PROSE).ids


def text(length: int, start: int = 0) -> mx.array:
    """Token numbers (1, length) of prose from a place on, repeated as needed."""
    return mx.array(np.resize(np.roll(prose(), -start), length).astype(np.int32))[None]


def test_logits_against_pytorch(demo):
    # transformers' own Qwen3_5Moe on the packaged weights, dequantised to float32; written by
    # examples/train_demo/export.py. Every passage of the file is compared.
    with np.load(PYTORCH) as data:
        passages = [(data[f"ids_{i}"], data[f"logits_{i}"]) for i in range(len(data.files) // 3)]
    assert len(passages) >= 4
    for ids, want in passages:
        assert want.shape == (len(ids), 8192) and want.std() > 0.1
        got = demo(mx.array(ids)[None])[0]
        error = rrmse(got, want)
        assert error <= ENGINES_RRMSE, f"{len(ids)} tokens: relative RMSE {error:.1e}"
        assert (np.array(got).argmax(-1) == want.argmax(-1)).mean() > 0.99


def test_logits_and_caches_against_stock(demo, demo_stock, route):
    pieces = [text(33), text(1, 40), text(1, 41)]
    got, cache = run(demo, pieces)
    want, want_cache = run(demo_stock[0], pieces)
    route.agree(got, want)
    route.agree_caches(cache, want_cache)


@pytest.fixture(scope="module")
def stock_200(demo_stock):
    """200 greedy tokens of mlx-lm after a prompt of 17."""
    return greedy(demo_stock[0], text(17), 200)


def test_200_greedy_tokens_against_stock(demo, stock_200):
    assert greedy(demo, text(17), 200) == stock_200


def test_left_padded_batch_of_four(demo, demo_stock, route):
    lengths = (5, 17, 9, 24)
    padding = [24 - n for n in lengths]
    rows = [mx.pad(text(n, 10 * n), ((0, 0), (24 - n, 0))) for n in lengths]
    pieces = [mx.concatenate(rows), mx.full((4, 1), 70, mx.int32)]
    got, _ = run(demo, pieces, batch_cache(demo, padding))
    want, _ = run(demo_stock[0], pieces, batch_cache(demo_stock[0], padding))
    for i, n in enumerate(lengths):
        alone, _ = run(demo, [text(n, 10 * n), pieces[1][:1]])
        assert rrmse(got[i : i + 1, padding[i] :], alone) <= FLOAT32_RRMSE, f"row {i} alone"
        route.agree(got[i, padding[i] :], want[i, padding[i] :], f"row {i} by stock")


def test_a_row_joins_and_leaves_a_running_batch(demo):
    prompts = [text(n, n)[0].tolist() for n in (5, 19, 12)]
    got = joining_and_leaving(demo, prompts, 10)
    for tokens, row in zip(got.values(), prompts):
        assert tokens == greedy(demo, mx.array(row), len(tokens))


@pytest.mark.parametrize("chunk", [1, 7, 64, 2048])
def test_chunks(chunk, demo, demo_whole):
    got, _ = run(demo, [text(70)[:, i : i + chunk] for i in range(0, 70, chunk)])
    assert rrmse(got, demo_whole) <= FLOAT32_RRMSE


@pytest.fixture(scope="module")
def demo_whole(demo_stock):
    """mlx-lm's logits of 70 tokens in one piece."""
    return run(demo_stock[0], [text(70)])[0]


@pytest.mark.slow
def test_both_sides_of_a_2048_token_chunk(demo, demo_stock, route):
    for count in (2047, 2048, 2049):
        got, cache = run(demo, [text(count), text(1)])
        want, want_cache = run(demo_stock[0], [text(count), text(1)])
        assert rrmse(got, want) <= FLOAT32_RRMSE, f"{count} tokens"
        assert [c.size() for c in cache] == [c.size() for c in want_cache]


def test_saved_and_reloaded_prompt_cache(demo, demo_stock, route, tmp_path):
    _, cache = run(demo, [text(17)])
    save_prompt_cache(str(tmp_path / "c.safetensors"), cache)
    got, after = run(demo, [text(1, 30)], load_prompt_cache(str(tmp_path / "c.safetensors")))
    want, want_after = run(demo_stock[0], [text(17), text(1, 30)])
    route.agree(got, want[:, 17:])
    route.agree_caches(after, want_after)


@pytest.mark.parametrize("start", [0, 20])
def test_quantised_kv(start, demo, demo_stock):
    # From token 0, and switched in while it decodes.
    settings = dict(kv_bits=8, quantized_kv_start=start)
    cache = make_prompt_cache(demo)
    got = greedy(demo, text(17), 12, prompt_cache=cache, **settings)
    assert isinstance(cache[3], QuantizedKVCache) and cache[3].bits == 8
    assert got == greedy(demo_stock[0], text(17), 12, **settings)


def test_generate_and_stream(demo, demo_stock):
    stock, tokenizer = demo_stock
    want = mlx_lm.generate(stock, tokenizer, "The database server", max_tokens=12)
    assert want and mlx_lm.generate(demo, tokenizer, "The database server", max_tokens=12) == want
    pieces = [r.text for r in mlx_lm.stream_generate(demo, tokenizer, "The database server", max_tokens=12)]
    assert "".join(pieces) == want


def test_batch_generate(demo, demo_stock):
    stock, tokenizer = demo_stock
    prompts = [tokenizer.encode(t) for t in ("The database server", "When", "Each thread of a process")]
    got, want = (mlx_lm.batch_generate(m, tokenizer, prompts, max_tokens=[8, 5, 6]) for m in (demo, stock))
    assert got.texts == want.texts and all(got.texts)


@pytest.mark.slow
def test_bfloat16_as_packaged(demo_path):
    # The packaged dtypes on the stock path, bit for bit (slow: mlx's bfloat16 on a CPU is a plain loop).
    stock, _ = mlx_lm.load(str(demo_path))
    ours, _ = qwen_metal.load(str(demo_path), policy="kernels=stock")
    pieces = [text(17), text(1, 3)]
    assert mx.array_equal(run(ours, pieces)[0], run(stock, pieces)[0])
