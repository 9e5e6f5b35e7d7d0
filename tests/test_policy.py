"""``Policy``: every mechanism is a named value that is checked, and none can silently do nothing."""

import copy
import dataclasses
import pickle

import pytest

import qwen_metal
from qwen_metal.policy import BACKENDS, Policy

FIELDS = dataclasses.fields(Policy)


@pytest.mark.parametrize("field", FIELDS, ids=lambda f: f.name)
def test_each_field_is_described(field):
    meta = field.metadata
    assert field.default in meta["values"] and len(meta["values"]) > 1
    assert len(set(map(repr, meta["values"]))) == len(meta["values"])
    assert meta["meaning"] and set(meta["on"]) <= set(BACKENDS)
    if meta["control"] is not None:
        assert meta["control"] in meta["values"]
    number = isinstance(field.default, int) and not isinstance(field.default, bool)
    assert bool(meta["unit"]) == number, "numbers have a unit, names have none"


@pytest.mark.parametrize("field", FIELDS, ids=lambda f: f.name)
def test_each_value_is_taken_in_each_form(field):
    for value in field.metadata["values"]:
        want = Policy(**{field.name: value})
        assert getattr(want, field.name) == value
        assert Policy.of({field.name: value}) == Policy.of(f"{field.name}={value}") == want
        assert want.changed() == ({} if value == field.default else {field.name: value})


@pytest.mark.parametrize("field", FIELDS, ids=lambda f: f.name)
@pytest.mark.parametrize("value", [-1, "nonsense", 3.5, None, [1]])
def test_a_value_outside_its_list_is_refused(field, value):
    with pytest.raises(ValueError, match=f"Policy: {field.name} is .*, supported are ") as error:
        Policy(**{field.name: value})
    assert repr(field.default) in str(error.value) and "\n" not in str(error.value)


def test_true_is_not_one():
    with pytest.raises(ValueError, match="buffers_in_flight is True"):
        Policy(buffers_in_flight=True)
    with pytest.raises(ValueError, match="fuse_gate_up is 1"):
        Policy(fuse_gate_up=1)


@pytest.mark.parametrize("text, message", [
    ("tile=3", "unknown field 'tile', supported are kernels, numerics"),
    ("tile_rows", "'tile_rows' is not of the form field=value"),
    ("tile_rows=x", "tile_rows is 'x'"),
    ("fuse_gate_up=maybe", "fuse_gate_up is 'maybe'"),
    ("prefill_chunk=-64", "prefill_chunk is -64"),
    ("=3", "unknown field ''"),
])
def test_text_that_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Policy.of(text)


def test_text_of_several_fields():
    assert Policy.of(" tile_rows = 32 , routing=host,fuse_gate_up=False,") == Policy(
        tile_rows=32, routing="host", fuse_gate_up=False
    )
    assert Policy.of("") == Policy.of(None) == Policy() == qwen_metal.Policy()


def test_another_type_is_refused():
    with pytest.raises(ValueError, match="got int, supported are a Policy"):
        Policy.of(3)


def test_it_is_frozen_hashable_and_copies():
    policy = Policy(tile_rows=32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.tile_rows = 16
    assert {policy: 1}[Policy(tile_rows=32)] == 1
    assert copy.deepcopy(policy) == pickle.loads(pickle.dumps(policy)) == policy


def test_the_table_has_a_row_a_field():
    rows = Policy.table()
    assert [r["name"] for r in rows] == [f.name for f in FIELDS]
    assert all({"default", "values", "unit", "control", "on", "meaning"} <= set(r) for r in rows)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("field", FIELDS, ids=lambda f: f.name)
def test_a_change_that_does_nothing_is_named(field, backend):
    for value in field.metadata["values"]:
        why = Policy(**{field.name: value}).inactive(backend)
        active = value == field.default or backend in field.metadata["on"]
        assert (why is None) == active
        if why:
            assert field.name in why and backend in why
