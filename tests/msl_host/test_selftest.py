"""The self-test fails where a row falls short, says so, and writes what it measured."""

import json

import pytest

from msl_host import build, selftest
from msl_host.upstream import headers
from msl_host.upstream.instantiations import ALL, KNOWN_FAILURES
from msl_host.upstream.rows import Row


@pytest.mark.parametrize(
    ("row", "ok", "strain"),
    [
        (Row("g", "in range", 6.0, "", 5.0, 9.0), True, 0.5),
        (Row("g", "below", 4.0, "", 5.0, 9.0), False, 1.5),
        (Row("g", "over", 1.02, "", None, 1.01, ideal=1.0), False, 2.0),
        (Row("g", "exact", 3, "", 3, 3), True, 0.0),
        (Row("g", "not exact", 2, "", 3, 3), False, 1.0),
        (Row("g", "too few", 23, "", 24, None), False, 0.0),
        (Row("g", "not a number", float("nan"), "", None, 1.0), False, float("nan")),
        (Row("g", "shown", 99.0, ""), True, 0.0),
    ],
)
def test_rows_are_judged(row, ok, strain):
    assert row.ok is ok
    assert row.strain == pytest.approx(strain, nan_ok=True)


def _run(monkeypatch, tmp_path, rows, old=lambda: None):
    monkeypatch.setattr(selftest, "measure", lambda: iter(rows))
    monkeypatch.setattr(headers, "old", old)
    path = tmp_path / "out" / "selftest.json"
    status = selftest.main(["--json", str(path)])
    return status, json.loads(path.read_text())


def test_exit_status_and_json(monkeypatch, tmp_path, capsys):
    good, bad = Row("g", "good", 1.0, "<= 2", None, 2.0), Row("g", "bad", 3.0, "<= 2", None, 2.0)
    status, written = _run(monkeypatch, tmp_path, [good])
    assert status == 0 and (written["total"], written["failed"]) == (1, 0)
    output = capsys.readouterr().out
    assert "LEFT OUT" in output and output.splitlines()[-1].startswith("msl-selftest: 1 of 1 rows")
    status, written = _run(monkeypatch, tmp_path, [good, bad])
    assert status == 1 and written["failed"] == 1 and written["worst"].startswith("g: bad")
    assert [row["ok"] for row in written["rows"]] == [True, False]
    assert "SHORT" in capsys.readouterr().out


def test_without_a_compiler(monkeypatch, capsys):
    monkeypatch.setattr(build, "_wheel", lambda: None)
    monkeypatch.setattr(build, "_debian", lambda name="clang-19": None)
    monkeypatch.delenv("MSL_HOST_COMPILER", raising=False)
    assert selftest.main([]) == 2
    assert capsys.readouterr().out.count("\n") == 1


def test_the_sweep_is_large_enough_and_names_its_failures():
    assert len(ALL) - len(KNOWN_FAILURES) >= 36
    assert set(KNOWN_FAILURES) <= {entry.name for entry in ALL}
