"""Where the kernel text is: metal/ beside src/ in a checkout, qwen_metal/metal in a wheel."""

from pathlib import Path


def metal_dir() -> Path:
    """The folder with the kernel headers; FileNotFoundError when neither place has it."""
    here = Path(__file__).resolve()
    for folder in (here.parents[1] / "metal", here.parents[3] / "metal"):
        if (folder / "README.md").is_file():
            return folder
    raise FileNotFoundError(f"no kernel text beside {here.parents[1]}; reinstall qwen-metal")
