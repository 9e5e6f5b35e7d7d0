"""``Policy``: every mechanism and every control of the ablation, as a named value."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Mapping, Optional

#: Backends a field can act on.
BACKENDS = ("cpu", "metal", "cuda")

#: What the wiring itself acts on, whatever the backend.
EVERYWHERE = BACKENDS


def _choice(
    default: Any,
    values: tuple,
    meaning: str,
    unit: str = "",
    control: Any = None,
    on: tuple = (),
) -> Any:
    """A field: its values (the control among them), unit, meaning and backends."""
    metadata = dict(values=values, unit=unit, meaning=meaning, control=control, on=on)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Policy:
    """Which mechanism serves each part of the model.

    Every field has a default, a list of values, a unit where it is a number,
    and, where the published ablation has one, a control: the value to set to
    see what the mechanism is worth. ``Policy.table()`` lists them, with the
    backends on which this version acts on each; a value other than the default
    on a backend that does not act on it is refused by ``accelerate``, so no
    comparison can silently measure nothing.

    Raises:
        ValueError: a value outside the list of its field.
    """

    kernels: str = _choice(
        "auto",
        ("auto", "stock"),
        "fused kernels where supported, or the stock path everywhere",
        control="stock",
        on=EVERYWHERE,
    )
    numerics: str = _choice(
        "precise",
        ("precise", "match"),
        "float32 to each operation's output, or rounded wherever mlx-lm rounds",
        control="match",
        on=EVERYWHERE,
    )
    prefill_chunk: int = _choice(
        2048,
        (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
        "longest piece of a prompt in one pass, state carried across; 0: whole",
        unit="tokens",
        control=0,
        on=EVERYWHERE,
    )
    expert_weights: str = _choice(
        "in_tile",
        ("in_tile", "array"),
        "dequantise inside the grouped GEMM, or expand an array of weights first",
        control="array",
        on=EVERYWHERE,
    )
    routing: str = _choice(
        "device",
        ("device", "host"),
        "routing plan built where the model runs, or read back by the host",
        control="host",
        on=EVERYWHERE,
    )
    tile_rows: int = _choice(
        0,
        (0, 16, 32, 64),
        "rows of a grouped GEMM tile; 0: by rows per expert",
        unit="rows",
        control=16,
    )
    inner_product: str = _choice(
        "auto",
        ("auto", "simdgroup_half", "simdgroup_float", "simdgroup_bfloat", "matmul2d", "exact_codes"),
        "how a dequantised tile is multiplied",
        control="simdgroup_bfloat",
    )
    matrix_units: str = _choice(
        "auto", ("auto", "off"), "use matrix units where a check passed", control="off"
    )
    delta_scan: str = _choice(
        "registers",
        ("registers", "memory", "chunk"),
        "recurrent state in registers, through memory, or by chunks",
        control="memory",
        on=EVERYWHERE,
    )
    delta_step_launches: int = _choice(
        1, (1, 2), "launches of the one-token recurrence", unit="launches", control=2
    )
    single_row: str = _choice(
        "gemv", ("gemv", "gemm"), "matrix product of a single row", control="gemm"
    )
    token_choice: str = _choice(
        "device",
        ("device", "host"),
        "next token handed over on the device, or by way of the host",
        control="host",
    )
    buffers_in_flight: int = _choice(
        2, (1, 2), "command buffers in flight", unit="buffers", control=1
    )
    dispatch: str = _choice(
        "concurrent",
        ("concurrent", "serial"),
        "launches ordered by their dependencies only, or one after another",
        control="serial",
    )
    fuse_gate_up: bool = _choice(
        True,
        (True, False),
        "gate, up and SwiGLU in one launch",
        control=False,
        on=EVERYWHERE,
    )
    fuse_down_combine: bool = _choice(
        True,
        (True, False),
        "down projection, scores, shared expert and residual in one launch",
        control=False,
        on=EVERYWHERE,
    )
    fuse_qk_prepare: bool = _choice(
        True,
        (True, False),
        "query/key norm and RoPE in one launch",
        control=False,
        on=EVERYWHERE,
    )
    fuse_delta_norm: bool = _choice(
        True,
        (True, False),
        "recurrent update and output norm in one launch",
        control=False,
        on=EVERYWHERE,
    )
    kv_reads: str = _choice(
        "coalesced",
        ("coalesced", "strided"),
        "order in which decode attention reads keys and values",
        control="strided",
    )
    heads_per_group: int = _choice(
        4, (1, 2, 4, 8), "query heads packed in a threadgroup", unit="heads", control=1
    )
    attention_layout: str = _choice(
        "auto",
        ("auto", "short", "split", "fixed_blocks"),
        "decode attention layout; auto: by context length",
        control="split",
    )
    fixed_blocks_from: int = _choice(
        32768,
        (8192, 16384, 32768, 65536),
        "context from which auto takes fixed blocks",
        unit="tokens",
        control=65536,
    )
    kv_in_place: bool = _choice(
        False, (True, False), "append keys and values by one in-place launch"
    )
    router: str = _choice(
        "launch",
        ("launch", "folded"),
        "top-k as a launch of its own, or folded into the next one",
        control="folded",
    )
    compile_step: bool = _choice(
        True, (True, False), "decode step compiled once and re-used", control=False
    )
    wide_fusion: bool = _choice(
        False, (True, False), "wider fusion (measured useless by the study)"
    )
    fast_router: bool = _choice(
        False, (True, False), "faster router (measured useless by the study)"
    )
    fuse_head_choice: bool = _choice(
        False, (True, False), "head and token choice in one launch (likewise)"
    )
    max_ops_per_buffer: int = _choice(
        0,
        (0, 40, 50, 200, 1000),
        "MLX_MAX_OPS_PER_BUFFER of a command-line run; 0: MLX's own",
        unit="operations",
        control=0,
    )
    max_mb_per_buffer: int = _choice(
        0,
        (0, 40, 50, 200, 1000),
        "MLX_MAX_MB_PER_BUFFER of a command-line run; 0: MLX's own",
        unit="million elements",
        control=0,
    )

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, values = getattr(self, field.name), field.metadata["values"]
            # True == 1 in Python, so the type is compared too.
            if not any(value == v and type(value) is type(v) for v in values):
                raise ValueError(
                    f"Policy: {field.name} is {value!r}, supported are "
                    + ", ".join(map(repr, values))
                )

    @classmethod
    def of(cls, values: "Policy | Mapping[str, Any] | str | None") -> "Policy":
        """A policy from another, a mapping, or text like ``tile_rows=32,routing=host``.

        Raises:
            ValueError: an unknown field, or a value outside its list.
        """
        if values is None:
            return cls()
        if isinstance(values, Policy):
            return values
        if isinstance(values, str):
            values = dict(_assignment(cls, part) for part in values.split(",") if part)
        if not isinstance(values, Mapping):
            raise ValueError(
                f"policy: got {type(values).__name__}, supported are a Policy, a "
                "mapping of its fields, text like 'tile_rows=32', and None"
            )
        names = [f.name for f in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                raise ValueError(
                    f"Policy: unknown field {name!r}, supported are " + ", ".join(names)
                )
        return cls(**values)

    @classmethod
    def table(cls) -> list[dict]:
        """One row a field: name, default, values, unit, control, on, meaning."""
        return [
            {"name": f.name, "default": f.default, **f.metadata}
            for f in dataclasses.fields(cls)
        ]

    def changed(self) -> dict[str, Any]:
        """The fields that differ from their default."""
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        }

    def inactive(self, backend: str) -> Optional[str]:
        """None, or why a changed field would do nothing on ``backend``."""
        for field in dataclasses.fields(self):
            if field.name in self.changed() and backend not in field.metadata["on"]:
                on = ", ".join(field.metadata["on"]) or "no backend of this version"
                return (
                    f"Policy: {field.name}={getattr(self, field.name)!r} does nothing "
                    f"on {backend}; this version acts on it on: {on}"
                )
        return None


def _assignment(cls, text: str) -> tuple[str, Any]:
    """``name=value`` as a pair, the value read as the field's own type."""
    name, sign, value = (part.strip() for part in text.partition("="))
    defaults = {f.name: f.default for f in dataclasses.fields(cls)}
    if not sign:
        raise ValueError(f"Policy: {text!r} is not of the form field=value")
    default = defaults.get(name)
    if isinstance(default, bool) and value.lower() in ("true", "false"):
        return name, value.lower() == "true"
    if isinstance(default, int) and value.lstrip("-").isdigit():
        return name, int(value)
    return name, value


DEFAULT = Policy()
