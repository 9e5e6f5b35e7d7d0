"""Several requests at once: left and right padding, and rows that join and leave."""

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    make_prompt_cache,
)
from models.agree import greedy, prompt, rrmse, run, steps
from models.tiny import tiny

import qwen_metal

LENGTHS = (3, 17, 9, 33)


def batch_cache(model, left_padding: list[int], window: int | None = None) -> list:
    """What a server makes: a batch cache of each layer's kind."""

    def one(cache):
        if isinstance(cache, ArraysCache):
            return ArraysCache(2, left_padding)
        return BatchRotatingKVCache(window, left_padding) if window else BatchKVCache(left_padding)

    return [one(c) for c in make_prompt_cache(model)]


def padded(left: bool) -> tuple[mx.array, list[int]]:
    """Prompts of LENGTHS in one array (4, 33) padded on one side, and the padding."""
    padding = [max(LENGTHS) - n for n in LENGTHS]
    sides = [((0, 0), (p, 0) if left else (0, p)) for p in padding]
    rows = [mx.pad(prompt(n), side) for n, side in zip(LENGTHS, sides)]
    return mx.concatenate(rows), padding


def following(count: int) -> list[mx.array]:
    """``count`` steps of one token for each of the four rows, the same token a step."""
    return [mx.repeat(p, 4, axis=0) for p in steps(1, count)[1:]]


@pytest.mark.parametrize("window", [None, 64])
def test_left_padded_batch(window, family, pair, route):
    if window and family != "qwen3_moe":
        window = 48  # hybrid models meet a rotating batch cache only when a caller makes one
    stock, ours = pair(family)
    tokens, padding = padded(left=True)
    pieces = [tokens, *following(3)]
    got, cache = run(ours, pieces, batch_cache(ours, padding, window))
    want, want_cache = run(stock, pieces, batch_cache(stock, padding, window))
    for i, n in enumerate(LENGTHS):
        # Each row as mlx-lm computes it in the same batch, and as it is alone.
        row = got[i : i + 1, padding[i] :]
        route.agree(row, want[i : i + 1, padding[i] :], f"row {i} of the batch")
        alone, _ = run(ours, [prompt(n), *(p[:1] for p in following(3))])
        assert rrmse(row, alone) <= 1e-5, f"row {i} alone"
    for a, b in zip(cache, want_cache):
        for name in ("offset", "left_padding", "lengths", "_idx"):
            if hasattr(b, name) and getattr(b, name) is not None:
                assert mx.array_equal(mx.array(getattr(a, name)), mx.array(getattr(b, name))), name


@pytest.mark.parametrize("chunk", [64, 10])
def test_right_padded_batch(chunk, family, pair, route):
    # As mlx-lm's server: prepare, the prompts in pieces, finalize, then decode.
    stock, ours = pair(family)
    tokens, padding = padded(left=False)
    results = []
    for model in (stock, ours):
        cache = batch_cache(model, [0] * 4)
        for c in cache:
            c.prepare(lengths=list(LENGTHS), right_padding=padding)
        logits, _ = run(model, [tokens[:, i : i + chunk] for i in range(0, 33, chunk)], cache)
        for c in cache:
            c.finalize()
        after, _ = run(model, following(3), cache)
        results.append((logits, after, cache))
    (want, want_after, want_cache), (got, after, cache) = results
    route.agree(after, want_after, "after finalize")
    for i, n in enumerate(LENGTHS):
        route.agree(got[i, :n], want[i, :n], f"row {i}")
        alone, _ = run(ours, [prompt(n), *(p[:1] for p in following(3))])
        assert rrmse(after[i : i + 1], alone[:, n:]) <= 1e-5, f"row {i} alone"
    for c, w in zip(cache, want_cache):  # what is in a row's padding is undefined
        assert type(c) is type(w)
        if isinstance(w, ArraysCache):
            [route.agree(a, b) for a, b in zip(c.cache, w.cache)]
            assert c.lengths is w.lengths is c.left_padding is w.left_padding is None
            continue
        assert c._idx == w._idx and c._right_padding is w._right_padding is None
        assert mx.array_equal(c.offset, w.offset) and mx.array_equal(c.left_padding, w.left_padding)
        for i, p in enumerate(w.left_padding.tolist()):
            route.agree(c.keys[i, :, p : c._idx], w.keys[i, :, p : c._idx], f"keys of row {i}")
            route.agree(c.values[i, :, p : c._idx], w.values[i, :, p : c._idx], f"values of row {i}")


def joining_and_leaving(model, prompts: list[list[int]], count: int, **settings) -> dict:
    """Tokens of each request: the third joins a running batch of two, the first is taken out.

    The rest run to ``count`` tokens.
    """
    generator = BatchGenerator(model, max_tokens=count, **settings)
    first, second = generator.insert(prompts[:2])
    tokens: dict = {}

    def advance(rounds):
        for _ in range(rounds):
            for r in generator.next_generated():
                tokens.setdefault(r.uid, []).append(r.token)

    advance(4)
    (third,) = generator.insert(prompts[2:])
    advance(3)
    generator.remove([first])
    advance(count + 4)
    generator.close()
    return {"left": tokens[first], "stayed": tokens[second], "joined": tokens[third]}


@pytest.mark.parametrize("window", [None, 16])
def test_a_row_joins_and_leaves(window, family, pair, route):
    stock, ours = pair(family)
    prompts = [prompt(n)[0].tolist() for n in (5, 19, 12)]
    settings = dict(max_kv_size=window, prefill_step_size=8)
    got = joining_and_leaving(ours, prompts, 12, **settings)
    assert got == joining_and_leaving(stock, prompts, 12, **settings)
    assert [len(v) for v in got.values()] == [7, 12, 12]
    if window is None:  # and as each is alone
        for tokens, row in zip(got.values(), prompts):
            assert tokens == greedy(ours, mx.array(row), len(tokens))


def test_one_request_in_a_batch_cache(family, pair, route):
    # A server with one client: batch caches of one row, array offsets.
    stock, ours = pair(family)
    got, cache = run(ours, steps(17, 3), batch_cache(ours, [0]))
    want, want_cache = run(stock, steps(17, 3), batch_cache(stock, [0]))
    route.agree(got, want)
    route.agree_caches(cache, want_cache)


def test_a_server_with_one_client_needs_no_mask(route):
    # What a batch cache knows is its padding: no operation is refused for a mask array.
    model = qwen_metal.accelerate(tiny("qwen3_5_moe"), route.policy)
    qwen_metal.routes(reset=True)
    run(model, steps(9, 2), batch_cache(model, [0]))
    reasons = [r for v in qwen_metal.routes(reset=True).values() for r in v.get("reasons", {})]
    assert not [r for r in reasons if "mask" in r]
