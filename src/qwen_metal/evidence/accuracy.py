"""``qwen-metal accuracy``: error of quantised products against float64, ours beside the installed MLX."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence

from ..commands.common import UserError
from . import grid, upstream, wide
from .bench import environment
from .common import Progress, host_folder, interruptible

#: What says that two rows are of the same case.
KEYS = ("path", "scheme", "bits", "group_size", "shape", "input", "dtype", "backend", "engine")

#: What a comparison compares, the output's bits before the figures made from them.
FIGURES = ("digest", "ratio", "rel_rmse", "mean_error", "bad_rows", "repeat_equal")


def measure(
    backend: str, engines: Sequence[str], part: str = "grid", third: bool = False
) -> dict[str, Any]:
    """The object that ``accuracy --json`` writes; its form is ``schemas/accuracy.json``.

    Args:
        backend: where it runs; already MLX's default device.
        engines: ``qwen_metal``, ``mlx`` or both.
        part: ``grid``, ``wide`` or ``upstream``.
        third: a fixed third of the grid.

    Ctrl-C ends it early; what is measured by then is in the answer, and
    ``complete`` is false.
    """
    lists: dict[str, list] = {"cases": [], "wide": [], "upstream": []}
    rows = lists["cases" if part == "grid" else part]
    start = time.monotonic()
    with Progress(_count(part, third) * len(engines)) as progress:
        with interruptible(lambda: f"{len(rows)} of {progress.total} rows are kept") as stopped:
            for row in _rows(part, backend, engines, third, progress):
                rows.append(row)
    return {
        "command": "accuracy",
        "complete": not stopped,
        "seconds": round(time.monotonic() - start, 1),
        "options": {"backend": backend, "engines": list(engines), "part": part, "third": third},
        "machine": environment(),
        **lists,
    }


def _count(part: str, third: bool) -> int:
    """Rows an engine of one part."""
    if part == "upstream":
        return len(upstream.ROWS)
    if part == "wide":
        return sum(p.rows for p in wide.parts())
    return len(grid.cases(third=third))


def _rows(part: str, backend: str, engines, third: bool, progress: Progress) -> Iterator[dict[str, Any]]:
    ops = host_operations() if backend == "host" else grid.Operations()
    if part == "grid":
        yield from grid.run(grid.cases(third=third), engines, backend, progress=progress, ops=ops)
    elif part == "wide":
        for one in wide.parts():
            progress.at(one.title)
            yield from ({**row, "part": one.title} for row in one.run(engines, backend, progress))
    else:
        for row in upstream.run(engines, backend):
            progress.step()
            yield row


def host_operations() -> grid.Operations:
    """Our operations on the checkout's executor of Metal kernels: ``tests/msl_host/ops.py``.

    Raises:
        UserError: no checkout, or an executor without these operations.
    """
    folder = host_folder()
    file = folder / "ops.py" if folder else None
    if file is None or not file.is_file():
        raise UserError("--backend host: the executor of this checkout has no operations to measure (tests/msl_host/ops.py)")
    sys.path.insert(0, str(folder.parent))
    module = importlib.import_module("msl_host.ops")
    return grid.Operations(*(getattr(module, name) for name in grid.Operations._fields))


# -- judging ------------------------------------------------------------------------------------


def summary(value: dict[str, Any]) -> list[dict[str, Any]]:
    """One row an engine and kind of path: worst ratio, its bound, bad rows, unequal repeats, routes."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in value["cases"]:
        kind = "control" if row["path"].startswith("control") else row["path"].split("_")[0]
        groups.setdefault((row["engine"], kind), []).append(row)
    return [
        {
            "engine": engine,
            "kind": kind,
            "cases": len(rows),
            "worst_ratio": max(row["ratio"] for row in rows),
            "bound": grid.BOUNDS.get(kind) if engine == "qwen_metal" else None,
            "bad_rows": sum(row["bad_rows"] for row in rows),
            "unequal": sum(not row["repeat_equal"] for row in rows),
            "routes": sorted({row["route"] for row in rows}),
        }
        for (engine, kind), rows in groups.items()
    ]


def failures(value: dict[str, Any]) -> list[dict[str, Any]]:
    """Cases of ours, served by a fast route, that miss their bound, have a bad row or differ when repeated."""
    return [
        row
        for row in value["cases"]
        if row["engine"] == "qwen_metal"
        and "stock" not in row["route"]
        and not (
            row["ratio"] <= grid.BOUNDS.get(row["path"].split("_")[0], float("inf"))
            and row["bad_rows"] == 0
            and row["repeat_equal"]
        )
    ]


def compare(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """What changed since an earlier result, to the last digit.

    Returns:
        same: rows with equal figures and output bits. changed: (key, {figure:
        [old, new]}). only_old, only_new: keys. versions: {what: [old, new]}.
    """
    # An engine that was not asked for now is not missing.
    engines = new["options"]["engines"]
    before, after = (
        {_key(row): row for row in [*v["cases"], *v["wide"]] if row["engine"] in engines} for v in (old, new)
    )
    common = [key for key in after if key in before]
    changed = []
    for key in common:
        pair = before[key], after[key]
        figures = {f: [row.get(f) for row in pair] for f in FIGURES}
        figures = {f: both for f, both in figures.items() if both[0] != both[1]}
        # BLAS may sum the float64 reference in another order; equal bits are equal results.
        if pair[0].get("digest") != pair[1].get("digest"):
            changed.append((" ".join(map(str, key)), figures))
    machines = old["machine"], new["machine"]
    versions = {w: [m.get(w) for m in machines] for w in ("mlx", "qwen_metal", "platform", "cpu", "device_name")}
    return {
        "same": len(common) - len(changed),
        "changed": changed,
        "only_old": [" ".join(map(str, key)) for key in before if key not in after],
        "only_new": [" ".join(map(str, key)) for key in after if key not in before],
        "versions": {w: both for w, both in versions.items() if both[0] != both[1]},
    }


def _key(row: dict[str, Any]) -> tuple:
    return tuple(row[k] for k in KEYS)


# -- printing -----------------------------------------------------------------------------------


def tables(value: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, headers and rows of each table of a result."""
    answer = []
    if value["cases"]:
        answer += [_grid_table(value), _summary_table(value)]
    if value["wide"]:
        answer.append(_wide_table(value))
    if value["upstream"]:
        answer.append(_upstream_table(value))
    return answer


def _grid_table(value: dict[str, Any]) -> tuple:
    """Ratios: a line a path and format, a column a shape, input and engine."""
    engines = value["options"]["engines"]
    columns = [(shape, kind, e) for e in engines for shape in grid.SHAPES for kind in grid.INPUTS]
    cells = {(r["path"], _format(r), r["shape"], r["input"], r["engine"]): r for r in value["cases"]}
    costs = {_format(r): r["quantisation_error"] for r in value["cases"]}
    lines = []
    for path, form in dict.fromkeys((r["path"], _format(r)) for r in sorted(value["cases"], key=_by_path)):
        line = [_cell(cells.get((path, form, *column))) for column in columns]
        lines.append([path, form, *line, f"{costs[form]:.1%}"])
    heads = [f"{_SHORT[e]} {shape} {kind}" for shape, kind, e in columns]
    title = "error / floor (float32 control: relative error); * on sampled rows; ! with rows over 10 x"
    return title, ["path", "format", *heads, "quantisation"], lines


_SHORT = {"qwen_metal": "ours", "mlx": "mlx"}


def _by_path(row: dict[str, Any]) -> int:
    return [p.name for p in grid.PATHS].index(row["path"])


def _cell(row: Optional[dict[str, Any]]) -> str:
    if row is None:
        return "-"
    text = f"{row['rel_rmse']:.1e}" if row["dtype"] == "float32" else f"{row['ratio']:.2f}"
    return text + "*" * row["sampled"] + "!" * bool(row["bad_rows"]) + "?" * (not row["repeat_equal"])


def _format(row: dict[str, Any]) -> str:
    if row["group_size"] == 0:
        return row["scheme"]
    return str(grid.Scheme(row["scheme"], row["bits"], row["group_size"]))


def _summary_table(value: dict[str, Any]) -> tuple:
    lines = [
        [
            _SHORT[s["engine"]],
            s["kind"],
            str(s["cases"]),
            f"{s['worst_ratio']:.4f}",
            "-" if s["bound"] is None else f"{s['bound']:.2f}",
            str(s["bad_rows"]),
            "all" if not s["unequal"] else f"all but {s['unequal']}",
            "; ".join(s["routes"]),
        ]
        for s in summary(value)
    ]
    heads = ["engine", "paths", "cases", "worst ratio", "bound", "rows over 10 x", "bit-equal twice", "route"]
    return f"{len(value['cases'])} cases in {value['seconds']:.0f} s", heads, lines


def _wide_table(value: dict[str, Any]) -> tuple:
    lines = [
        [
            r["part"],
            r["path"],
            _format(r),
            r["shape"],
            r["input"],
            r["dtype"],
            _SHORT[r["engine"]],
            f"{r['ratio']:.4f}" + "*" * r["sampled"],
            f"{r['rel_rmse']:.2e}",
            f"{r['mean_error']:+.1e}",
            "-" if r["quantisation_error"] is None else f"{r['quantisation_error']:.1%}",
            f"{r['bad_rows']} of {r['rows']}",
            "yes" if r["repeat_equal"] else "no",
            r["route"],
        ]
        for r in value["wide"]
    ]
    heads = [
        "part", "path", "format", "shape", "input", "dtype", "engine", "ratio", "relative", "mean",
        "quantisation", "rows over 10 x", "bit-equal", "route",
    ]  # fmt: skip
    return "beyond the published grid; * on sampled rows; float32: ratio to bfloat16's floor", heads, lines


def _upstream_table(value: dict[str, Any]) -> tuple:
    lines = [
        [
            str(r["rows"]),
            _SHORT[r["engine"]],
            f"{r['q_rmse']:.6g}",
            f"{r['q_rmse'] / r['q_floor']:.2f}",
            f"{r['g_rmse']:.6g}",
            f"{r['g_rmse'] / r['g_floor']:.2f}",
            r["route"],
        ]
        for r in value["upstream"]
    ]
    heads = ["M", "engine", "q_rmse", "q / floor", "g_rmse", "g / floor", "route"]
    return "upstream reproduction: dense (q) and gathered (g)", heads, lines


def comparison_lines(answer: dict[str, Any]) -> list[str]:
    """A comparison in words."""
    lines = [f"{what}: {old} -> {new}" for what, (old, new) in answer["versions"].items()]
    for key, figures in answer["changed"]:
        parts = [f"{name} {old!r} -> {new!r}" for name, (old, new) in figures.items()]
        lines.append(f"{key}: " + ", ".join(parts))
    lines += [f"only in the old result: {key}" for key in answer["only_old"]]
    lines += [f"only in the new result: {key}" for key in answer["only_new"]]
    lines.append(f"{answer['same']} rows equal to the last bit, {len(answer['changed'])} changed")
    return lines


def draw(value: dict[str, Any], file: Path) -> None:
    """The grid's ratios as a heat map, one panel an engine, in a PNG file."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    paths = [p.name for p in grid.PATHS if p.name != "control_float32"]
    rows = [(shape, kind) for shape in grid.SHAPES for kind in grid.INPUTS]
    forms = list(dict.fromkeys(_format(r) for r in value["cases"]))
    cells = {(r["engine"], r["path"], _format(r), r["shape"], r["input"]): r["ratio"] for r in value["cases"]}
    engines = list(dict.fromkeys(r["engine"] for r in value["cases"]))
    figure = Figure(figsize=(3 + 1.1 * len(paths), 1.5 + 0.32 * len(engines) * len(forms) * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, engine in zip(figure.subplots(len(engines), 1, squeeze=False)[:, 0], engines):
        labels = [f"{form}  {shape} {kind}" for form in forms for shape, kind in rows]
        lines = [(form, *row) for form in forms for row in rows]
        ratios = np.array([[cells.get((engine, path, *line), np.nan) for path in paths] for line in lines])
        image = axes.imshow(np.clip(ratios, 1, None), norm=LogNorm(1, 32), cmap="YlOrRd", aspect="auto")
        axes.set_xticks(range(len(paths)), paths, rotation=20)
        axes.set_yticks(range(len(labels)), labels, fontsize=7)
        axes.set_title(f"{_SHORT[engine]}: error / floor")
        for i, j in np.ndindex(ratios.shape):
            if np.isfinite(ratios[i, j]):
                colour = "white" if ratios[i, j] > 12 else "black"
                axes.text(j, i, f"{ratios[i, j]:.2f}", ha="center", va="center", fontsize=7, color=colour)
        figure.colorbar(image, ax=axes)
    about = value["machine"]
    figure.suptitle(f"backend {value['options']['backend']}, {about['cpu']}, mlx {about['mlx']}")
    figure.savefig(file, format="png", dpi=120)
