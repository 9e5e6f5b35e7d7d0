"""The embedded demo model: 24 M parameters in the Qwen3.5-MoE architecture, 4-bit.

It exists so that every command runs without a download; README.md here says what it is.
"""

import pathlib


def path() -> pathlib.Path:
    """Folder of the packaged checkpoint, ready for `mlx_lm.load(str(path()))`."""
    return pathlib.Path(__file__).parent


def heldout() -> str:
    """About 30 KB of documentation prose that the model was not trained on."""
    return (path() / "heldout.txt").read_text(encoding="utf-8")
