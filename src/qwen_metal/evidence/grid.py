"""The accuracy grid: random weights through ``mx.quantize``, and each path's operation against float64.

The published test's shapes, inputs and formats. Its list of cases is not
published; our reading of its 160 is 5 formats x 2 shapes x 2 inputs x 8 paths.
"""

from __future__ import annotations

import hashlib
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Callable, Iterator, NamedTuple, Optional, Sequence

import mlx.core as mx
import numpy as np

from ..ops import grouped_qmm, moe_decode, projections
from ..ops.matrix import Matrix, gather_matmul, matmul
from ..ops.moe_decode import MAX_ROWS, Experts
from ..ops.route_plan import route_plan
from ..routes import separate
from .common import errors, float64, on_device, rms, route_of, same_bits

SEED = 20261005

#: Standard deviation of the weights.
SPREAD = 0.02

#: Rows of a case that a slow engine computes only in part.
SAMPLED_ROWS = 8

#: silu(x) = x to float32 and beyond: a gate of this value hands the other factor on, times itself.
OPEN_GATE = 32.0

ENGINES = ("qwen_metal", "mlx")


class Operations(NamedTuple):
    """Our operations that the grid measures."""

    projections: Callable = projections.projections
    grouped_qmm: Callable = grouped_qmm.grouped_qmm
    moe_decode: Callable = moe_decode.moe_decode


@dataclass(frozen=True)
class Scheme:
    """A format of quantised weights."""

    mode: str
    bits: int
    group_size: int

    def __str__(self) -> str:
        bits = f" {self.bits}-bit" if self.mode == "affine" else ""
        return f"{self.mode}{bits} g{self.group_size}"


@dataclass(frozen=True)
class Sizes:
    """Shapes of the experts: gate and up (inner, hidden), down (hidden, inner)."""

    hidden: int = 5120
    inner: int = 2304
    experts: int = 16
    top_k: int = 6

    def of(self, shape: str) -> tuple[int, int]:
        """Outputs N and inputs K of shape ``gate_up`` or ``down``."""
        return (self.inner, self.hidden) if shape == "gate_up" else (self.hidden, self.inner)


@dataclass(frozen=True)
class Path:
    """One way through the library: its operation, rows, and where it departs from the rest."""

    name: str
    kind: str
    rows: int
    dtype: Optional[mx.Dtype] = None
    on_cpu: bool = False


SCHEMES = (
    Scheme("affine", 2, 64),
    Scheme("affine", 3, 64),
    Scheme("affine", 4, 64),
    Scheme("affine", 8, 64),
    Scheme("mxfp4", 4, 32),
)
SHAPES = ("gate_up", "down")
INPUTS = ("normal", "pos")
PATHS = (
    Path("generation_1", "generation", 1),
    Path("generation_8", "generation", 8),
    Path("prompt_450", "prompt", 450),
    Path("dense_1", "dense", 1),
    Path("dense_6", "dense", 6),
    Path("dense_450", "dense", 450),
    Path("control_float32", "generation", 8, dtype=mx.float32),
    Path("control_cpu", "generation", 1, on_cpu=True),
)

#: Bounds on the ratio of ours, by the first word of the path's name.
BOUNDS = {"generation": 1.01, "prompt": 1.05, "dense": 1.05}


@dataclass(frozen=True)
class Case:
    """One cell of the grid, for either engine."""

    scheme: Scheme
    shape: str
    input: str
    path: Path

    def key(self) -> str:
        """Names the inputs: every scheme gets the same ones."""
        return f"{self.shape} {self.input} {self.path.name}"


def cases(
    schemes: Sequence[Scheme] = SCHEMES, paths: Sequence[Path] = PATHS, third: bool = False
) -> list[Case]:
    """All cells; with ``third`` a fixed third that meets every format, shape, input and path."""
    answer = [
        (i + j + k + n, Case(scheme, shape, kind, path))
        for i, scheme in enumerate(schemes)
        for j, shape in enumerate(SHAPES)
        for k, kind in enumerate(INPUTS)
        for n, path in enumerate(paths)
    ]
    return [case for number, case in answer if not third or number % 3 == 0]


# -- weights ------------------------------------------------------------------------------------


def base_weights(sizes: Sizes, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    """N(0, 0.02) weights (experts, inner, hidden) in ``dtype``."""
    def one(expert: int) -> np.ndarray:
        random = np.random.Generator(np.random.SFC64([SEED, expert]))
        return random.standard_normal((sizes.inner, sizes.hidden), np.float32) * np.float32(SPREAD)

    parts = []
    with ThreadPoolExecutor(2) as pool:
        for values in pool.map(one, range(sizes.experts)):
            parts.append(mx.array(values).astype(dtype))
            mx.eval(parts[-1])
    return mx.stack(parts)


class Pack:
    """The experts' weights in one format, seen as either shape.

    Both shapes have the same elements in the same order, and groups run along
    it, so one pack serves both: reshaped, not computed twice.
    """

    def __init__(self, base: mx.array, scheme: Scheme, sizes: Sizes):
        self.base, self.scheme, self.sizes = base, scheme, sizes
        self.arrays = _quantise(base, scheme)
        mx.eval(self.arrays)

    def matrix(self, shape: str) -> Matrix:
        """(experts, N, K) of ``gate_up`` or ``down``."""
        experts, (rows, _) = self.sizes.experts, self.sizes.of(shape)
        weight, scales, *biases = (a.reshape(experts, rows, -1) for a in self.arrays)
        scheme = self.scheme
        return Matrix(
            weight,
            scales,
            biases[0] if biases else None,
            group_size=scheme.group_size,
            bits=scheme.bits,
            mode=scheme.mode,
        )

    def exact(self, experts: Sequence[int]) -> Iterator[np.ndarray]:
        """Each expert's dequantised weights in float64, flat; the next ones' are computed meanwhile.

        All in one buffer: what was yielded is overwritten by what comes next.
        """
        lazy = [mx.flatten(one_expert(self.matrix("gate_up"), e).dequantised()) for e in experts]
        buffer = np.empty(self.sizes.inner * self.sizes.hidden)
        for number in range(len(lazy)):
            mx.async_eval(lazy[number : number + 2])
            np.copyto(buffer, np.asarray(lazy[number]))
            lazy[number] = None
            yield buffer

    def before(self, expert: int) -> np.ndarray:
        """An expert's weights before quantisation in float64, flat."""
        return float64(self.base[expert]).reshape(-1)


def _quantise(base: mx.array, scheme: Scheme) -> list[mx.array]:
    """``mx.quantize`` of all experts, two at a time on two streams: on a CPU one stream is one core.

    Not all at once: mxfp4's intermediate arrays are 8 times the weights.
    """
    form = dict(group_size=scheme.group_size, bits=scheme.bits, mode=scheme.mode)
    streams = [mx.new_stream(mx.default_device()) for _ in range(2)]
    parts = []
    for first in range(0, len(base), 2):
        pair = [mx.quantize(w, **form, stream=s) for w, s in zip(base[first : first + 2], streams)]
        mx.eval(pair)
        parts += pair
    return [mx.stack(arrays) for arrays in zip(*parts)]


def one_expert(m: Matrix, expert: int) -> Matrix:
    """A single expert's matrix (N, K)."""
    return m._replace(
        weight=m.weight[expert],
        scales=m.scales[expert],
        biases=None if m.biases is None else m.biases[expert],
    )


def rolled(m: Matrix) -> Matrix:
    """The next expert's matrix in each expert's place: an ``up`` for a given ``gate``."""
    def roll(a):
        return None if a is None else mx.roll(a, -1, axis=0)

    return m._replace(weight=roll(m.weight), scales=roll(m.scales), biases=roll(m.biases))


def selection(experts: int, rows: int, columns: int, picks: Optional[int] = None) -> Matrix:
    """Exact 0-1 weights: output n is input n, or input ``picks`` for every n.

    8-bit affine, of which code 127 is exactly 0 and code 255 exactly 1. Codes
    about the middle of their range, as those of real weights: a kernel may
    subtract the middle, and far from it that would cost digits.
    """
    codes = np.full((rows, columns), 127, np.uint8)
    if picks is None:
        np.fill_diagonal(codes, 255)
    else:
        codes[:, picks] = 255
    weight = mx.array(codes.view(np.uint32))
    groups = (experts, rows, columns // 64)
    return Matrix(
        mx.contiguous(mx.broadcast_to(weight, (experts, *weight.shape))),
        mx.full(groups, 1 / 128, mx.bfloat16),
        mx.full(groups, -127 / 128, mx.bfloat16),
        group_size=64,
        bits=8,
        mode="affine",
    )


class Frames:
    """The exact matrices that let the fused MoE operation show one of its two stages alone."""

    def __init__(self, sizes: Sizes):
        experts, hidden, inner = sizes.experts, sizes.hidden, sizes.inner
        self.down = selection(experts, hidden, inner)
        self.up = selection(experts, inner, hidden)
        self.gate = selection(experts, inner, hidden, picks=hidden - 1)


# -- the three kinds of case --------------------------------------------------------------------


class Problem:
    """A case with its inputs: what each engine runs, and what float64 says.

    ``requests`` are products ``x @ W[id].T`` of rows (R, K) and ids (R,), to be
    computed in float64; ``want(engine, products)`` makes the reference of them.
    """

    op = ""

    def __init__(self, case: Case, sizes: Sizes, dtype: mx.Dtype, ops: Operations = Operations()):
        self.case, self.sizes, self.ops = case, sizes, ops
        self.dtype = case.path.dtype or dtype
        self.random = np.random.default_rng([SEED, zlib.crc32(case.key().encode())])
        columns = sizes.of(case.shape)[1]
        values = self.random.standard_normal((case.path.rows, columns), np.float32)
        if case.input == "pos":
            values = np.abs(values)
        self.x = mx.array(values).astype(self.dtype)

    def requests(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Products to be had in float64."""
        raise NotImplementedError

    def want(self, engine: str, products: list[np.ndarray]) -> np.ndarray:
        """The float64 reference (R, N) of an engine's output."""
        return products[0]

    def run(self, engine: str, pack: Pack, sample: Optional[np.ndarray]) -> mx.array:
        """The engine's output (R, N), or its rows ``sample``."""
        raise NotImplementedError

    def reason(self, pack: Pack) -> Optional[str]:
        """None, or why no fast route of ours serves the case here."""
        raise NotImplementedError

    def sample(self) -> np.ndarray:
        """Some rows of the reference, spread over all of it; all where there are few."""
        rows = self.case.path.rows * (1 if self.case.path.kind == "dense" else self.sizes.top_k)
        return np.linspace(0, rows - 1, min(rows, SAMPLED_ROWS)).astype(int)


class Dense(Problem):
    """Rows through one matrix: ``projections``; stock's ``quantized_matmul``."""

    op = "projections"

    def requests(self):
        x = float64(self.x)
        return [(x, np.zeros(len(x), int))]

    def run(self, engine, pack, sample):
        x = self.x if sample is None else self.x[mx.array(sample)]
        matrix = one_expert(pack.matrix(self.case.shape), 0)
        return self.ops.projections(x, [matrix])[0] if engine == "qwen_metal" else matmul(x, matrix, "match")

    def reason(self, pack):
        return projections.supported(self.x, [one_expert(pack.matrix(self.case.shape), 0)])


class Routed(Problem):
    """Rows that each go to ``top_k`` of the experts."""

    def __init__(self, case, sizes, dtype, ops=Operations()):
        super().__init__(case, sizes, dtype, ops)
        chosen = self.random.random((case.path.rows, sizes.experts)).argsort(axis=-1)
        self.ids = chosen[:, : sizes.top_k].astype(np.uint32)

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Row and expert of each pair."""
        return np.repeat(np.arange(len(self.ids)), self.sizes.top_k), self.ids.reshape(-1)


class Prompt(Routed):
    """Many rows, sorted by expert: ``grouped_qmm``; stock's ``gather_qmm``."""

    op = "grouped_qmm"

    def sorted_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Row and expert of each pair, in the order of the experts."""
        rows, ids = self.pairs()
        order = np.argsort(ids, kind="stable")
        return rows[order], ids[order]

    def requests(self):
        rows, ids = self.sorted_pairs()
        return [(float64(self.x)[rows], ids)]

    def run(self, engine, pack, sample):
        matrix = pack.matrix(self.case.shape)
        if engine == "qwen_metal" and sample is None:
            plan = route_plan(mx.array(self.ids), self.sizes.experts)
            return self.ops.grouped_qmm(self.x, (matrix,), plan)
        rows, ids = (mx.array(a if sample is None else a[sample]) for a in self.sorted_pairs())
        if engine == "mlx":
            return gather_matmul(self.x[rows][:, None], matrix, ids, "match", True)[:, 0]
        plan = route_plan(ids[:, None], self.sizes.experts)
        return self.ops.grouped_qmm(self.x[rows], (matrix,), plan)

    def reason(self, pack):
        plan = route_plan(mx.array(self.ids), self.sizes.experts)
        return grouped_qmm.supported(self.x, (pack.matrix(self.case.shape),), plan)


class Generation(Routed):
    """1 to 8 rows, unsorted: the whole of ``moe_decode``; stock's ``gather_qmm``.

    Ours is one operation, so one of its two stages is made exact. ``gate_up``:
    the down matrices hand the activation silu(gate x) * (up x) on. ``down``:
    the gate is open and the up matrices hand the input on. What is compared is
    the operation's output, the score-weighted sum over the experts.
    """

    op = "moe_decode"

    def __init__(self, case, sizes, dtype, frames: Frames, ops=Operations()):
        super().__init__(case, sizes, dtype, ops)
        if case.path.rows > MAX_ROWS:
            raise ValueError(f"{case.path.name}: moe_decode serves up to {MAX_ROWS} rows")
        self.frames = frames
        scores = self.random.random(self.ids.shape, np.float32) + np.float32(0.1)
        self.scores = scores / scores.sum(axis=-1, keepdims=True)

    def requests(self):
        rows, ids = self.pairs()
        x = float64(self.x)[rows]
        if self.case.shape == "down":
            return [(x, ids)]
        return [(x, ids), (x, (ids + 1) % self.sizes.experts)]

    def want(self, engine, products):
        if engine == "mlx":
            return products[0]
        if self.case.shape == "down":
            activation = OPEN_GATE * products[0]
        else:
            gate, up = products
            activation = gate / (1 + np.exp(-gate)) * up
        pairs = activation.reshape(*self.ids.shape, -1)
        return np.einsum("rkn,rk->rn", pairs, self.scores.astype(np.float64))

    def run(self, engine, pack, sample):
        if engine == "mlx":
            x = self.x[:, None, None]
            y = gather_matmul(x, pack.matrix(self.case.shape), mx.array(self.ids), "match")
            return y.reshape(-1, y.shape[-1])
        x, experts = self.arguments(pack)
        y = self.ops.moe_decode(x, experts, mx.array(self.ids), mx.array(self.scores))
        return y[:, : self.sizes.of(self.case.shape)[0]]

    def arguments(self, pack: Pack) -> tuple[mx.array, Experts]:
        """Rows and experts of our operation."""
        matrix, frames = pack.matrix(self.case.shape), self.frames
        if self.case.shape == "gate_up":
            return self.x, Experts(matrix, rolled(matrix), frames.down)
        width = self.sizes.hidden - self.sizes.inner
        gate = mx.zeros((len(self.ids), width), self.dtype)
        gate[:, -1] = OPEN_GATE
        return mx.concatenate([self.x, gate], axis=1), Experts(frames.gate, frames.up, matrix)

    def reason(self, pack):
        x, experts = self.arguments(pack)
        return moe_decode.supported(x, experts, mx.array(self.ids), mx.array(self.scores))


def problem(
    case: Case, sizes: Sizes, dtype: mx.Dtype, frames: Optional[Frames], ops: Operations = Operations()
) -> Problem:
    """The case with its inputs."""
    if case.path.kind == "generation":
        return Generation(case, sizes, dtype, frames, ops)
    return (Dense if case.path.kind == "dense" else Prompt)(case, sizes, dtype, ops)


# -- float64 ------------------------------------------------------------------------------------


def products(pack: Pack, problems: Sequence[Problem]) -> list[list[np.ndarray]]:
    """Every problem's requests in float64: expert by expert, so one is in memory at a time."""
    asked = [problem.requests() for problem in problems]
    stacks = [_Stack(pack.sizes, shape, problems, asked) for shape in SHAPES]
    experts = range(pack.sizes.experts)
    for expert, weights in zip(experts, pack.exact(experts)):
        for stack in stacks:
            stack.multiply(expert, weights)
    answer: list[list] = [[None] * len(one) for one in asked]
    for stack in stacks:
        stack.hand_out(answer)
    return answer


class _Stack:
    """All requests of one shape under each other: one product an expert, not one a case."""

    def __init__(self, sizes: Sizes, shape: str, problems: Sequence[Problem], asked: list):
        self.shape = sizes.of(shape)
        self.places = [
            (i, j) for i, p in enumerate(problems) if p.case.shape == shape for j in range(len(asked[i]))
        ]
        parts = [asked[i][j] for i, j in self.places]
        self.lengths = [len(ids) for _, ids in parts]
        self.rows = np.concatenate([np.empty((0, self.shape[1])), *(rows for rows, _ in parts)])
        self.ids = np.concatenate([np.empty(0, int), *(ids for _, ids in parts)])
        self.out = np.empty((len(self.ids), self.shape[0]))

    def multiply(self, expert: int, weights: np.ndarray) -> None:
        """The rows of this expert times its flat weights."""
        mine = np.flatnonzero(self.ids == expert)
        if mine.size:
            self.out[mine] = self.rows[mine] @ weights.reshape(self.shape).T

    def hand_out(self, answer: list[list]) -> None:
        """Each request's products to its place."""
        ends = np.cumsum(self.lengths)
        for (i, j), end, length in zip(self.places, ends, self.lengths):
            answer[i][j] = self.out[end - length : end]


def quantisation_errors(pack: Pack, dtype: mx.Dtype) -> dict[tuple[str, str], float]:
    """RMS of x (Wq - W) over RMS of x W, of 6 rows, by shape and input: what the format costs."""
    answer, weights = {}, (pack.before(0), *pack.exact([0]))
    for shape in SHAPES:
        before, after = (w.reshape(pack.sizes.of(shape)) for w in weights)
        for kind in INPUTS:
            path = Path("dense_6", "dense", 6)
            x = float64(Dense(Case(pack.scheme, shape, kind, path), pack.sizes, dtype).x)
            answer[shape, kind] = float(rms(x @ (after - before).T) / rms(x @ before.T))
    return answer


# -- measuring ----------------------------------------------------------------------------------


def measure(
    problem: Problem, engine: str, pack: Pack, values: list[np.ndarray], name: str
) -> dict[str, Any]:
    """One row of the result: the case, run twice, against float64.

    Args:
        values: the problem's products in float64.
        name: the backend.
    """
    case = problem.case
    with on_device(mx.cpu if case.path.on_cpu else None), separate() as counts:
        slow = engine == "mlx" or problem.reason(pack) is not None
        few = slow and mx.default_device() == mx.cpu and case.path.rows > MAX_ROWS
        sample = problem.sample() if few else None
        # A reason may have asked for a plan; only the case itself is to be counted.
        counts(reset=True)
        first, second = twice(lambda: problem.run(engine, pack, sample), apart=slow)
        route = route_of(counts(), problem.op) if engine == "qwen_metal" else "mlx"
        equal, digest = same_bits(first, second), digest_of(first)
        got = float64(first.astype(problem.dtype))
    want = problem.want(engine, values)
    want = want if sample is None else want[sample]
    floor = problem.dtype if problem.dtype != mx.float32 else mx.bfloat16
    return {
        **describe(case, problem.dtype, name, engine),
        **errors(got, want, floor),
        "repeat_equal": equal,
        "sampled": sample is not None,
        "digest": digest,
        "op": problem.op if engine == "qwen_metal" else _STOCK[case.path.kind],
        "route": route,
    }


def twice(run: Callable[[], mx.array], apart: bool = False) -> tuple[mx.array, mx.array]:
    """The results of two runs.

    Args:
        apart: on a CPU, run them side by side on two streams: MLX's own
            operations use one core each.
    """
    if not apart or mx.default_device() != mx.cpu:
        first = run()
        mx.eval(first)
        second = run()
        mx.eval(second)
        return first, second
    results = []
    for _ in range(2):
        with mx.stream(mx.new_stream(mx.cpu)):
            results.append(run())
    mx.eval(results)
    return results[0], results[1]


def digest_of(x: mx.array) -> str:
    """A short hash of an array's bits: what two machines or versions can compare to the last one."""
    bits = np.ascontiguousarray(np.array(x.view({4: mx.uint32, 2: mx.uint16}[x.dtype.size])))
    return hashlib.sha256(bits.tobytes()).hexdigest()[:16]


_STOCK = {"dense": "quantized_matmul", "prompt": "gather_qmm", "generation": "gather_qmm"}


def describe(case: Case, dtype: mx.Dtype, name: str, engine: str) -> dict[str, Any]:
    """The keys that say which case a row is."""
    return {
        "path": case.path.name,
        "scheme": case.scheme.mode,
        "bits": case.scheme.bits,
        "group_size": case.scheme.group_size,
        "shape": case.shape,
        "input": case.input,
        "dtype": str(dtype).rpartition(".")[2],
        "backend": "cpu" if case.path.on_cpu else name,
        "engine": engine,
    }


def run(
    wanted: Sequence[Case],
    engines: Sequence[str],
    name: str,
    sizes: Sizes = Sizes(),
    dtype: mx.Dtype = mx.bfloat16,
    progress: Any = None,
    ops: Operations = Operations(),
) -> Iterator[dict[str, Any]]:
    """Rows of the result, format by format, ours before MLX's.

    Args:
        wanted: cases, of any number of formats.
        engines: of ``ENGINES``.
        name: the backend, for the rows.
        progress: told of each case; see ``common.Progress``.
        ops: our operations, where not the library's own.
    """
    _at(progress, "random weights")
    base = base_weights(sizes, dtype)
    ours = "qwen_metal" in engines and any(c.path.kind == "generation" for c in wanted)
    frames = Frames(sizes) if ours else None
    for scheme in dict.fromkeys(case.scheme for case in wanted):
        _at(progress, f"{scheme}: mx.quantize")
        pack = Pack(base, scheme, sizes)
        problems = [problem(c, sizes, dtype, frames, ops) for c in wanted if c.scheme == scheme]
        _at(progress, f"{scheme}: float64 reference")
        costs = quantisation_errors(pack, dtype)
        values = products(pack, problems)
        for engine in engines:
            for one, value in zip(problems, values):
                _at(progress, f"{scheme}: {one.case.key()}, {engine}")
                row = measure(one, engine, pack, value, name)
                row["quantisation_error"] = costs[one.case.shape, one.case.input]
                if progress is not None:
                    progress.step()
                yield row


def _at(progress: Any, text: str) -> None:
    if progress is not None:
        progress.at(text)
