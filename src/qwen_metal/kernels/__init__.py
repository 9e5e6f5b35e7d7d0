"""Launchers: the compiled CPU kernels, and where the kernel text lives."""
