"""The two routes every model-level test runs on, and pairs of a stock and an accelerated model."""

import mlx.core as mx
import mlx_lm
import pytest
from models.agree import Route
from models.tiny import CONFIGS, tiny

import qwen_metal
from qwen_metal import extension

STOCK, AUTO = Route("kernels=stock", exact=True), Route("", exact=False)
# Without the compiled extension both are one path: each operation falls back to what mlx-lm computes.
ROUTES = {"stock": STOCK, "auto": AUTO} if extension.load() else {"stock": Route("", exact=True)}


@pytest.fixture(params=ROUTES)
def route(request) -> Route:
    """``stock``: bit-equal to mlx-lm. ``auto``: the fastest route of this machine, float32 to 1e-5."""
    return ROUTES[request.param]


@pytest.fixture(params=CONFIGS)
def family(request) -> str:
    """Each of the four families."""
    return request.param


@pytest.fixture
def pair(route):
    """``pair(family, ...)``: a tiny stock model and the same one accelerated by the route's policy."""

    def make(family, **settings):
        return tiny(family, **settings), qwen_metal.accelerate(tiny(family, **settings), route.policy)

    return make


@pytest.fixture(scope="session")
def demo_stock(demo_path):
    """The embedded model in float32, by mlx-lm: (model, tokenizer)."""
    model, tokenizer = mlx_lm.load(str(demo_path))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model, tokenizer


@pytest.fixture
def demo(demo_path, route):
    """The embedded model in float32, accelerated by the route's policy."""
    model, _ = qwen_metal.load(str(demo_path), policy=route.policy)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model
