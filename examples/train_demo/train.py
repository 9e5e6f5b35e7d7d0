"""Train the demo model (24 M parameters) with transformers' Qwen3_5Moe classes on one GPU.

    python train.py --data build --out run --seconds 540 --total 1080   # first half
    python train.py --data build --out run --seconds 540 --total 1080   # resumes, ends at lr 0

The model is built and initialised by Qwen3_5MoeForCausalLM and its state dict is what is
saved. In training two of its parts are computed by equal, faster formulas, checked against
the class's own forward by `--check`: the 32 small experts as one dense product in which the
24 not chosen weigh zero, and the delta rule's triangular inverse by blocks of 16.
Matrices are updated by Muon, the rest by AdamW; fp32 master weights, bf16 autocast.
The schedule follows training time, so that a run of known length ends at lr 0.

Reads train.npy, chat.npy, heldout.npz (uint16 token ids) in --data. Writes in --out:
state.pt (to resume), weights-*.safetensors (bf16, A_log fp32), loss.csv.
"""

import argparse
import csv
import json
import pathlib
import time

import numpy as np
import torch
import torch.nn.functional as F

HERE = pathlib.Path(__file__).parent


def build_model(device):
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
    torch.manual_seed(0)
    config = Qwen3_5MoeTextConfig(**json.loads((HERE / "config.json").read_text())["text_config"])
    config._attn_implementation = "sdpa"
    model = Qwen3_5MoeForCausalLM(config).float()
    with torch.no_grad():  # outputs to the residual stream start small, as in GPT-2
        for name, p in model.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
                p.mul_((2 * config.num_hidden_layers) ** -0.5)
    return model.to(device)


# --- the forward pass, on the class's own parameters -------------------------------------

def rms(x, weight, eps):
    """Zero-centred RMSNorm (weight stored as w, applied as 1 + w), fp32 inside."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * (1 + weight)).to(torch.bfloat16 if torch.is_autocast_enabled() else x.dtype)


def unit_lower_inverse(a):
    """Inverse of I + a, a strictly lower triangular (..., 64, 64): blocks of 16 by doubling
    (a nilpotent block's Neumann series has 4 factors), then merged pairwise."""
    n = a.shape[-1]
    b = a.unflatten(-1, (n // 16, 16)).unflatten(-3, (n // 16, 16))        # (..., i, 16, j, 16)
    diag = -torch.stack([b[..., i, :, i, :] for i in range(n // 16)], -3)   # (..., n/16, 16, 16)
    eye = torch.eye(16, device=a.device, dtype=a.dtype)
    inv, power = eye + diag, diag
    for _ in range(3):
        power = power @ power
        inv = inv + inv @ power
    blocks, size = list(inv.unbind(-3)), 16
    while len(blocks) > 1:
        merged = []
        for k in range(0, len(blocks), 2):
            p, q, at = blocks[k], blocks[k + 1], k * size
            low = -q @ a[..., at + size:at + 2 * size, at:at + size] @ p
            top = torch.cat([p, torch.zeros_like(p)], -1)
            merged.append(torch.cat([top, torch.cat([low, q], -1)], -2))
        blocks, size = merged, 2 * size
    return blocks[0]


def delta_rule(q, k, v, g, beta, chunk=64):
    """Gated delta rule by chunks, fp32. q, k (B, T, H, Dk) normalised, q scaled; v (B, T, H, Dv);
    g (log decay), beta (B, T, H); T a multiple of `chunk`. Returns (B, T, H, Dv)."""
    B, T, H, _ = q.shape
    q, k, v = (x.transpose(1, 2).unflatten(2, (T // chunk, chunk)) for x in (q, k, v))
    g, beta = (x.transpose(1, 2).unflatten(2, (T // chunk, chunk)) for x in (g, beta))
    total = g.cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~lower, float("-inf")).exp()
    kb = k * beta.unsqueeze(-1)
    a = ((kb @ k.transpose(-1, -2)) * decay).tril(-1)
    inv = unit_lower_inverse(a)
    u = inv @ (v * beta.unsqueeze(-1))
    w = inv @ (kb * total.exp().unsqueeze(-1))
    attn = (q @ k.transpose(-1, -2)) * decay
    q = q * total.exp().unsqueeze(-1)
    k = k * (total[..., -1:] - total).exp().unsqueeze(-1)
    last = total[..., -1].exp()[..., None, None]
    state = torch.zeros(B, H, k.shape[-1], v.shape[-1], device=q.device, dtype=q.dtype)
    out = []
    for i in range(T // chunk):
        new = u[:, :, i] - w[:, :, i] @ state
        out.append(q[:, :, i] @ state + attn[:, :, i] @ new)
        state = state * last[:, :, i] + k[:, :, i].transpose(-1, -2) @ new
    return torch.cat(out, 2).transpose(1, 2)


def delta_net(m, x):
    """Gated DeltaNet layer m on x (B, T, D)."""
    return delta_net_math(x, m.in_proj_qkv.weight, m.in_proj_z.weight, m.in_proj_b.weight, m.in_proj_a.weight, m.conv1d.weight,
                          m.A_log, m.dt_bias, m.norm.weight, m.out_proj.weight, m.num_k_heads, m.num_v_heads,
                          m.norm.variance_epsilon)


def delta_net_math(x, qkv_w, z_w, b_w, a_w, w, a_log, dt_bias, norm_w, out_w, key_heads, value_heads, eps):
    B, T, _ = x.shape
    value_dim = z_w.shape[0]
    key_dim = (qkv_w.shape[0] - value_dim) // 2
    qkv = F.linear(x, qkv_w)
    padded = F.pad(qkv, (0, 0, w.shape[-1] - 1, 0))        # depthwise causal conv: four shifted products
    qkv = F.silu(sum(padded[:, i:i + T] * w[:, 0, i].to(qkv.dtype) for i in range(w.shape[-1])))
    q, k, v = qkv.split([key_dim, key_dim, value_dim], -1)
    z = F.linear(x, z_w).view(B, T, value_heads, -1)
    beta = F.linear(x, b_w).float().sigmoid()
    g = -a_log.float().exp() * F.softplus(F.linear(x, a_w).float() + dt_bias)
    with torch.autocast(x.device.type, enabled=False):
        heads = lambda t, h: t.reshape(B, T, h, -1).float()
        unit = lambda t: t * torch.rsqrt(t.pow(2).sum(-1, keepdim=True) + 1e-6)
        rep = value_heads // key_heads
        q = heads(q, key_heads)
        q = (unit(q) * q.shape[-1] ** -0.5).repeat_interleave(rep, 2)
        k = unit(heads(k, key_heads)).repeat_interleave(rep, 2)
        o = delta_rule(q, k, heads(v, value_heads), g, beta)
        o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + eps)
        o = norm_w * o * F.silu(z.float())
    return F.linear(o.reshape(B, T, -1).to(x.dtype), out_w)


def attention(m, x, cos, sin):
    """Gated attention layer m on x (B, T, D); cos, sin (T, rotary dims)."""
    return attention_math(x, m.q_proj.weight, m.k_proj.weight, m.v_proj.weight, m.o_proj.weight,
                          m.q_norm.weight, m.k_norm.weight, cos, sin, m.head_dim, m.q_norm.eps)


def attention_math(x, q_w, k_w, v_w, o_w, q_norm, k_norm, cos, sin, head_dim, eps):
    B, T, _ = x.shape
    q, gate = F.linear(x, q_w).view(B, T, -1, 2 * head_dim).chunk(2, -1)
    k = F.linear(x, k_w).view(B, T, -1, head_dim)
    v = F.linear(x, v_w).view(B, T, -1, head_dim)
    q, k = rms(q, q_norm, eps).transpose(1, 2), rms(k, k_norm, eps).transpose(1, 2)
    v = v.transpose(1, 2)
    half = cos.shape[-1] // 2

    def rope(t):
        r, rest = t[..., :2 * half].float(), t[..., 2 * half:]
        turned = torch.cat([-r[..., half:], r[..., :half]], -1)
        return torch.cat([(r * cos + turned * sin).to(t.dtype), rest], -1)

    q, k = rope(q), rope(k)
    k, v = k.expand(q.shape), v.expand(q.shape)            # one KV head
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    o = o.reshape(B, T, -1) * gate.reshape(B, T, -1).sigmoid()
    return F.linear(o.to(x.dtype), o_w)


def moe(m, x, top_k):
    """MoE block on x (N, D). Returns (output, balance loss: top_k when balanced)."""
    s = m.shared_expert
    return moe_math(x, m.gate.weight, m.experts.gate_up_proj, m.experts.down_proj, s.gate_proj.weight, s.up_proj.weight,
                    s.down_proj.weight, m.shared_expert_gate.weight, top_k)


def moe_math(x, router, gate_up, down, shared_gate, shared_up, shared_down, shared_switch, top_k):
    E, hidden = router.shape
    prob = F.linear(x, router).float().softmax(-1)
    value, index = prob.topk(top_k, -1)
    score = torch.zeros_like(prob).scatter(-1, index, value / value.sum(-1, keepdim=True))
    gate, up = F.linear(x, gate_up.flatten(0, 1)).view(-1, E, 2, gate_up.shape[1] // 2).unbind(2)
    h = F.silu(gate) * up * score.unsqueeze(-1).to(gate.dtype)
    y = F.linear(h.flatten(1), down.transpose(0, 1).reshape(hidden, -1))
    shared = F.linear(F.silu(F.linear(x, shared_gate)) * F.linear(x, shared_up), shared_down)
    shared = shared * F.linear(x, shared_switch).sigmoid()
    chosen = (score > 0).float().mean(0)
    return y + shared, E * (chosen.detach() * prob.mean(0)).sum()


def forward(model, ids, cos, sin):
    """ids (B, T) -> normalised last hidden states (B, T, D) and the mean balance loss."""
    c = model.config
    h = F.embedding(ids, model.model.embed_tokens.weight)
    balance = 0.0
    for layer in model.model.layers:
        x = rms(h, layer.input_layernorm.weight, c.rms_norm_eps)
        h = h + (delta_net(layer.linear_attn, x) if hasattr(layer, "linear_attn")
                 else attention(layer.self_attn, x, cos, sin))
        x = rms(h, layer.post_attention_layernorm.weight, c.rms_norm_eps)
        y, b = moe(layer.mlp, x.flatten(0, 1), c.num_experts_per_tok)
        h, balance = h + y.view_as(h), balance + b / c.num_hidden_layers
    return rms(h, model.model.norm.weight, c.rms_norm_eps), balance


def head_loss(h, weight, targets):
    """h (N, D), head weight (V, D), targets (N,) -> mean loss in nats."""
    return F.cross_entropy(F.linear(h, weight).float(), targets)


def loss_of(model, ids, cos, sin):
    """ids (B, T + 1) -> mean next-token loss in nats, balance loss."""
    h, balance = forward(model, ids[:, :-1], cos, sin)
    return head_loss(h.flatten(0, 1), model.lm_head.weight, ids[:, 1:].flatten()), balance


def rotary(config, length, device):
    """cos, sin (T, rotary dims) of text positions 0..length-1 (all three axes equal)."""
    rope = config.rope_parameters
    dims = int(config.head_dim * rope["partial_rotary_factor"])
    freq = rope["rope_theta"] ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * freq
    angle = torch.cat([angle, angle], -1)
    return angle.cos().float().to(device), angle.sin().float().to(device)


# --- optimiser ------------------------------------------------------------------------------

def orthogonalise(g):
    """Newton-Schulz iteration on a stack of matrices (N, a, b): all singular values to about 1."""
    x = g.bfloat16() if g.is_cuda else g
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        s = x @ x.mT
        x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
    return x if wide else x.mT


class Muon:
    """Muon for stacks of matrices, parameters of one shape updated together. The update's
    RMS is 0.2, AdamW's usual one, so that both share a learning rate."""

    def __init__(self, params, momentum=0.95, decay=0.1):
        self.momentum, self.decay = momentum, decay
        shapes = {}
        for p in params:
            shapes.setdefault(tuple(p.shape), []).append(p)
        self.groups = [(ps, torch.zeros(len(ps), *shape, device=ps[0].device)) for shape, ps in shapes.items()]

    @torch.no_grad()
    def step(self, lr):
        for params, buf in self.groups:
            grad = torch.stack([p.grad for p in params])
            buf.lerp_(grad, 1 - self.momentum)
            g = grad.lerp(buf, self.momentum)
            u = orthogonalise(g.flatten(0, -3)).view_as(g).float()
            u *= 0.2 * max(g.shape[-2:]) ** 0.5
            torch._foreach_mul_(params, 1 - lr * self.decay)
            torch._foreach_add_(params, list(u.unbind(0)), alpha=-lr)

    def state(self):
        return [buf for _, buf in self.groups]

    def load(self, bufs):
        for (_, mine), buf in zip(self.groups, bufs):
            mine.copy_(buf)


def is_muon(name, p):
    return p.ndim >= 2 and not any(s in name for s in ("embed_tokens", "lm_head", "conv1d", "mlp.gate.", "shared_expert_gate",
                                                       "in_proj_a", "in_proj_b"))


def rate(progress, warm=0.01, hold=0.25):
    """Learning-rate factor at a share of training: up to 1, held, then linearly to 0."""
    if progress < warm:
        return progress / warm
    return 1.0 if progress < hold else max(0.0, (1 - progress) / (1 - hold))


# --- data -----------------------------------------------------------------------------------

class Windows:
    """Windows of length + 1 tokens: each pass takes every block once, from a new offset, in a
    new order; about `share` of each batch from the chat material."""

    def __init__(self, data, length, share, device, seed):
        self.length, self.share, self.rng = length, share, np.random.default_rng(seed)
        self.text, self.chat = (torch.from_numpy(np.load(data / f"{n}.npy").astype(np.int32)).to(device) for n in ("train", "chat"))
        self.queue = {"text": [], "chat": []}
        self.seen = 0

    def starts(self, kind, count):
        queue, stream = self.queue[kind], getattr(self, kind)
        while len(queue) < count:
            offset = int(self.rng.integers(self.length))
            blocks = (len(stream) - offset - 1) // self.length
            queue.extend((self.rng.permutation(blocks) * self.length + offset).tolist())
        taken, self.queue[kind] = queue[:count], queue[count:]
        return taken

    def batch(self, size):
        parts, many = [], round(size * self.share)
        for kind, count in (("chat", many), ("text", size - many)):
            stream = getattr(self, kind)
            at = torch.tensor(self.starts(kind, count), dtype=torch.long, device=stream.device)
            parts.append(stream[at[:, None] + torch.arange(self.length + 1, device=stream.device)])
        self.seen += size * self.length
        return torch.cat(parts).long()


def held_out(data, length, device, most=200):
    """Up to `most` windows (most, length + 1) of held-out text, spread over the packages."""
    with np.load(data / "heldout.npz") as z:
        stream = np.concatenate([z[k] for k in z.files]).astype(np.int64)
    rows = (len(stream) - 1) // length
    pick = np.linspace(0, rows - 1, min(most, rows)).astype(int)
    return torch.from_numpy(np.stack([stream[i * length:i * length + length + 1] for i in pick])).to(device)


# --- running ----------------------------------------------------------------------------------

def save_weights(model, out, parts=4):
    """bf16 weights (A_log fp32) in `parts` files of about equal size."""
    from safetensors.torch import save_file
    state = {k: (v if k.endswith("A_log") else v.bfloat16()).contiguous().cpu() for k, v in model.state_dict().items()}
    files, sizes = [{} for _ in range(parts)], [0] * parts
    for k, v in sorted(state.items(), key=lambda kv: -kv[1].numel()):
        i = sizes.index(min(sizes))
        files[i][k], sizes[i] = v, sizes[i] + v.numel()
    for i, f in enumerate(files):
        save_file(f, out / f"weights-{i}.safetensors")


def check(model, device):
    """Difference of `forward` from the class's own, relative to the logits' spread (fp32)."""
    ids = torch.randint(0, model.config.vocab_size, (2, 128), device=device)
    with torch.no_grad():
        own = model(input_ids=ids, use_cache=False).logits
        ours = F.linear(forward(model, ids, *rotary(model.config, 128, device))[0], model.lm_head.weight)
    print("check: max difference / std of logits", ((own - ours).abs().max() / own.std()).item(), flush=True)


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--data", type=pathlib.Path, required=True)
    ap.add_argument("--out", type=pathlib.Path, required=True)
    ap.add_argument("--state", type=pathlib.Path, help="where state.pt is kept (default: --out)")
    ap.add_argument("--seconds", type=float, required=True, help="wall time of this call, saving included")
    ap.add_argument("--total", type=float, required=True, help="training seconds of all calls together")
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--length", type=int, default=1024)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--chat", type=float, default=0.08)
    ap.add_argument("--no-graph", action="store_true")
    ap.add_argument("--check", action="store_true")
    args = ap.parse_args()
    begin = time.time()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)
    model = build_model(device)
    if args.check:
        check(model, device)
    named = list(model.named_parameters())
    muon = Muon([p for n, p in named if is_muon(n, p)])
    other = [p for n, p in named if not is_muon(n, p)]
    adam = torch.optim.AdamW([{"params": [p for p in other if p.ndim >= 2], "weight_decay": 0.05},
                              {"params": [p for p in other if p.ndim < 2], "weight_decay": 0.0}],
                             lr=args.lr, betas=(0.9, 0.95), eps=1e-8, fused=device == "cuda")
    cos, sin = rotary(model.config, args.length, device)
    state_file = (args.state or args.out) / "state.pt"
    spent, step, tokens, log = 0.0, 0, 0, []
    if state_file.exists():
        s = torch.load(state_file, map_location=device, weights_only=False)
        model.load_state_dict(s["model"])
        adam.load_state_dict(s["adam"])
        muon.load(s["muon"])
        spent, step, tokens, log = s["spent"], s["step"], s["tokens"], s["log"]
    data = Windows(args.data, args.length, args.chat, device, seed=step)
    valid = held_out(args.data, args.length, device)
    print(f"{device}, {sum(p.numel() for p in model.parameters()):,} parameters, {len(data.text):,} text and "
          f"{len(data.chat):,} chat tokens; resuming at step {step}, {spent:.0f} s of {args.total:.0f} s", flush=True)

    def losses(ids):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda", cache_enabled=False):
            return loss_of(model, ids, cos, sin)


    def evaluate():
        with torch.no_grad():
            parts = [losses(valid[i:i + args.batch])[0] for i in range(0, len(valid) - args.batch + 1, args.batch)]
        return torch.stack(parts).mean().item() if parts else float("nan")

    coefficient = model.config.router_aux_loss_coef
    graph, static = None, data.batch(args.batch)

    def gradients():
        loss, balance = losses(static)
        (loss + coefficient * balance).backward()
        return loss.detach(), balance.detach()

    if device == "cuda" and not args.no_graph:
        # One step is some 10,000 small launches: record forward and backward once, replay.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                gradients()
                model.zero_grad(set_to_none=True)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = gradients()
        torch.cuda.synchronize()
        print(f"recorded after {time.time() - begin:.1f} s", flush=True)

    def train_step(lr):
        for group in adam.param_groups:
            group["lr"] = lr
        static.copy_(data.batch(args.batch))
        if graph:
            graph.replay()
            loss, balance = recorded
        else:
            loss, balance = gradients()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        muon.step(lr)
        if not graph:
            model.zero_grad(set_to_none=True)
        return loss, balance, norm

    start, last, mark = time.time(), time.time(), tokens
    reserve, ema = 15.0 if device == "cuda" else 5.0, None
    while True:
        now = time.time()
        progress = (spent + now - start) / args.total
        if progress >= 1 or now - begin > args.seconds - reserve:
            break
        loss, balance, norm = train_step(args.lr * rate(progress))
        step, tokens = step + 1, tokens + args.batch * args.length
        if step % 20 == 0:
            value = loss.item()
            ema = value if ema is None else 0.8 * ema + 0.2 * value
            due = step % 500 == 0
            row = [step, tokens, round(spent + time.time() - start, 1), round(args.lr * rate(progress), 6), round(value, 4),
                   round(balance.item(), 3), round(evaluate(), 4) if due else ""]
            log.append(row)
            if step % (100 if step > 200 else 20) == 0:
                now = time.time()
                print(f"step {step} {tokens / 1e6:.1f} M tokens {100 * progress:.1f}% lr {row[3]} loss {ema:.4f} "
                      f"balance {row[5]} norm {norm.item():.2f} held-out {row[6]} {(tokens - mark) / (now - last):,.0f} tokens/s", flush=True)
                last, mark = now, tokens
    if device == "cuda":
        torch.cuda.synchronize()
    spent += time.time() - start
    final = evaluate()
    log.append([step, tokens, round(spent, 1), 0.0, "", "", round(final, 4)])
    print(f"end of call: step {step}, {tokens:,} tokens, {spent:.1f} s, held-out loss {final:.4f}", flush=True)
    save_weights(model, args.out)
    with (args.out / "loss.csv").open("w", newline="") as f:
        csv.writer(f).writerows([["step", "tokens", "seconds", "lr", "loss", "balance", "heldout_loss"], *log])
    if spent < args.total:
        torch.save({"model": model.state_dict(), "adam": adam.state_dict(), "muon": muon.state(),
                    "spent": spent, "step": step, "tokens": tokens, "log": log}, state_file)
    print(f"saved after {time.time() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
