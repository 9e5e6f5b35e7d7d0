"""The seeded defects and the legal kernels of kernels/, and how to run one.

A kernel file says in its first comment what it shows, in a comment `run:` how it is launched, and in
comments `DEFECT kind ...` which findings belong to that line.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .run import Kernel, Uninitialised

FOLDER = Path(__file__).parent / "kernels"
_DEFAULTS = {"grid": 512, "threadgroup": 128, "n": 512, "size": 512}
_LAUNCH_OPTIONS = ("resident", "time_limit", "threadgroup_bytes")


@dataclass(frozen=True)
class Case:
    """One kernel file. expected: {(kind, line)}, empty for a legal kernel."""

    name: str
    path: Path
    source: str
    settings: dict
    expected: frozenset

    def kernel(self, checked=True, **options):
        """Build it; findings name the file."""
        return Kernel(f'#line 1 "{self.path.name}"\n{self.source}', "k", checked=checked, **options)

    def run(self, kernel, seed=None, **options):
        """Launch it with the buffers that it names."""
        size = self.settings["size"]
        values = {
            "x": np.arange(1, size + 1, dtype=np.float32),
            "n": np.int32(self.settings["n"]),
            "out": Uninitialised((size,), np.float32),
            "scratch": Uninitialised((size,), np.float32),
            "count": np.zeros(8, np.uint32),
        }
        args = {p.name: values[p.name] for p in kernel.parameters if p.kind == "buffer"}
        options = {k: self.settings[k] for k in _LAUNCH_OPTIONS if k in self.settings} | options
        return kernel.run(args, self.settings["grid"], self.settings["threadgroup"], seed, **options)


def _load(path):
    source = path.read_text()
    run = re.search(r"^// run: (.*)$", source, re.M)
    settings = dict(_DEFAULTS)
    for word in run.group(1).split() if run else ():
        name, value = word.split("=")
        settings[name] = float(value) if "." in value else int(value)
    if "threadgroup_bytes" in settings:
        settings["threadgroup_bytes"] = (settings["threadgroup_bytes"],)
    expected = {
        (kind, number)
        for number, line in enumerate(source.split("\n"), 1)
        for kind in (line.split("// DEFECT ")[1].split() if "// DEFECT " in line else ())
    }
    return Case(path.stem, path, source, settings, frozenset(expected))


def _cases(folder):
    return {path.stem: _load(path) for path in sorted((FOLDER / folder).glob("*.metal"))}


DEFECTS = _cases("defects")
LEGAL = _cases("legal")
