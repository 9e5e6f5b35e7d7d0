"""How the command line is run in these tests: inside this process, or as the user's process."""

import shutil
from dataclasses import dataclass

import mlx.core as mx
import pytest
from cli.running import popen_command, stop
from mlx_lm.utils import load_model, save_model

from qwen_metal import cli, routes


@dataclass
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one line of a refusal; fails where there is any other output."""
        assert self.status == cli.BAD_INPUT, (self.status, self.err)
        assert self.out == ""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("qwen-metal: error: ")
        return lines[0]


@pytest.fixture
def run(capsys):
    """``run(*arguments)``: the command in this process."""

    def call(*arguments):
        capsys.readouterr()
        status = cli.main([str(a) for a in arguments])
        return Ended(status, *capsys.readouterr())

    yield call
    routes(reset=True)


@pytest.fixture
def process():
    """``process(*arguments, **popen)``: the command as a process of its own, ended with the test."""
    started = []

    def start(*arguments, **popen):
        child = popen_command(*arguments, **popen)
        started.append(child)
        return child

    yield start
    for child in started:
        stop(child)


@pytest.fixture(scope="session")
def quick(demo_path, tmp_path_factory):
    """A folder with the demo model in float32, which MLX on a CPU runs several times faster."""
    folder = tmp_path_factory.mktemp("quick")
    model, _ = load_model(demo_path)
    model.set_dtype(mx.float32)
    save_model(folder, model)
    for file in demo_path.glob("*"):
        if file.suffix in (".json", ".jinja") and not (folder / file.name).exists():
            shutil.copy(file, folder)
    return folder
