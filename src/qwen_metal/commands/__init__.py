"""One file a command, each with ``add(subparsers)`` and ``run(args)``.

``common.py`` holds the options and checks they share, ``memory.py`` what a
model needs against what the machine has, ``output.py`` how things are said.
"""
