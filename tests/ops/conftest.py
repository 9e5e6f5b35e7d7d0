"""The op tests run where the extension is built; ``isa`` runs one with each instruction set."""

import sys
from pathlib import Path

import pytest

from qwen_metal import extension

sys.path.insert(0, str(Path(__file__).parent))  # float64.py, sequence64.py and the cases beside it

EXT = extension.load()


@pytest.fixture(autouse=True)
def needs_extension():
    if EXT is None:
        pytest.skip(extension.status().reason)


@pytest.fixture(params=EXT.isas() if EXT else ["none"])
def isa(request):
    """Each instruction set that was compiled in and can run here."""
    EXT.set_isa(request.param)
    yield request.param
    EXT.set_isa("")
