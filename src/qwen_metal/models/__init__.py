"""Wiring: which operation stands where in a decoder. One file a block, no arithmetic.

A block is accelerated by giving its module a subclass of its own class, so the
module object, its parameters and their names stay what mlx-lm made them.
"""
