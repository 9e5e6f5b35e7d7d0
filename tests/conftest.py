"""Fixtures for every test. Set before any import of transformers: a test never asks the network for a model."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import pytest  # noqa: E402


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: not part of `make test`; run by `make test-slow`")


@pytest.fixture(scope="session")
def demo_path():
    """The folder of the embedded demo model."""
    import qwen_metal.demo

    return qwen_metal.demo.path()


@pytest.fixture
def seed():
    """Seeds mlx and numpy, and gives the number."""
    import mlx.core as mx
    import numpy as np

    value = 20261005
    mx.random.seed(value)
    np.random.seed(value)
    return value
