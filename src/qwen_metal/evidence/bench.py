"""Prefill and decode speed of stock mlx-lm and of the fused kernels, side by side.

Three engines run alternately in one process over one set of weights: ``stock``
(mlx-lm in the checkpoint's own dtype), ``stock_float32`` (mlx-lm with its
floating-point parameters cast to float32, since MLX's bf16 loops on a CPU are
several times slower than its float32) and ``qwen_metal``. The packed weights
are the same arrays in all three; only the float32 parameters are a second copy.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Optional

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from .. import __version__, extension, routes
from ..loader import accelerate
from ..policy import Policy

ENGINES = ("stock", "stock_float32", "qwen_metal")

#: Prompt and steps that run once an engine first: past 8 rows, so both MoE routes are warm.
WARM_UP_TOKENS, WARM_UP_STEPS = 9, 1

#: Text that is repeated to the length of the prompt: tokens as a user's, not random ones.
PASSAGE = (
    "The function reads one record at a time and returns a list of the values that it "
    "found. If the file does not exist, an error is raised and nothing is changed. The "
    "example below opens a connection, sends a query, and prints each row as it arrives. "
    "Options may be given in any order; a later one replaces an earlier one of the same "
    "name. See the section on configuration for the meaning of each value. "
)


@dataclass(frozen=True)
class Plan:
    """What to measure: sizes in tokens, rounds, and a budget in seconds.

    Past the budget, an engine that has one round already is left out of the
    later rounds that would not fit; sizes are never cut. None: no budget.
    """

    prompt_tokens: int = 128
    decode_tokens: int = 32
    rounds: int = 3
    budget: Optional[float] = None


@dataclass(frozen=True)
class Sample:
    """One measurement: seconds to the first token, seconds of the decode steps, peak bytes."""

    prefill: float
    decode: float
    peak: int

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.prefill + self.decode


def load_engines(path: Path, policy: Policy, strict: bool) -> tuple[dict[str, nn.Module], Any]:
    """The three engines over one set of weights, and the tokenizer."""
    stock, tokenizer = mlx_lm.load(str(path))
    # Lazy: the two others never read the weights they would load, they take stock's arrays.
    wide, ours = (load_model(path, lazy=True)[0] for _ in range(2))
    for model in (wide, ours):
        model.update(stock.parameters())
    wide.set_dtype(mx.float32)
    mx.eval(wide.parameters())
    accelerate(ours, policy, strict)
    return {"stock": stock, "stock_float32": wide, "qwen_metal": ours}, tokenizer


def prompt_of(tokenizer: Any, length: int) -> mx.array:
    """Tokens (length,) of readable text."""
    tokens = tokenizer.encode(PASSAGE, add_special_tokens=False)
    return mx.array((tokens * (length // len(tokens) + 1))[:length])


def measure(model: nn.Module, prompt: mx.array, decode_tokens: int) -> Sample:
    """Time one prompt and ``decode_tokens`` greedy steps through mlx-lm's own loop."""
    mx.clear_cache()
    mx.reset_peak_memory()
    cache = make_prompt_cache(model)
    steps = generate_step(prompt, model, max_tokens=decode_tokens + 1, prompt_cache=cache)
    start = time.perf_counter()
    next(steps)
    first = time.perf_counter()
    for _ in range(decode_tokens):
        next(steps)
    last = time.perf_counter()
    peak = mx.get_peak_memory()
    steps.close()
    # The loop runs one step ahead; the next engine must not pay for it.
    mx.eval([c.state for c in cache])
    return Sample(first - start, last - first, peak)


def run(
    engines: dict[str, nn.Module],
    prompt: mx.array,
    plan: Plan,
    report: Callable[[str, int, int, Optional[float]], None] = lambda *_: None,
) -> tuple[dict[str, list[Sample]], dict[str, dict]]:
    """Measure in alternating rounds.

    Args:
        engines: name -> model.
        prompt: tokens (plan.prompt_tokens,).
        plan: sizes, rounds and budget.
        report: called before each measurement with what comes, the number done
            and in all, and the seconds left where they are known.

    Returns:
        The samples of each engine, and ``routes()`` of the measured calls.
    """
    start = time.perf_counter()
    for name, model in engines.items():
        report(f"warm-up: {name}", 0, plan.rounds * len(engines), None)
        measure(model, prompt[:WARM_UP_TOKENS], WARM_UP_STEPS)
    routes(reset=True)
    samples: dict[str, list[Sample]] = {name: [] for name in engines}
    for index in range(plan.rounds):
        # Turned by one each round: no engine always runs after the same one.
        turn = index % len(engines)
        names = list(engines)[turn:] + list(engines)[:turn]
        for position, name in enumerate(names):
            spent = time.perf_counter() - start
            if plan.budget and samples[name] and spent + samples[name][-1].seconds > plan.budget:
                continue
            left = _time_left(samples, names[position:], plan.rounds - index - 1)
            if left is not None and plan.budget:
                left = min(left, max(plan.budget - spent, samples[name][-1].seconds))
            done = index * len(engines) + position
            report(f"round {index + 1} of {plan.rounds}: {name}", done, plan.rounds * len(engines), left)
            samples[name].append(measure(engines[name], prompt, plan.decode_tokens))
    return samples, routes()


def _time_left(samples: dict[str, list[Sample]], names: list[str], rounds: int) -> Optional[float]:
    """Seconds for the rest of this round and ``rounds`` more, once each engine ran."""
    if not all(samples.values()):
        return None
    last = {name: runs[-1].seconds for name, runs in samples.items()}
    return sum(last[name] for name in names) + rounds * sum(last.values())


def result(
    samples: dict[str, list[Sample]],
    counts: dict[str, dict],
    plan: Plan,
    about: dict[str, Any],
) -> dict[str, Any]:
    """The object that ``bench --json`` writes; its form is ``bench.schema.json``."""
    rows = {name: _figures(runs, plan) for name, runs in samples.items()}
    ours = rows["qwen_metal"]

    def ratio(other: str) -> dict[str, float]:
        return {
            part: ours[f"{part}_tps"] / rows[other][f"{part}_tps"] for part in ("prefill", "decode")
        }

    return {
        **rows,
        "ratio": ratio("stock"),
        "ratio_float32": ratio("stock_float32"),
        "routes": counts,
        "machine": about,
    }


def _figures(runs: list[Sample], plan: Plan) -> dict[str, Any]:
    """Medians, spread and peak memory of one engine."""
    prefill = [plan.prompt_tokens / run.prefill for run in runs]
    decode = [plan.decode_tokens / run.decode for run in runs]
    return {
        "prefill_tps": statistics.median(prefill),
        "prefill_spread": _spread(prefill),
        "decode_tps": statistics.median(decode),
        "decode_spread": _spread(decode),
        "peak_memory_bytes": max(run.peak for run in runs),
        "rounds": len(runs),
        "prompt_tokens": plan.prompt_tokens,
        "decode_tokens": plan.decode_tokens,
    }


def _spread(rates: list[float]) -> Optional[float]:
    """(largest - smallest) / median, or None for a single round."""
    return (max(rates) - min(rates)) / statistics.median(rates) if len(rates) > 1 else None


def machine(engines: dict[str, nn.Module], model_name: str, policy: Policy) -> dict[str, Any]:
    """Where and with what it was measured."""
    return {
        **environment(),
        "dtype": {name: dtype_of(model) for name, model in engines.items()},
        "model": model_name,
        "policy": policy.changed(),
    }


def environment() -> dict[str, Any]:
    """Processor, versions and extension of this process."""
    status = extension.status()
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": usable_cores(),
        "instruction_sets": instruction_sets(),
        "platform": platform.platform(),
        "device": str(mx.default_device()),
        "device_name": mx.device_info().get("device_name"),
        "python": platform.python_version(),
        "mlx": mx.__version__,
        "mlx_lm": mlx_lm.__version__,
        "transformers": metadata.version("transformers"),
        "qwen_metal": __version__,
        "extension": {
            "available": status.available,
            "reason": status.reason,
            "mlx_version": status.mlx_version,
        },
        "settings": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("MLX_", "QWEN_METAL_NO_"))
        },
    }


def cpu_name() -> str:
    """The processor's own name for itself."""
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def instruction_sets() -> list[str]:
    """Instruction sets of this processor that the extension has kernels for; [] without it."""
    module = extension.load()
    features = module.cpu_features() if module is not None else {}
    return [name for name, there in features.items() if there]


def dtype_of(model: nn.Module) -> str:
    """The dtype of the model's embedding scales, in which its activations are."""
    parameters = dict(tree_flatten(model.parameters()))
    name = next(n for n in parameters if n.endswith(("embed_tokens.scales", "embed_tokens.weight")))
    scales = parameters.get(name.rpartition(".")[0] + ".scales", parameters[name])
    return str(scales.dtype).rpartition(".")[2]


def table(value: dict[str, Any]) -> Any:
    """The result as a rich table."""
    from rich.table import Table

    sizes = value["stock"]
    answer = Table(
        title=f"{value['machine']['model']}: {sizes['prompt_tokens']}-token prefill, "
        f"{sizes['decode_tokens']} decode steps",
        caption="medians; spread is (largest - smallest) / median",
    )
    answer.add_column("engine")
    for head in ("prefill tok/s", "spread", "decode tok/s", "spread", "peak memory", "rounds"):
        answer.add_column(head, justify="right")
    for name in ENGINES:
        row = value[name]
        answer.add_row(
            f"{name} ({value['machine']['dtype'][name]})",
            f"{row['prefill_tps']:.2f}",
            _percent(row["prefill_spread"]),
            f"{row['decode_tps']:.2f}",
            _percent(row["decode_spread"]),
            f"{row['peak_memory_bytes'] / 1e9:.2f} GB",
            str(row["rounds"]),
        )
    for key, other in (("ratio", "stock"), ("ratio_float32", "stock_float32")):
        ratio = value[key]
        answer.add_row(
            f"ours / {other}", f"{ratio['prefill']:.2f} x", "", f"{ratio['decode']:.2f} x", "", "", "",
            style="bold",
        )
    return answer


def _percent(spread: Optional[float]) -> str:
    return "-" if spread is None else f"{spread:.0%}"


def draw(value: dict[str, Any], file: Path) -> None:
    """The result as a bar chart in a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sizes, about = value["stock"], value["machine"]
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    parts = (("prefill", sizes["prompt_tokens"]), ("decode", sizes["decode_tokens"]))
    for axes, (part, tokens) in zip(figure.subplots(1, 2), parts):
        rates = [value[name][f"{part}_tps"] for name in ENGINES]
        spreads = [value[name][f"{part}_spread"] or 0 for name in ENGINES]
        errors = [rate * spread / 2 for rate, spread in zip(rates, spreads)]
        labels = [f"{name}\n{about['dtype'][name]}" for name in ENGINES]
        colours = ["#9aa0a6", "#5f6368", "#1a73e8"]
        bars = axes.bar(labels, rates, yerr=errors, color=colours, capsize=4)
        axes.bar_label(bars, fmt="%.1f", padding=3)
        axes.set_title(f"{part}, {tokens} tokens")
        axes.set_ylabel("tokens per second")
        axes.margins(y=0.15)
    figure.suptitle(f"{about['model']} on {about['cpu']}, mlx {about['mlx']}")
    figure.savefig(file, format="png", dpi=120)
