"""The accuracy grid: its metric, its reference, what it catches, and the bounds it must meet."""

import importlib.util
import json
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest

from qwen_metal import extension
from qwen_metal.evidence import accuracy, common, grid, upstream, wide
from qwen_metal.evidence.grid import Case, Path, Scheme, Sizes

TINY = Sizes(hidden=256, inner=128, experts=4, top_k=2)
KEYS = {
    "path", "scheme", "bits", "group_size", "shape", "input", "dtype", "backend", "engine", "ratio",
    "rel_rmse", "mean_error", "bad_rows", "repeat_equal", "sampled",
}  # fmt: skip


@pytest.fixture(autouse=True)
def on_cpu():
    with common.on_device(mx.cpu):
        yield


# -- the metric ---------------------------------------------------------------------------------


def test_the_floor_itself_is_one():
    want = np.random.default_rng(0).standard_normal((5, 400))
    row = common.errors(common.rounded(want, mx.bfloat16), want, mx.bfloat16)
    assert row["ratio"] == 1.0 and row["bad_rows"] == 0 and row["rows"] == 5
    assert 1.5e-3 < row["rel_rmse"] < 1.8e-3  # REFERENCE of the published test: about 1.65e-3


def test_an_exact_result_is_zero_and_a_nan_is_a_bad_row():
    want = np.random.default_rng(0).standard_normal((3, 40))
    assert common.errors(want, want, mx.bfloat16)["ratio"] == 0.0
    broken = want.copy()
    broken[1, 7] = np.nan
    assert common.errors(broken, want, mx.bfloat16)["bad_rows"] == 1


def test_a_bad_row_and_a_shift_are_seen():
    want = np.random.default_rng(0).standard_normal((4, 400))
    got = common.rounded(want, mx.bfloat16)
    got[2] += 0.1
    row = common.errors(got, want, mx.bfloat16)
    assert row["bad_rows"] == 1
    assert row["mean_error"] == pytest.approx(0.025, rel=0.1)


# -- the list -----------------------------------------------------------------------------------


def test_160_cases_in_both_engines():
    cases = grid.cases()
    assert len(set(cases)) == len(cases) == 160
    assert Counter(c.path.name for c in cases) == {p.name: 20 for p in grid.PATHS}


def test_a_third_meets_everything():
    third = grid.cases(third=True)
    assert 53 <= len(third) <= 54
    for pick in (lambda c: c.scheme, lambda c: (c.path.name, c.scheme), lambda c: (c.path.name, c.shape, c.input)):
        assert {pick(c) for c in third} == {pick(c) for c in grid.cases()}


# -- the reference ------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", grid.SCHEMES, ids=str)
def test_a_pack_reshaped_is_what_mlx_packs_of_the_other_shape(scheme):
    base = grid.base_weights(TINY)
    pack = grid.Pack(base, scheme, TINY)
    form = dict(group_size=scheme.group_size, bits=scheme.bits, mode=scheme.mode)
    for shape in grid.SHAPES:
        arrays = mx.quantize(base.reshape(TINY.experts, *TINY.of(shape)), **form)
        matrix = pack.matrix(shape)
        assert all(mx.array_equal(a, b) for a, b in zip(arrays, (matrix.weight, matrix.scales, matrix.biases)))


@pytest.mark.parametrize("path", [p for p in grid.PATHS if p.rows < 10], ids=lambda p: p.name)
@pytest.mark.parametrize("shape", grid.SHAPES)
def test_float32_stock_agrees_with_the_reference(path, shape):
    # The reference is numpy's; MLX in float32 is another computation of the same meaning.
    path = Path(path.name, path.kind, path.rows, mx.float32)
    case = Case(Scheme("affine", 3, 64), shape, "normal", path)
    for row in rows_of([case]):
        assert row["rel_rmse"] < 1e-6, row


def test_selection_is_exact():
    picked = grid.selection(2, 128, 192).dequantised()
    assert mx.array_equal(picked[1], mx.eye(128, 192))
    column = grid.selection(2, 128, 192, picks=191).dequantised()
    assert column[0, :, 191].sum().item() == column[0].sum().item() == 128


def rows_of(cases, engines=grid.ENGINES, sizes=TINY, **options):
    return list(grid.run(cases, engines, "cpu", sizes, **options))


# -- what it catches ----------------------------------------------------------------------------


def test_a_bfloat16_activation_sum_is_caught():
    # MLX issue 4631: the sum that multiplies the affine bias was added in bf16.
    def wrong(x, matrices):
        (m,) = matrices
        exact = x.astype(mx.float32) @ m.dequantised().T
        sums = x.astype(mx.float32).reshape(len(x), -1, m.group_size).sum(axis=-1)
        lost = (sums.astype(mx.bfloat16).astype(mx.float32) - sums) @ m.biases.astype(mx.float32).T
        return [(exact + lost).astype(x.dtype)]

    cases = [Case(Scheme("affine", 4, 64), "gate_up", "pos", grid.PATHS[3])]
    (row,) = rows_of(cases, ["qwen_metal"], ops=grid.Operations(projections=wrong))
    assert row["ratio"] > 1.05
    assert judged([{**row, "route": "cpu"}])


def test_a_wrong_expert_is_caught():
    def wrong(x, matrices, plan):
        return grid.grouped_qmm.grouped_qmm(x, [grid.rolled(m) for m in matrices], plan)

    cases = [Case(Scheme("affine", 8, 64), "down", "normal", Path("prompt_450", "prompt", 9))]
    (row,) = rows_of(cases, ["qwen_metal"], ops=grid.Operations(grouped_qmm=wrong))
    assert row["bad_rows"] == row["rows"]


def test_a_result_that_changes_is_caught():
    calls = []

    def wrong(x, matrices):
        calls.append(1)
        return [x @ matrices[0].dequantised(x.dtype).T + len(calls)]

    cases = [Case(Scheme("affine", 8, 64), "down", "normal", grid.PATHS[3])]
    (row,) = rows_of(cases, ["qwen_metal"], ops=grid.Operations(projections=wrong))
    assert not row["repeat_equal"] and judged([{**row, "route": "cpu"}])


def judged(rows):
    return accuracy.failures({"cases": rows})


# -- the bounds ---------------------------------------------------------------------------------


@pytest.mark.skipif(not extension.status().available, reason="no CPU kernels: their bounds cannot be tested")
@pytest.mark.timeout(600)
def test_a_third_of_the_published_grid_meets_its_bounds():
    rows = list(grid.run(grid.cases(third=True), ["qwen_metal"], "cpu"))
    assert {row["route"] for row in rows} == {"cpu"}
    assert not judged(rows)
    assert all(row["rel_rmse"] < 1e-6 for row in rows if row["path"] == "control_float32")
    assert not any(row["sampled"] for row in rows)


@pytest.mark.skipif(extension.status().available, reason="with CPU kernels the published sizes are tested")
def test_without_kernels_a_small_grid_is_stock_and_says_so():
    rows = rows_of(grid.cases(third=True), ["qwen_metal"])
    assert all(row["route"].startswith("stock (") for row in rows)
    assert all(row["sampled"] == row["path"].endswith("_450") for row in rows)
    assert all(row["rel_rmse"] < 1e-6 for row in rows if row["path"] == "control_float32")
    assert all(row["repeat_equal"] for row in rows)


def test_sampled_rows_are_rows_of_the_whole():
    case = Case(Scheme("affine", 4, 64), "down", "normal", Path("prompt_450", "prompt", 20, mx.float32))
    pack = grid.Pack(grid.base_weights(TINY), case.scheme, TINY)
    one = grid.problem(case, TINY, mx.float32, None)
    sample = one.sample()
    assert len(sample) == grid.SAMPLED_ROWS
    for engine in grid.ENGINES:
        whole, part = one.run(engine, pack, None), one.run(engine, pack, sample)
        assert common.rms(np.array(whole)[sample] - np.array(part)) < 1e-5


# -- the other lists ----------------------------------------------------------------------------


def test_upstream_shows_every_m():
    rows = list(upstream.run(["qwen_metal", "mlx"], "cpu"))
    assert [r["rows"] for r in rows if r["engine"] == "mlx"] == list(upstream.ROWS)
    if extension.status().available:
        for row in rows:
            if row["engine"] == "qwen_metal":
                assert row["q_rmse"] / row["q_floor"] <= 1.05 and row["g_rmse"] / row["g_floor"] <= 1.05


class Silent:
    """Progress that nobody sees, and a count."""

    done = 0

    def at(self, text):
        pass

    def step(self):
        self.done += 1


def test_wide_attention_recurrence_and_compiled_calls(monkeypatch):
    monkeypatch.setattr(wide, "STEPS", 96)
    monkeypatch.setattr(wide, "CONTEXTS", (1, 257))
    progress = Silent()
    rows = [
        row
        for part in (wide.attention, wide.recurrence, wide.compiled)
        for row in part(["qwen_metal"], "cpu", progress)
    ]
    assert progress.done == len(rows) == 3 * 2 + 3 + 4 + 4
    for row in rows:
        assert np.isfinite(row["ratio"]) and row["repeat_equal"], row
        if row["route"] == "cpu":
            assert row["ratio"] <= 1.05, row


def test_wide_counts_its_rows():
    names = [part.title for part in wide.parts()]
    assert len(set(names)) == len(names)
    first = wide._of_grid("formats", grid.cases((Scheme("nvfp4", 4, 16), Scheme("affine", 5, 32)), wide.PATHS[:1]), TINY)
    progress = Silent()
    rows = list(first.run(["qwen_metal", "mlx"], "cpu", progress))
    assert progress.done == len(rows) == 2 * first.rows


# -- the command --------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """The command at sizes of a second."""
    run = grid.run
    cases = [c for c in grid.cases(grid.SCHEMES[:2]) if c.path.rows < 10]
    monkeypatch.setattr(grid, "cases", lambda **_: cases)
    monkeypatch.setattr(
        grid, "run", lambda wanted, engines, name, **rest: run(wanted, engines, name, TINY, **rest)
    )
    return cases


def test_json_markdown_and_heat_map(small, command, tmp_path):
    pytest.importorskip("matplotlib")
    files = [tmp_path / f"a.{end}" for end in ("json", "md", "png")]
    arguments = [x for pair in zip(("--json", "--markdown", "--plot"), files) for x in pair]
    ended = command("accuracy", "--backend", "cpu", *arguments)
    value = json.loads(files[0].read_text())
    common.check_result("accuracy", value)
    assert value["complete"] and len(value["cases"]) == 2 * len(small)
    assert all(KEYS <= set(row) for row in value["cases"])
    assert ended.status == int(bool(accuracy.failures(value)))
    assert files[1].read_text().startswith("**") and "| generation_1 |" in ended.out
    assert files[2].read_bytes().startswith(b"\x89PNG")


def test_compare_to_the_last_bit(small, command, tmp_path):
    old = tmp_path / "old.json"
    command("accuracy", "--backend", "cpu", "--json", old)
    ended = command("accuracy", "--backend", "cpu", "--compare", old)
    assert "rows equal to the last bit, 0 changed" in ended.out
    value = json.loads(old.read_text())
    value["cases"][0].update(digest="0", ratio=value["cases"][0]["ratio"] + 1e-9)
    del value["cases"][1]
    old.write_text(json.dumps(value))
    ended = command("accuracy", "--backend", "cpu", "--compare", old)
    assert ended.status == 1
    assert ", 1 changed" in ended.out and "only in the new result" in ended.out


def test_ctrl_c_keeps_what_is_done(small, command, tmp_path, monkeypatch):
    measure, calls = grid.measure, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(grid, "measure", interrupted)
    file = tmp_path / "a.json"
    ended = command("accuracy", "--backend", "cpu", "--json", file)
    value = json.loads(file.read_text())
    assert ended.status == 130 and not value["complete"] and len(value["cases"]) == 3
    assert "3 of " in ended.err and "rows are kept" in ended.err
    assert "| generation_1 |" in ended.out


@pytest.mark.parametrize("backend", ["metal", "cuda"])
def test_a_device_that_is_not_there(backend, command):
    if getattr(mx, backend).is_available():
        pytest.skip(f"{backend} is here")
    assert f"--backend {backend}: this machine has no" in command("accuracy", "--backend", backend).complaint


def test_host_needs_a_checkout(command, monkeypatch):
    monkeypatch.setattr(common, "host_folder", lambda: None)
    assert "--backend host: only a checkout" in command("accuracy", "--backend", "host").complaint


def test_files_are_checked_before_the_work(command, tmp_path, monkeypatch):
    monkeypatch.setattr(grid, "run", None)  # the work would fail otherwise
    for option in ("--json", "--markdown", "--plot"):
        end = ".png" if option == "--plot" else ""
        assert "cannot be written" in command("accuracy", option, tmp_path / "no" / f"f{end}").complaint
        assert "is a folder" in command("accuracy", "--json", tmp_path).complaint
    assert "No space left" in command("accuracy", "--json", "/dev/full").complaint
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name, *a))
    assert "matplotlib is missing" in command("accuracy", "--plot", tmp_path / "a.png").complaint


def test_an_old_result_is_checked_before_the_work(command, tmp_path, monkeypatch):
    monkeypatch.setattr(grid, "run", None)
    file = tmp_path / "old.json"
    assert "No such file" in command("accuracy", "--compare", file).complaint
    for text, words in (("{", "is no JSON"), ("[]", "no result of qwen-metal accuracy"), ('{"command": "agree"}', "no result")):
        file.write_text(text)
        assert words in command("accuracy", "--compare", file).complaint


def test_options_that_do_not_go_together(command, tmp_path):
    assert "not allowed with" in command("accuracy", "--wide", "--upstream").complaint
    pytest.importorskip("matplotlib")
    assert "does not go with --wide" in command("accuracy", "--wide", "--plot", tmp_path / "a.png").complaint
