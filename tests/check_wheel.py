"""`make test-wheel`: the wheel as a user gets it, in a new environment outside the checkout.

    python tests/check_wheel.py dist/qwen_metal-*.whl build/test-wheel.json [extras]

Runs the tests, `generate` and `bench` there, then takes the extension away and runs them again. One line a step,
one summary line last; logs in build/test-wheel/. Exit status 1 when a step failed.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]

# Run first and after the extension is taken away: where the package comes from, and whether it has one.
WHERE = """
import sys, pathlib, qwen_metal
from qwen_metal import extension
checkout, expect = sys.argv[1:]
place = pathlib.Path(qwen_metal.__file__).resolve()
assert place.is_relative_to(pathlib.Path(sys.prefix).resolve()), place
assert not any(pathlib.Path(p or ".").resolve().is_relative_to(checkout) for p in sys.path), sys.path
found = extension.status()
assert found.available == (expect == "present"), found.reason
print("extension " + (found.reason or "for mlx " + found.mlx_version))
"""


class Steps:
    def __init__(self, logs):
        self.logs = logs
        self.rows = []
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "QWEN_METAL_", "VIRTUAL_ENV"))}
        self.env["PYTHONNOUSERSITE"] = "1"

    def run(self, name, command, cwd, limit=1200, silent=False):
        """One step: a row with its time and the last line that it printed."""
        print(f"test-wheel: {name} ...", end=" ", flush=True)
        log = self.logs / f"{name.replace(' ', '-')}.log"
        start = time.monotonic()
        with log.open("w") as out:
            try:
                status = subprocess.run(
                    command, cwd=cwd, env=self.env, stdout=out, stderr=subprocess.STDOUT, timeout=limit
                ).returncode
            except subprocess.TimeoutExpired:
                status = f"no end after {limit} s"
        seconds = round(time.monotonic() - start, 1)
        text = log.read_text(errors="replace").strip()
        ok = status == 0 and (silent or bool(text))  # a command that says nothing has shown nothing
        detail = text.splitlines()[-1].strip() if text and not silent else ""
        self.rows.append({"name": name, "ok": ok, "status": status, "seconds": seconds, "detail": detail})
        print(f"{'ok' if ok else f'FAILED ({status}; {log})'}  {seconds} s  {detail[:100]}", flush=True)
        return ok


def main(wheel, report, extras):
    wheel, report = Path(wheel).resolve(), Path(report).resolve()
    logs = report.with_suffix("")
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    steps = Steps(logs)
    with tempfile.TemporaryDirectory(prefix="qwen-metal-wheel-") as folder:
        run_all(steps, wheel, Path(folder).resolve(), extras)

    failed = [row for row in steps.rows if not row["ok"]]
    worst = max(failed or steps.rows, key=lambda row: row["seconds"])["name"]
    result = {"total": len(steps.rows), "failed": len(failed), "worst": worst, "wheel": wheel.name, "rows": steps.rows}
    report.write_text(json.dumps(result, indent=1) + "\n")
    names = ": " + ", ".join(row["name"] for row in failed) if failed else ""
    print(f"test-wheel: {len(steps.rows)} steps, {len(failed)} failed{names} ({report})")
    return 1 if failed else 0


def run_all(steps, wheel, folder, extras):
    work = folder / "work"
    shutil.copytree(CHECKOUT / "tests", work / "tests", ignore=shutil.ignore_patterns("__pycache__", ".*"))
    shutil.copy(CHECKOUT / "pyproject.toml", work)  # pytest's settings; there is no source here
    python = folder / "venv" / "bin" / "python"
    command = folder / "venv" / "bin" / "qwen-metal"

    if not steps.run("install venv", [sys.executable, "-m", "venv", folder / "venv"], work, silent=True):
        return
    requirements = [f"qwen-metal[{extras}] @ {wheel.as_uri()}", f"mlx=={mlx_here()}"]
    if not steps.run("install wheel", [python, "-m", "pip", "install", "-q", *requirements], work, silent=True):
        return

    def round_(expect):
        after = "" if expect == "present" else " without extension"
        steps.run(f"place{after}", [python, "-c", WHERE, CHECKOUT, expect], work)
        steps.run(f"tests{after}", [python, "-m", "pytest", "-q", "-rs", "-m", "not slow"], work)
        steps.run(f"generate{after}", [command, "generate", "--prompt", "Once upon a time", "--max-tokens", "16"], work)
        steps.run(f"bench{after}", [command, "bench"], work)

    round_("present")
    for file in (folder / "venv").glob("lib/python*/site-packages/qwen_metal/_ext.*.so"):
        file.unlink()
    round_("absent")


def mlx_here():
    from importlib.metadata import version

    return version("mlx")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3], sys.argv[3] if len(sys.argv) > 3 else "test"))
