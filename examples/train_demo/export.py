"""Turn trained weights into the packaged 4-bit model, its test data and its figures.

    python export.py package --weights parts/ --tokenizer build/tokenizer --out hf --demo DIR
    python export.py logits  --demo DIR --heldout build/heldout.json --out demo_logits.npz
    python export.py bits    --demo DIR --weights parts/ --heldout build/heldout.json --out bits.json
    python export.py samples --demo DIR --out samples.json

`package` writes the Hugging Face folder and converts it with mlx-lm (4-bit, group 64;
router and shared-expert gate 8-bit, mlx-lm's own choice). `logits` loads the packaged
weights, dequantised to float32, into PyTorch's own model. `--weights random` stands for
a freshly initialised model. Needs torch, transformers, mlx, mlx-lm.
"""

import argparse
import json
import math
import pathlib
import shutil

import numpy as np

HERE = pathlib.Path(__file__).parent
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight",
         "q_norm.weight", "k_norm.weight")  # stored as w, applied as 1 + w; MLX stores 1 + w


def torch_model(state=None):
    """PyTorch's own Qwen3_5MoeForCausalLM in float32 on the CPU, with `state` if given."""
    import torch
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
    torch.manual_seed(0)
    config = Qwen3_5MoeTextConfig(**json.loads((HERE / "config.json").read_text())["text_config"])
    config._attn_implementation = "sdpa"
    model = Qwen3_5MoeForCausalLM(config).float().eval()
    if state is not None:
        model.load_state_dict(state)
    return model


def trained_state(weights):
    """Folder of safetensors parts (or 'random') -> state dict of torch tensors, as saved."""
    from safetensors.torch import load_file
    if str(weights) == "random":
        return torch_model().state_dict()
    state = {}
    for part in sorted(weights.glob("*.safetensors")):
        state.update(load_file(part))
    return state


def package(args):
    """Weights -> Hugging Face folder `out` -> quantised MLX folder `demo`."""
    import torch
    from mlx_lm import convert
    from safetensors.torch import save_file
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    state = {}
    for name, w in trained_state(args.weights).items():
        # A_log stays float32: it is exponentiated, and mlx-lm keeps it so.
        w = w.float() if name.endswith("A_log") else w.to(torch.bfloat16)
        state[name.replace("model.", "model.language_model.", 1)] = w.contiguous()
    save_file(state, args.out / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(HERE / "config.json", args.out)
    (args.out / "generation_config.json").write_text(json.dumps(
        {"eos_token_id": [2, 0], "pad_token_id": 0, "do_sample": True, "temperature": 0.8}, indent=1) + "\n")
    for f in args.tokenizer.iterdir():
        shutil.copy(f, args.out)
    made = args.out.with_name(args.out.name + "-4bit")
    shutil.rmtree(made, ignore_errors=True)
    convert(str(args.out), str(made), quantize=True)
    args.demo.mkdir(parents=True, exist_ok=True)
    for f in made.iterdir():
        if f.name not in ("README.md", "model.safetensors.index.json"):
            shutil.copy(f, args.demo)
    shutil.copy(args.tokenizer / "chat_template.jinja", args.demo)
    print("package bytes:", sum(f.stat().st_size for f in args.demo.iterdir() if f.is_file()))


def dequantised_state(demo):
    """Packaged MLX checkpoint -> float32 state dict with PyTorch's names and layouts."""
    import mlx.core as mx
    import torch
    config = json.loads((demo / "config.json").read_text())
    quant, raw = config["quantization"], mx.load(str(demo / "model.safetensors"))
    flat = {}
    for name, w in raw.items():
        if name.endswith((".scales", ".biases")):
            continue
        base = name.removesuffix(".weight")
        if base + ".scales" in raw:
            own = quant.get(base) or quant
            w = mx.dequantize(w, raw[base + ".scales"].astype(mx.float32), raw[base + ".biases"].astype(mx.float32),
                              group_size=own["group_size"], bits=own["bits"])
        flat[name.removeprefix("language_model.")] = np.array(w.astype(mx.float32))
    state = {}
    for name, w in flat.items():
        if ".switch_mlp." in name:
            if ".gate_proj." in name:  # gate over up: (experts, 2 x width, hidden)
                w = np.concatenate([w, flat[name.replace("gate_proj", "up_proj")]], 1)
                name = name.replace("switch_mlp.gate_proj.weight", "experts.gate_up_proj")
            elif ".down_proj." in name:
                name = name.replace("switch_mlp.down_proj.weight", "experts.down_proj")
            else:
                continue
        elif name.endswith("conv1d.weight"):
            w = np.moveaxis(w, 1, 2)
        elif name.endswith(NORMS):
            w = w - np.float32(1)
        state[name] = torch.from_numpy(np.ascontiguousarray(w))
    return state


def passages(demo, heldout, lengths):
    """Token ids of prose of the given lengths, one held-out document each, and the tokenizer."""
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(str(demo / "tokenizer.json"))
    texts = json.loads(heldout.read_text())
    picks = [p for p in ("python-django-doc", "postgresql-doc-15", "rust-doc", "sqlite3-doc",
                         "python3.11-doc", "llvm-16-doc", "erlang-doc") if p in texts]
    picks += [p for p in sorted(texts) if p not in picks]
    out = []
    for n, package in zip(lengths, picks):
        ids = tok.encode(max(texts[package], key=len)).ids
        assert len(ids) >= n, package
        out.append((package, ids[:n]))
    return out, tok


def mlx_float32(demo):
    """The packaged model in mlx-lm with every float parameter as float32."""
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm import load
    mx.set_default_device(mx.cpu)
    model, tok = load(str(demo))
    model.update(tree_map(lambda p: p.astype(mx.float32) if mx.issubdtype(p.dtype, mx.floating) else p,
                          model.parameters()))
    return model, tok


def logits(args):
    """PyTorch's float32 logits on 4 held-out passages, checked against mlx-lm in float32.

    Saved: ids_0..3 (T,) int32; logits_0..3 (T, 8192) float32; source_0..3 package names.
    """
    import mlx.core as mx
    import torch
    model = torch_model(dequantised_state(args.demo))
    found, _ = passages(args.demo, args.heldout, (16, 64, 65, 70))  # a chunk is 64: below, at, above
    other, _ = mlx_float32(args.demo)
    save, worst = {}, 0
    for i, (package, ids) in enumerate(found):
        with torch.no_grad():
            ours = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()
        theirs = np.array(other(mx.array([ids]))[0])
        diff = np.abs(ours - theirs).max()
        worst = max(worst, float(diff))
        print(f"{package:24s} {len(ids):4d} tokens, max |PyTorch - mlx-lm float32| {diff:.2e}, "
              f"logits in [{ours.min():.1f}, {ours.max():.1f}]")
        save |= {f"ids_{i}": np.array(ids, np.int32), f"logits_{i}": ours.astype(np.float32), f"source_{i}": package}
    assert worst < 1e-3, worst
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.out, **save)
    print("saved", args.out, args.out.stat().st_size, "bytes; worst difference", worst)


def nll(model, ids, window=512, batch=8):
    """Sum of -log2 p of ids[1:], in windows of `window` tokens that do not see each other.

    Uses train.forward, which agrees with the class's own to 5e-6 of the logits' spread in
    float32 (`train.py --check`) and is several times faster on a CPU.
    """
    import torch
    import train
    rows = [ids[i:i + window + 1] for i in range(0, len(ids) - 1, window)]
    total = 0.0
    rows.sort(key=len)
    for i in range(0, len(rows), batch):
        width = -(-(len(rows[min(i + batch, len(rows)) - 1]) - 1) // 64) * 64  # whole chunks of 64
        x = torch.full((len(rows[i:i + batch]), width + 1), -100)
        for row, r in zip(x, rows[i:i + batch]):
            row[:len(r)] = torch.from_numpy(r.astype(np.int64))
        with torch.no_grad():
            h, _ = train.forward(model, x[:, :-1].clamp(min=0), *train.rotary(model.config, width, "cpu"))  # causal: padding changes nothing
            keep = x[:, 1:] >= 0
            out = h[keep] @ model.lm_head.weight.T
            total += torch.nn.functional.cross_entropy(out, x[:, 1:][keep], reduction="sum").item()
    return total / math.log(2)


def bits(args):
    """Held-out bits per byte by package, float weights and packaged 4-bit (both float32 arithmetic)."""
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(str(args.demo / "tokenizer.json"))
    texts = json.loads(args.heldout.read_text())
    result = {}
    for kind, state in (("float", {k: v.float() for k, v in trained_state(args.weights).items()}),
                        ("4bit", dequantised_state(args.demo))):
        model = torch_model(state)
        per, total_bits, total_bytes = {}, 0.0, 0
        for package, docs in sorted(texts.items()):
            docs = [d[:args.most] for d in docs[:args.documents]]
            ids = [0] + [t for e in tok.encode_batch(docs) for t in e.ids + [0]]
            b, n = nll(model, np.array(ids)), sum(len(d.encode()) for d in docs)
            per[package] = {"bits_per_byte": round(b / n, 4), "bytes": n}
            total_bits, total_bytes = total_bits + b, total_bytes + n
        result[kind] = {"bits_per_byte": round(total_bits / total_bytes, 4), "bytes": total_bytes, "by_package": per}
        print(kind, result[kind]["bits_per_byte"], flush=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


PROMPTS = ["The database server", "To install the package,", "A list comprehension", "The compiler",
           "When a request arrives,", "This module provides", "Transactions are", "Each thread",
           "The configuration file", "Security considerations\n\n"]


def samples(args):
    """Ten samples of 200 tokens at temperature 0.8: prompt i with seed i, none re-drawn.

    An end-of-text token does not stop a sample here, so that every one has 200 tokens.
    """
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.generate import generate_step
    from mlx_lm.sample_utils import make_sampler
    mx.set_default_device(mx.cpu)
    model, tok = load(str(args.demo))
    out = []
    for seed, prompt in enumerate(PROMPTS):
        mx.random.seed(seed)
        ids = []
        for token, _ in generate_step(mx.array(tok.encode(prompt)), model, max_tokens=200, sampler=make_sampler(temp=0.8)):
            ids.append(int(token))
        grams = [tuple(ids[i:i + 8]) for i in range(len(ids) - 7)]
        out.append({"seed": seed, "prompt": prompt, "text": tok.decode(ids), "tokens": len(ids),
                    "repeated_8_grams": len(grams) - len(set(grams))})
        print(seed, out[-1]["repeated_8_grams"], repr(prompt), repr(out[-1]["text"][:300]), flush=True)
    args.out.write_text(json.dumps(out, indent=1) + "\n")


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("what", choices=["package", "logits", "bits", "samples"])
    ap.add_argument("--weights", type=pathlib.Path)
    ap.add_argument("--tokenizer", type=pathlib.Path)
    ap.add_argument("--heldout", type=pathlib.Path)
    ap.add_argument("--demo", type=pathlib.Path, required=True)
    ap.add_argument("--out", type=pathlib.Path, required=True)
    ap.add_argument("--most", type=int, default=1500, help="characters of a held-out document that are used")
    ap.add_argument("--documents", type=int, default=2, help="held-out documents of a package that are used")
    args = ap.parse_args()
    globals()[args.what](args)


if __name__ == "__main__":
    main()
