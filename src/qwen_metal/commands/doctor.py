"""``qwen-metal doctor``: what is installed, what runs here, and what is in the way."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from typing import Any

import mlx.core as mx

from .. import demo, loader
from ..cachedir import cache_dir, cache_path
from ..evidence.bench import environment
from ..policy import Policy
from ..routes import fast_share
from . import memory
from .common import add_json_option, backend
from .output import gigabytes, one_line, routes_line, routes_lines, say, write_json


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "doctor",
        help="versions, backends, routes and known trouble",
        description="Report what is installed, what runs on this machine, and known trouble.",
    )
    parser.add_argument("--no-warmup", action="store_true", help="do not run the demo model")
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Report; status 2 where the cache folder cannot be written, 1 where the demo does not run."""
    report = examine(warm_up=not args.no_warmup)
    show(report)
    if args.json:
        write_json(args.json, report)
    if error := report["cache"]["error"]:
        say(f"error: {error}")
        return 2
    if report["warmup"]["error"]:
        say(f"error: the demo model does not run: {report['warmup']['error']}")
        return 1
    return 0


def examine(warm_up: bool) -> dict[str, Any]:
    """Everything that the report holds."""
    about = environment()
    limit, what = memory.capacity()
    report = {
        **about,
        "backends": {
            "cpu": True,
            "metal": mx.metal.is_available(),
            "cuda": hasattr(mx, "cuda") and mx.cuda.is_available(),
        },
        "backend": backend(),
        "memory": {"bytes": limit, "set_by": what},
        "policy": policy_rows(),
        "cache": cache_state(),
        "warmup": warmed() if warm_up else {"ran": False, "routes": {}, "error": ""},
    }
    return {**report, "trouble": trouble(report)}


def policy_rows() -> list[dict[str, Any]]:
    """The policy's fields, with whether this machine's backend acts on each."""
    keep = ("name", "default", "values", "unit", "control", "on", "meaning")
    return [
        {**{key: row[key] for key in keep}, "acts_here": backend() in row["on"]}
        for row in Policy.table()
    ]


def cache_state() -> dict[str, str]:
    """The cache folder, and why it cannot be written, if so."""
    try:
        return {"path": str(cache_dir()), "error": ""}
    except OSError as error:
        return {"path": str(cache_path()), "error": one_line(error)}


def warmed() -> dict[str, Any]:
    """Routes of a short run of the demo model."""
    say("running the demo model once; --no-warmup skips it")
    try:
        model, _ = loader.load(str(demo.path()))
        return {"ran": True, "routes": loader.warmup(model), "error": ""}
    except Exception as error:  # whatever it is, it belongs into the report
        return {"ran": False, "routes": {}, "error": f"{type(error).__name__}: {one_line(error)}"}


def trouble(report: dict[str, Any]) -> list[str]:
    """Known trouble on this machine, one line each."""
    found = []
    status, counts = report["extension"], report["warmup"]["routes"]
    if not status["available"]:
        found.append(f"the compiled extension is not used: {status['reason']}")
    if report["backend"] == "cpu":
        found.append("MLX runs on the CPU, where its bf16 is several times slower than its float32")
        # MLX compiles fused element-wise operations on Linux with the system's compiler.
        if sys.platform == "linux" and not shutil.which("g++"):
            found.append("g++ is missing, which MLX needs on the CPU; install it, or MLX_DISABLE_COMPILE=1")
    if counts and fast_share(counts) == 0:
        found.append("no fused kernel ran in the warm-up: stock code served every operation")
    if report["cache"]["error"]:
        found.append(report["cache"]["error"])
    if report["warmup"]["error"]:
        found.append(f"the demo model does not run: {report['warmup']['error']}")
    for name in ("MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"):
        if name in os.environ:
            found.append(f"{name}={os.environ[name]} changes speed; compare only runs under the same value")
    return found


def show(report: dict[str, Any]) -> None:
    """The report as text on stdout."""
    status = report["extension"]
    built = f"built for mlx {status['mlx_version']}" if status["mlx_version"] else ""
    state = "used" if status["available"] else f"not used: {status['reason']}"
    cache = report["cache"]
    there = [name for name, here in report["backends"].items() if here]
    rows = {
        "qwen-metal": report["qwen_metal"],
        "mlx": report["mlx"],
        "mlx-lm": report["mlx_lm"],
        "transformers": report["transformers"],
        "python": report["python"],
        "platform": report["platform"],
        "processor": f"{report['cpu']}, {report['cores']} cores ({report['threads']} usable)",
        "instruction sets": ", ".join(report["instruction_sets"]) or "unknown without the extension",
        "extension": ", ".join(filter(None, (state, built))),
        "backend": f"{report['backend']} (there are: {', '.join(there)})",
        "device": f"{report['device']}, {report['device_name']}",
        "memory": f"{gigabytes(report['memory']['bytes'])} ({report['memory']['set_by']})",
        "cache folder": cache["path"] + (", cannot be written" if cache["error"] else ", can be written"),
    }
    for name, value in rows.items():
        print(f"{name:<17} {value}")
    for name, value in report["settings"].items():
        print(f"{name} = {value}")
    print(f"\npolicy (* = acted on by this version on {report['backend']})")
    for row in report["policy"]:
        values = "|".join(map(str, row["values"]))
        mark = "*" if row["acts_here"] else " "
        print(f" {mark} {row['name']} = {row['default']}  [{values}]  {row['meaning']}")
    if report["warmup"]["ran"]:
        print(f"\nwarm-up of the demo model, {routes_line(report['warmup']['routes'])}")
        for line in routes_lines(report["warmup"]["routes"]):
            print(f"   {line}")
    print("\nknown trouble" if report["trouble"] else "\nknown trouble: none")
    for line in report["trouble"]:
        print(f" - {line}")
    sys.stdout.flush()
