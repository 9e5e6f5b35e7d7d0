"""What a checkpoint needs in memory, and what the machine has."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import mlx.core as mx

#: Bytes of an element by safetensors dtype, of those that ``set_dtype`` casts.
FLOAT_BYTES = {"BF16": 2, "F16": 2, "F32": 4}


def weight_bytes(path: Path) -> int:
    """Bytes of a checkpoint's weights."""
    return sum(file.stat().st_size for file in path.glob("model*.safetensors"))


def float32_bytes(path: Path) -> int:
    """Bytes of a float32 copy of a checkpoint's floating-point parameters."""
    total = 0
    for file in path.glob("model*.safetensors"):
        with open(file, "rb") as stream:
            header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
        for name, tensor in header.items():
            if name != "__metadata__" and tensor["dtype"] in FLOAT_BYTES:
                first, last = tensor["data_offsets"]
                total += (last - first) * 4 // FLOAT_BYTES[tensor["dtype"]]
    return total


def cache_bytes(config: dict, tokens: int) -> int:
    """Bytes of a prompt cache of ``tokens`` tokens: keys and values in 16 bits, states in 32."""
    text = config.get("text_config", config)
    layers = text.get("num_hidden_layers", 0)
    value_heads = text.get("linear_num_value_heads", 0)
    kinds = text.get("layer_types")
    if not value_heads:
        full = layers
    elif kinds:
        full = kinds.count("full_attention")
    else:
        full = layers // (text.get("full_attention_interval") or 4)
    heads = text.get("num_attention_heads") or 1
    head = text.get("head_dim") or text.get("hidden_size", 0) // heads
    key_values = full * text.get("num_key_value_heads", heads) * head * 2 * 2 * tokens
    square = text.get("linear_value_head_dim", 0) * text.get("linear_key_head_dim", 0)
    return key_values + (layers - full) * value_heads * square * 4


def capacity() -> tuple[int, str]:
    """Bytes that a model may take here, and what sets that limit."""
    limits = []
    if "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append((os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "memory"))
    try:
        limits.append((int(Path("/sys/fs/cgroup/memory.max").read_text()), "container limit"))
    except (OSError, ValueError):  # no such file, or "max"
        pass
    info = mx.device_info()
    names = {"max_recommended_working_set_size": "wired limit", "total_memory": "GPU memory"}
    limits += [(int(info[key]), name) for key, name in names.items() if info.get(key)]
    return min(limits, default=(2**63, "memory"))
