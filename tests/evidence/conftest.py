"""How the evidence commands are run in these tests: inside this process, through the whole command line."""

from dataclasses import dataclass

import mlx.core as mx
import pytest

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
        assert self.status == 2, (self.status, self.err)
        assert self.out == ""
        assert len(self.err.splitlines()) == 1, self.err
        return self.err.strip()


@pytest.fixture
def command(capsys):
    """``command(*arguments)``: the command in this process; the default device is left as it was."""
    device = mx.default_device()

    def call(*arguments):
        capsys.readouterr()
        status = cli.main([str(a) for a in arguments])
        return Ended(status, *capsys.readouterr())

    yield call
    mx.set_default_device(device)
    routes(reset=True)
