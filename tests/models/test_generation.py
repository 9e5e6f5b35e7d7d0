"""mlx-lm's own entry points on an accelerated model: they neither know nor notice."""

import threading

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step
from models.agree import greedy, prompt, run, steps
from models.tiny import tiny

import qwen_metal


def test_greedy_tokens(family, pair, route):
    stock, ours = pair(family)
    assert greedy(ours, prompt(33), 40, prefill_step_size=16) == greedy(
        stock, prompt(33), 40, prefill_step_size=16
    )


def test_speculative_decoding(pair, route):
    # A draft model and a trimmable cache; both models accelerated.
    stock, ours = pair("qwen3_moe")
    draft, our_draft = pair("qwen3_moe", seed=1)

    def tokens(model, draft):
        steps = speculative_generate_step(prompt(9)[0], model, draft, max_tokens=16, num_draft_tokens=3)
        return [(token, drafted) for token, _, drafted in steps]

    assert tokens(ours, our_draft) == tokens(stock, draft)
    # A draft that is the model itself is accepted: trimming and offsets fit.
    assert [d for _, d in tokens(ours, ours)].count(True) > 8


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_5", "qwen3_next"])
def test_speculative_decoding_is_refused_as_by_stock(family, pair):
    # A recurrent state cannot be trimmed.
    messages = []
    for model in pair(family):
        with pytest.raises(ValueError, match="ArraysCache") as error:
            next(speculative_generate_step(prompt(9)[0], model, model))
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_5", "qwen3_moe"])
def test_input_embeddings(family, pair, route):
    stock, ours = pair(family)
    table = getattr(stock, "language_model", stock).model.embed_tokens
    embeddings = table(prompt(17)) * 1.5
    route.agree(
        ours(prompt(17), input_embeddings=embeddings), stock(prompt(17), input_embeddings=embeddings)
    )
    # By mlx-lm's loop, which cuts them along with the prompt, or has no prompt at all.
    for tokens in (prompt(17)[0], mx.array([], mx.int32)):
        settings = dict(input_embeddings=embeddings[0], max_tokens=5, prefill_step_size=7)
        got, want = ([t for t, _ in generate_step(tokens, m, **settings)] for m in (ours, stock))
        assert got == want


def test_input_embeddings_are_refused_as_by_stock(pair):
    for model in pair("qwen3_next"):
        with pytest.raises(ValueError, match="does not support input embeddings"):
            next(generate_step(prompt(3)[0], model, input_embeddings=mx.zeros((3, 64))))


def test_compiled_forward(family, pair, route):
    stock, ours = pair(family)
    compiled = mx.compile(lambda tokens: ours(tokens))
    for count in (1, 9, 1):
        want = mx.compile(lambda tokens: stock(tokens))(prompt(count))
        route.agree(compiled(prompt(count)), want, f"{count} tokens")


def test_two_threads_at_once(family, route):
    # Each with its own prompt and cache on one model; nothing of a thread is left on a module.
    model = qwen_metal.accelerate(tiny(family), route.policy)
    prompts = [prompt(9), prompt(20)]
    want = [greedy(model, p, 12) for p in prompts]
    got, failures = [None, None], []

    def work(i):
        try:
            got[i] = greedy(model, prompts[i], 12)
        except Exception as error:  # the assertion below shows it
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not failures and got == want


def test_a_worker_thread_with_its_own_stream(route):
    # mlx-lm 1181, 1256: "There is no Stream(gpu, N) in current thread". The model is loaded and
    # first run on one thread, and then used by another on a stream of that thread.
    model = qwen_metal.accelerate(tiny("qwen3_5_moe"), route.policy)
    want = run(model, steps(17, 3))[0]
    answer = []

    def work():
        try:
            with mx.stream(mx.new_stream(mx.default_device())):
                answer.append(run(model, steps(17, 3))[0].tolist())
        except Exception as error:
            answer.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert answer == [want.tolist()]
