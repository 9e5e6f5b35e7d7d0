"""Each check is needed: with one of them taken out of the runtime, its seeded defects are no longer found.

And the other way round: some parts are there to keep quiet about legal kernels.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from msl_host import build
from msl_host.cases import DEFECTS, LEGAL

# What is changed: file, text, its replacement; and the cases that must then come out wrong.
MUTATIONS = {
    "bounds of buffers": (
        "check.c",
        "if (is_outside(buffer, offset, size)) device_out_of_bounds(address, size, is_write, pc);",
        "if (is_outside(buffer, offset, size)) return ignored_shadow;",
        ["device_write_past_end", "ragged_store"],
    ),
    "bounds of threadgroup arrays": (
        "check.c",
        "if (!slot) threadgroup_out_of_bounds(offset, size, is_write, pc);",
        "if (!slot) return ignored_shadow;",
        ["threadgroup_write_past_end", "threadgroup_read_past_end"],
    ),
    "room between threadgroup arrays": (
        "runtime.c",
        "(group->memory_used + GAP + 15)",
        "(group->memory_used + 64 + 15)",
        ["index_into_other_array"],
    ),
    "functions that have returned": (
        "check.c",
        "if (address < (uintptr_t)__builtin_frame_address(0))",
        "if (0)",
        ["returned_variable"],
    ),
    "calls that lead to a barrier": (
        "runtime.c",
        "fiber->calls != first->calls || ",
        "",
        ["barrier_two_callers"],
    ),
    "writes to inputs": (
        "check.c",
        "if (is_write) add_finding(\"write-to-input\"",
        "if (0) add_finding(\"write-to-input\"",
        ["write_to_input"],
    ),
    "reads of what was never written": (
        "check.c",
        "if (!cells->shadow[i]) continue;\n    add_finding(at->space",
        "if (1) continue;\n    add_finding(at->space",
        ["uninitialised_threadgroup", "uninitialised_output"],
    ),
    "uninitialised values that are stored": (
        "check.c",
        "if (!store->shadow[i]) continue;",
        "if (1) continue;",
        ["uninitialised_private", "uninitialised_private_array", "uninitialised_through_simd"],
    ),
    "uninitialised values that decide": (
        "check.c",
        "if (current) add_finding(\"uninitialised-private\", CALLER, \"uses",
        "if (0) add_finding(\"uninitialised-private\", CALLER, \"uses",
        ["uninitialised_branch"],
    ),
    "shadow through SIMD operations": (
        "simd.c",
        "if (launch.checked) memcpy(find_shadow((uintptr_t)to, size), find_shadow((uintptr_t)from, size), size);",
        "",
        ["uninitialised_through_simd"],
    ),
    "reading after an unordered write": (
        "check.c",
        "if (!raced && write_is_unordered(",
        "if (0 && write_is_unordered(",
        ["barrier_mem_none", "read_other_threadgroup", "atomic_flag_without_fence", "atomic_and_plain",
         "last_threadgroup_without_fence", "barrier_wrong_space"],
    ),
    "writing after an unordered read": (
        "check.c",
        "if (reader && write_races_reader(reader, cells->flags[i] & READERS, at->space))",
        "if (0)",
        ["missing_second_barrier", "loop_reuse", "missing_barrier"],
    ),
    "several readers in one SIMD-group": (
        "check.c",
        "return thread_of(last) == current->thread ? readers : READ_BY_SIMD;",
        "return 0;",
        ["many_readers_simd"],
    ),
    "several readers in a threadgroup": (
        "check.c",
        "if (!same_simdgroup(last)) return READ_BY_GROUP;",
        "if (!same_simdgroup(last)) return 0;",
        ["many_readers_group"],
    ),
    "writing after an unordered write": (
        "check.c",
        "current->store.overlaps = true;",
        "current->store.overlaps = false;",
        ["two_threadgroups_one_cell", "two_threads_one_cell"],
    ),
    "flags of barriers": (
        "runtime.c",
        "if (mem_flags & MEM_THREADGROUP) times",
        "if (1) times",
        ["barrier_mem_none"],
    ),
    "flags of barriers, device": (
        "runtime.c",
        "if (mem_flags & MEM_DEVICE) times",
        "if (1) times",
        ["barrier_wrong_space"],
    ),
    "scope of barriers": (
        "runtime.c",
        "advance_times(group->simd_time[simd], flags);",
        "advance_times(group->barrier_time, flags);",
        ["simdgroup_barrier_instead"],
    ),
    "threads that never reach a barrier": (
        "runtime.c",
        "if (finished)\n    add_finding",
        "if (0)\n    add_finding",
        ["early_return", "barrier_in_branch", "barrier_lane_dependent_loop"],
    ),
    "threads at another barrier": (
        "runtime.c",
        "if (other_place) {",
        "if (0) {",
        ["two_barriers"],
    ),
    "lanes that do not take part": (
        "simd.c",
        'add_finding("simd-inactive-lane", current->pc, "reads lane',
        'if (0) add_finding("simd-inactive-lane", current->pc, "reads lane',
        ["shuffle_inactive"],
    ),
    "endless spins": (
        "runtime.c",
        "idle = launch.progress == progress ? idle + 1 : 0;",
        "idle = 0;",
        ["endless_spin", "spin_on_later_threadgroup"],
    ),
    "size of threadgroup memory": (
        "runtime.c",
        "if (total > GROUP_MEMORY_LIMIT)",
        "if (0)",
        ["threadgroup_memory"],
    ),
    "order of atomic operations": ("atomics.c", "if (order != RELAXED)\n", "if (0)\n", ["atomic_acquire"]),
    "uninitialised atomic variables": ("check.c", "if (reads && uninitialised)", "if (0)", ["uninitialised_atomic"]),
    # What keeps quiet about legal kernels.
    "fences order threadgroups": (
        "atomics.c",
        "if (order != RELEASE) acquire();",
        "",
        ["flag_with_fences", "last_threadgroup", "look_back"],
    ),
    "barriers hand on what a thread acquired": (
        "atomics.c",
        "if (order->at_time < group->barrier_time[DEVICE]) return true;",
        "",
        ["flag_with_fences", "last_threadgroup"],
    ),
    "SIMD-group barriers order lanes": (
        "check.c",
        "return same_simdgroup(a) && time_of(a)",
        "return 0 && time_of(a)",
        ["lane_exchange"],
    ),
    "padding in copies": ("check.c", "if (is_copy) return cells->shadow + at->offset;", "", ["struct_copy"]),
}  # fmt: skip

_RUN = """
import json, sys
from msl_host.cases import DEFECTS, LEGAL
found = {}
for name in json.loads(sys.argv[1]):
    case = (LEGAL if name in json.loads(sys.argv[2]) else DEFECTS)[name]
    options = {"time_limit": 5} if "time_limit" not in case.settings else {}
    found[name] = sorted({(f.kind, f.line) for f in case.run(case.kernel(), **options).report})
print(json.dumps(found))
"""


def _findings(names, legal, runtime):
    """(kind, line) of each case in a process of its own, with the runtime in folder `runtime`."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "MSL_HOST_RUNTIME": str(runtime)}
    command = [sys.executable, "-c", _RUN, json.dumps(names), json.dumps(legal)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return {name: {tuple(f) for f in found} for name, found in json.loads(result.stdout).items()}


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_without_the_check_the_case_comes_out_wrong(mutation, tmp_path):
    file, text, replacement, names = MUTATIONS[mutation]
    shutil.copytree(build.HERE / "runtime", tmp_path / "runtime")
    path = tmp_path / "runtime" / file
    source = path.read_text()
    assert source.count(text) == 1, f"{text!r} is not once in {file}"
    path.write_text(source.replace(text, replacement))
    legal = [name for name in names if name not in DEFECTS or mutation in _QUIET]
    found = _findings(names, legal, tmp_path / "runtime")
    for name in names:
        expected = (LEGAL if name in legal else DEFECTS)[name].expected
        assert found[name] != expected, f"{name} came out as before"


# Mutations whose cases are legal kernels of a name that a defect has too.
_QUIET = {"SIMD-group barriers order lanes"}


@pytest.mark.slow
def test_with_every_check_they_come_out_right():
    names = sorted({name for *_, cases in MUTATIONS.values() for name in cases if name in DEFECTS})
    assert _findings(names, [], build.HERE / "runtime") == {name: DEFECTS[name].expected for name in names}
