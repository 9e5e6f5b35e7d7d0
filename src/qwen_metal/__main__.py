"""``python -m qwen_metal``: the same as the ``qwen-metal`` command."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
