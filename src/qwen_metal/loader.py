"""``load``, ``accelerate``, ``restore``, ``warmup``: the drop-in."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Union

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache

from . import routes as _routes
from .models import attention, decode_step, decoder, deltanet, moe
from .models.state import ATTRIBUTE, State
from .policy import Policy
from .routes import Unsupported

#: mlx-lm model types with a fused path.
FAMILIES = ("qwen3_5_moe", "qwen3_5", "qwen3_next", "qwen3_moe")


def load(
    path_or_hf_repo: str,
    tokenizer_config: Optional[Dict[str, Any]] = None,
    model_config: Optional[Dict[str, Any]] = None,
    adapter_path: Optional[str] = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: Optional[str] = None,
    trust_remote_code: bool = False,
    *,
    policy: Union[Policy, Mapping[str, Any], str, None] = None,
    strict: bool = False,
):
    """``mlx_lm.load``, with the blocks of the model accelerated.

    Args:
        path_or_hf_repo: a folder or a Hugging Face repository, as for mlx-lm;
            so are the other positional arguments.
        policy: which mechanism serves each part; see ``Policy``.
        strict: raise where the stock path would serve a call.

    Returns:
        What ``mlx_lm.load`` returns: (model, tokenizer), and the config as a
        third with ``return_config``.

    Raises:
        ValueError: a checkpoint that is damaged or of another family, or an
            unknown policy; nothing was loaded.
        FileNotFoundError: no such folder, or no weights in it.
    """
    policy = Policy.of(policy)
    _check_policy(policy)
    if looks_local(path_or_hf_repo):
        check_checkpoint(Path(path_or_hf_repo).expanduser(), model_config)
        path_or_hf_repo = str(Path(path_or_hf_repo).expanduser())
    model, *rest = mlx_lm.load(
        path_or_hf_repo,
        tokenizer_config=tokenizer_config,
        model_config=model_config,
        adapter_path=adapter_path,
        lazy=lazy,
        return_config=return_config,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    return (accelerate(model, policy, strict), *rest)


def accelerate(
    model: nn.Module,
    policy: Union[Policy, Mapping[str, Any], str, None] = None,
    strict: bool = False,
) -> nn.Module:
    """Give an mlx-lm model's blocks their fused forward, in place.

    The model, its modules, parameters and caches stay the same objects with
    the same names and values; each module's class becomes a subclass of its
    own. A second call changes the settings.

    Args:
        model: an mlx-lm model of a supported family.
        policy: a ``Policy``, a mapping of its fields, text, or None.
        strict: raise, with the reason, where the stock path would serve.

    Returns:
        ``model`` itself.

    Raises:
        ValueError: a model of another family, or a policy this backend does
            not act on; the model is unchanged.
        Unsupported: under ``strict``, a block with no fused path.
    """
    policy = Policy.of(policy)
    _check_policy(policy)
    modules = _recognised(model)
    if strict:
        _check_strict(model)
    state = State(policy, bool(strict))
    for module in modules:
        module.__class__ = decoder.FUSED.get(type(module), type(module))
        object.__setattr__(module, ATTRIBUTE, state)
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undo ``accelerate``: the untouched stock model, the same module objects.

    A model that is not accelerated is returned as it is.
    """
    for _, module in model.named_modules():
        if ATTRIBUTE in vars(module):
            module.__class__ = type(module).__mro__[1]
            object.__delattr__(module, ATTRIBUTE)
            vars(module).pop(decode_step.ATTRIBUTE, None)
    return model


def warmup(model: nn.Module, tokens: int = 16) -> dict[str, dict]:
    """Run a short prompt and two decode steps, so that the first request waits for nothing.

    Args:
        model: an accelerated model.
        tokens: length of the prompt, at least 1.

    Returns:
        ``routes()`` of these calls alone; the running counts are left as if
        they had not been made.

    Raises:
        ValueError: a model that is not accelerated, or no tokens.
    """
    if not is_accelerated(model):
        raise ValueError("warmup: the model is not accelerated; call accelerate(model) first")
    if tokens < 1:
        raise ValueError(f"warmup: tokens is {tokens}, supported are 1 and more")
    with _routes.separate() as counts:
        cache = make_prompt_cache(model)
        mx.eval(model(mx.zeros((1, tokens), mx.int32), cache=cache))
        for _ in range(2):
            mx.eval(model(mx.zeros((1, 1), mx.int32), cache=cache))
        return counts()


def is_accelerated(model: nn.Module) -> bool:
    """Whether ``accelerate`` is in force on this model."""
    return any(ATTRIBUTE in vars(m) for _, m in model.named_modules())


def looks_local(path_or_hf_repo: str) -> bool:
    """Whether a name means a folder: it exists, or is no ``owner/name``."""
    text = str(path_or_hf_repo)
    if Path(text).expanduser().exists():
        return True
    return text.startswith(("/", "./", "../", "~")) or text.count("/") != 1


def check_checkpoint(path: Path, model_config: Optional[dict] = None) -> None:
    """Raise, in one line, unless a folder holds a whole checkpoint of a known family.

    Raises:
        FileNotFoundError: no folder, no config.json, or no safetensors.
        ValueError: config.json is no JSON object, of another family, or a
            safetensors file is truncated or damaged.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"no such model folder: {path}")
    config_file = path / "config.json"
    if not config_file.is_file():
        raise FileNotFoundError(f"no config.json in {path}")
    try:
        config = json.loads(config_file.read_text())
    except (ValueError, OSError) as error:
        raise ValueError(f"{config_file} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{config_file} holds no JSON object")
    kind = {**config, **(model_config or {})}.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(
            f"{path} holds a model of type {kind!r}, supported are " + ", ".join(FAMILIES)
        )
    files = sorted(path.glob("model*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no weights (model*.safetensors) in {path}")
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{index} is no index of weights") from None
        missing = sorted(named - {f.name for f in files})
        if missing:
            raise FileNotFoundError(f"{path} lacks {missing[0]}, named in {index.name}")
    for file in files:
        _check_safetensors(file)


def _check_safetensors(file: Path) -> None:
    """Raise a ValueError unless the file is as long as its header says."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise ValueError(f"{file} is truncated or no safetensors file ({size} bytes)")
        try:
            header = json.loads(stream.read(length))
            ends = [int(t["data_offsets"][1]) for n, t in header.items() if n != "__metadata__"]
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise ValueError(f"{file} has a damaged safetensors header") from None
    wanted = 8 + length + max(ends, default=0)
    if size < wanted:
        raise ValueError(f"{file} is truncated: {size} bytes, its header names {wanted}")


def _check_policy(policy: Policy) -> None:
    """Raise a ValueError where a changed field would silently do nothing here."""
    backend = "cpu" if mx.default_device() == mx.cpu else (
        "metal" if mx.metal.is_available() else "cuda"
    )
    if why := policy.inactive(backend):
        raise ValueError(why)


def _recognised(model: nn.Module) -> list[nn.Module]:
    """The modules to change; raises a ValueError for a model of another family."""
    supported = "supported are mlx-lm models of type " + ", ".join(FAMILIES)
    if not isinstance(model, nn.Module):
        raise ValueError(f"accelerate: got {type(model).__name__}, {supported}")
    known = (*decoder.FUSED, *decoder.FUSED.values())
    modules = [m for _, m in model.named_modules() if type(m) in known]
    bodies = [m for m in modules if isinstance(m, tuple(b.__mro__[1] for b in decoder.BODIES))]
    kind = getattr(model, "model_type", None)
    base = str(kind).removesuffix("_text")
    if base not in FAMILIES or len(bodies) != 1:
        raise ValueError(
            f"accelerate: got a {type(model).__name__} of model type {kind!r} with "
            f"{len(bodies)} known decoders, {supported}"
        )
    return modules


def _check_strict(model: nn.Module) -> None:
    """Raise Unsupported where a block's structure has no fused path."""
    readers = {
        deltanet.read: (deltanet.GatedDeltaNet, deltanet.InterleavedGatedDeltaNet),
        attention.read: (attention.GatedAttention, attention.PlainAttention),
        moe.read: (moe.SparseMoe, moe.PlainSparseMoe, moe.Mlp, moe.PlainMlp),
    }
    for name, module in model.named_modules():
        kind = decoder.FUSED.get(type(module), type(module))
        for read, kinds in readers.items():
            if kind in kinds:
                try:
                    read(module)
                except Unsupported as error:
                    raise Unsupported(f"{name}: {error}") from None
