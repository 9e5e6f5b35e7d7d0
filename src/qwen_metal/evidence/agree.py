"""``qwen-metal agree``: this package's logits beside stock mlx-lm's, both against a float32 reference.

Teacher-forced: every engine reads the same text. The first half of the positions
is read as one prompt and the rest token by token, so both the prefill and the
decode routes are judged. All engines run over one set of weights, one after the
other; the reference is stock mlx-lm with the same weights in float32.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map_with_path
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from ..commands.common import UserError
from ..loader import accelerate, restore
from ..policy import Policy
from ..routes import separate
from .bench import environment
from .common import Progress, interruptible

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}

#: Tokens in a continuation's prompt.
PROMPT = 32

#: Longest period, in tokens, that counts as a repetition, and how often it must come round.
LONGEST_PERIOD, TIMES = 64, 4


@dataclass(frozen=True)
class Plan:
    """What to compare: scored positions, and greedy continuations of ``length`` tokens each."""

    dtype: str = "float32"
    positions: int = 192
    continuations: int = 3
    length: int = 256


# -- text ---------------------------------------------------------------------------------------


def read_text(path: Path) -> str:
    """A text file.

    Raises:
        UserError: no such file, an encoding other than UTF-8, or nothing in it.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 (byte {error.start}); convert it, for example with "
            f"iconv -f latin1 -t utf-8 {path}"
        ) from None
    if not text.strip():
        raise UserError(f"{path} is empty; a text of some hundred words is needed")
    return text


def check_length(tokens: Sequence[int], plan: Plan, config: dict[str, Any], asked: bool) -> Plan:
    """The plan, cut to a short text unless its length was asked for.

    Raises:
        UserError: more positions than the model or the text has.
    """
    text = config.get("text_config", config)
    limit = text.get("max_position_embeddings")
    if limit and plan.positions > limit:
        raise UserError(f"--positions {plan.positions:,} is beyond the model's limit of {limit:,} tokens")
    if limit and PROMPT + plan.length > limit:
        raise UserError(f"--length {plan.length:,} is beyond the model's limit of {limit - PROMPT:,} tokens")
    there = len(tokens) - 1
    if there < 1 or (asked and plan.positions > there):
        raise UserError(f"the text has {len(tokens):,} tokens, {plan.positions + 1:,} are needed")
    if plan.positions > there:
        return Plan(plan.dtype, there, plan.continuations, plan.length)
    return plan


# -- engines ------------------------------------------------------------------------------------


def measure(
    model: nn.Module, tokens: Sequence[int], plan: Plan, policy: Policy, against: Optional[Policy], strict: bool
) -> dict[str, Any]:
    """The object that ``agree --json`` writes, but for its ``options`` and ``machine``.

    Args:
        model: accelerated or not; left as stock, in float32.
        tokens: of the text, plan.positions + 1 at least.
        policy: of ours.
        against: what ours is compared with: a policy, or None for stock.

    Ctrl-C ends it; figures that were not measured by then are null.
    """
    start = time.monotonic()
    rows = np.array(tokens[: plan.positions + 1])
    logits: dict[str, np.ndarray] = {}
    texts: dict[str, list[list[int]]] = {"stock": [], "ours": []}
    counts: dict[str, dict] = {}
    prompts = prompts_of(tokens, plan)
    cast(model, DTYPES[plan.dtype])
    with Progress(3 * plan.positions + 2 * sum(plan.length for _ in prompts)) as progress:
        with interruptible(lambda: "figures that are not measured yet are null") as stopped:
            for name, setting in (("stock", against), ("ours", policy)):
                _set(model, setting, strict)
                with separate() as routes:
                    logits[name] = score(model, rows[:-1], progress, name)
                    if name == "ours":
                        counts.update(routes())
            cast(restore(model), mx.float32)
            logits["ref"] = score(model, rows[:-1], progress, "float32 reference")
            cast(model, DTYPES[plan.dtype])
            for name, setting in (("stock", against), ("ours", policy)):
                _set(model, setting, strict)
                for prompt in prompts:
                    texts[name].append([])
                    for token in greedy(model, prompt, plan.length):
                        texts[name][-1].append(token)
                        _step(progress, f"{name}: continuation {len(texts[name])}")
            restore(model)
    return {
        "command": "agree",
        "complete": not stopped,
        "seconds": round(time.monotonic() - start, 1),
        "dtype": plan.dtype,
        "positions": plan.positions,
        **figures(logits, rows[1:]),
        **continued(texts, plan),
        "routes": counts,
    }


def cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Cast the floating-point parameters, except those that mlx-lm keeps in float32."""
    wanted = getattr(model, "cast_predicate", lambda _: True)

    def one(path: str, value: mx.array) -> mx.array:
        floating = mx.issubdtype(value.dtype, mx.floating)
        return value.astype(dtype) if floating and (dtype == mx.float32 or wanted(path)) else value

    model.update(tree_map_with_path(one, model.parameters()))
    mx.eval(model.parameters())


def _set(model: nn.Module, policy: Optional[Policy], strict: bool) -> None:
    """Make the model stock (None) or accelerated."""
    restore(model)
    if policy is not None:
        accelerate(model, policy, strict)


def score(model: nn.Module, tokens: np.ndarray, progress: Progress, name: str) -> np.ndarray:
    """Logits (positions, vocabulary) in float32: half as one prompt, then token by token."""
    cache, half = make_prompt_cache(model), -(-len(tokens) // 2)
    parts = []
    for piece in [tokens[:half], *(tokens[i : i + 1] for i in range(half, len(tokens)))]:
        out = model(mx.array(piece)[None], cache=cache)[0].astype(mx.float32)
        parts.append(np.array(out))
        for _ in piece:
            _step(progress, f"{name}: teacher-forced")
    return np.concatenate(parts)


def greedy(model: nn.Module, prompt: Sequence[int], length: int) -> Iterator[int]:
    """The likeliest token, ``length`` times, whatever token ends a text."""
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=length):
        yield int(token)


def prompts_of(tokens: Sequence[int], plan: Plan) -> list[list[int]]:
    """Pieces of the text, spread over it, to be continued."""
    size = min(PROMPT, len(tokens))
    starts = np.linspace(0, len(tokens) - size, plan.continuations).astype(int)
    return [list(tokens[s : s + size]) for s in dict.fromkeys(starts.tolist())]


def _step(progress: Progress, text: str) -> None:
    progress.at(text)
    progress.step()


# -- figures ------------------------------------------------------------------------------------


def figures(logits: dict[str, np.ndarray], targets: np.ndarray) -> dict[str, Any]:
    """Perplexities, agreement and divergences; null where a set of logits is missing."""
    stock, ours, ref = (logits.get(name) for name in ("stock", "ours", "ref"))
    between = divergence(stock, ours)
    return {
        "ppl_stock": perplexity(stock, targets),
        "ppl_ours": perplexity(ours, targets),
        "ppl_ref": perplexity(ref, targets),
        "same_top": same_top(stock, ours),
        "same_top_ref_ours": same_top(ref, ours),
        "same_top_ref_stock": same_top(ref, stock),
        "kl_mean": _mean(between),
        "kl_max": None if between is None else float(between.max()),
        "kl_ref_ours": _mean(divergence(ref, ours)),
        "kl_ref_stock": _mean(divergence(ref, stock)),
    }


def perplexity(logits: Optional[np.ndarray], targets: np.ndarray) -> Optional[float]:
    """exp of the mean negative log-probability of the text's own next tokens."""
    if logits is None:
        return None
    chosen = [_log_softmax(row)[target] for row, target in zip(logits, targets)]
    return float(np.exp(-np.mean(chosen)))


def divergence(p: Optional[np.ndarray], q: Optional[np.ndarray]) -> Optional[np.ndarray]:
    """KL(p || q) in nats at each position, of logits (positions, vocabulary)."""
    if p is None or q is None:
        return None
    answer = []
    for a, b in zip(p, q):
        a, b = _log_softmax(a), _log_softmax(b)
        answer.append(np.sum(np.exp(a) * (a - b)))
    return np.array(answer)


def same_top(a: Optional[np.ndarray], b: Optional[np.ndarray]) -> Optional[float]:
    """Share of positions at which both find the same token likeliest."""
    if a is None or b is None:
        return None
    return float(np.mean(a.argmax(axis=-1) == b.argmax(axis=-1)))


def _log_softmax(row: np.ndarray) -> np.ndarray:
    row = row.astype(np.float64)
    row = row - row.max()
    return row - np.log(np.sum(np.exp(row)))


def _mean(values: Optional[np.ndarray]) -> Optional[float]:
    return None if values is None else float(values.mean())


def continued(texts: dict[str, list[list[int]]], plan: Plan) -> dict[str, Any]:
    """Where greedy decoding parts, and how many continuations end in a loop.

    first_divergence: the lowest 0-based token at which any continuation
    differs; null where none does or none was made.
    """
    pairs = list(zip(texts["stock"], texts["ours"]))
    places = [first_difference(a, b) for a, b in pairs]
    found = [place for place in places if place is not None]
    return {
        "first_divergence": min(found, default=None),
        "first_divergences": places,
        "continuations": len(pairs),
        "length": plan.length,
        "loop_rate_stock": _loop_rate(texts["stock"]),
        "loop_rate_ours": _loop_rate(texts["ours"]),
    }


def first_difference(a: Sequence[int], b: Sequence[int]) -> Optional[int]:
    """The first place at which two sequences differ, as far as both go; or None."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)


def _loop_rate(texts: list[list[int]]) -> Optional[float]:
    return sum(map(loops, texts)) / len(texts) if texts else None


def loops(tokens: Sequence[int]) -> bool:
    """Whether a text ends in ``TIMES`` rounds or more of one phrase (at least 16 tokens in all)."""
    for period in range(1, min(LONGEST_PERIOD, len(tokens) // TIMES) + 1):
        span = max(TIMES * period, 16)
        tail = list(tokens[-span:])
        if len(tail) == span and tail[period:] == tail[:-period]:
            return True
    return False


def nearer(value: dict[str, Any]) -> Optional[str]:
    """``ours`` or ``stock``: which has the lower KL from the float32 reference; ``equal``; or None."""
    ours, stock = value["kl_ref_ours"], value["kl_ref_stock"]
    if ours is None or stock is None:
        return None
    return "equal" if ours == stock else "ours" if ours < stock else "stock"


def result(value: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The whole result."""
    return {**value, "nearer_to_ref": nearer(value), "options": options, "machine": environment()}


def lines(value: dict[str, Any]) -> list[list[str]]:
    """Rows of the printed table: what, the other engine's, ours, the reference's."""

    def text(x: Optional[float], form: str) -> str:
        return "-" if x is None else format(x, form)

    v, parted = value, "none" if value["continuations"] else "-"
    if value["first_divergence"] is not None:
        parted = str(value["first_divergence"])
    return [
        ["perplexity", text(v["ppl_stock"], ".5f"), text(v["ppl_ours"], ".5f"), text(v["ppl_ref"], ".5f")],
        ["KL from the reference", text(v["kl_ref_stock"], ".3e"), text(v["kl_ref_ours"], ".3e"), "0"],
        ["same top token as the reference", text(v["same_top_ref_stock"], ".2%"), text(v["same_top_ref_ours"], ".2%"), "-"],
        ["same top token as the other", "-", text(v["same_top"], ".2%"), "-"],
        ["KL from the other, mean", "-", text(v["kl_mean"], ".3e"), "-"],
        ["KL from the other, largest", "-", text(v["kl_max"], ".3e"), "-"],
        ["continuations that end in a loop", text(v["loop_rate_stock"], ".0%"), text(v["loop_rate_ours"], ".0%"), "-"],
        ["first differing greedy token", "-", parted, "-"],
    ]  # fmt: skip


def draw(value: dict[str, Any], file: Path) -> None:
    """Distances from the float32 reference as a bar chart in a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    other = value["options"]["against"]
    panels = (
        ("KL from the float32 reference", [value["kl_ref_stock"], value["kl_ref_ours"]]),
        ("perplexity minus the reference's", [_less(value, "ppl_stock"), _less(value, "ppl_ours")]),
    )
    for axes, (title, heights) in zip(figure.subplots(1, 2), panels):
        bars = axes.bar([other, "qwen_metal"], [h or 0 for h in heights], color=["#9aa0a6", "#1a73e8"])
        axes.bar_label(bars, fmt="%.2e", padding=3)
        axes.set_title(title)
        axes.margins(y=0.15)
    figure.suptitle(f"{value['options']['model']}, {value['dtype']}, {value['positions']} positions")
    figure.savefig(file, format="png", dpi=120)


def _less(value: dict[str, Any], key: str) -> Optional[float]:
    ppl, ref = value[key], value["ppl_ref"]
    return None if ppl is None or ref is None else ppl - ref
