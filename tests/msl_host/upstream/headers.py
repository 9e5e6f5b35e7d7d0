"""Where MLX's kernel headers come from: the installed wheel, and an older macOS wheel."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ..build import cache_folder
from ..metal_kernel import mlx_headers

OLD_VERSION = "0.32.3"
_PLATFORM = "macosx_26_0_arm64"
KERNELS = "mlx/backend/metal/kernels/"


def installed():
    """Include folder of the installed mlx."""
    return mlx_headers()


def old():
    """Include folder of mlx 0.32.3's macOS wheel, fetched by pip at first use; None if that fails.

    The first call needs the package index; afterwards the folder in the user's cache serves.
    """
    folder = cache_folder() / f"mlx-metal-{OLD_VERSION}"
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory(dir=cache_folder()) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
                   "--platform", _PLATFORM, "--python-version", "3.11", "-d", temporary,
                   f"mlx-metal=={OLD_VERSION}"]  # fmt: skip
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=90)
        except (subprocess.SubprocessError, OSError):
            return None
        _unpack(next(Path(temporary).glob("*.whl")), Path(temporary) / "include")
        try:
            (Path(temporary) / "include").rename(folder)
        except OSError:  # another process was faster
            pass
    return folder


def _unpack(wheel, folder):
    prefix = "mlx/include/"
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.startswith(prefix + KERNELS) or name.endswith("/"):
                continue
            target = folder / name[len(prefix) :]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(name))


def source(*names):
    """Metal text that includes MLX's utilities and the named kernel headers."""
    return "".join(f'#include "{KERNELS}{name}"\n' for name in ("utils.h", *names))
