"""Draw loss.csv as loss.png: `python plot_loss.py` (needs matplotlib)."""

import csv
import pathlib

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt

here = pathlib.Path(__file__).parent
rows = list(csv.DictReader((here / "loss.csv").open()))
train = [(int(r["tokens"]) / 1e6, float(r["loss"])) for r in rows if r["loss"]]
held = [(int(r["tokens"]) / 1e6, float(r["heldout_loss"])) for r in rows if r["heldout_loss"]]
mean = [sum(v for _, v in train[max(0, i - 9):i + 1]) / len(train[max(0, i - 9):i + 1]) for i in range(len(train))]
fig, ax = plt.subplots(figsize=(7, 4))
ax.plot(*zip(*train), color="#bbccdd", lw=0.6, label="training, each 20th batch")
ax.plot([t for t, _ in train], mean, color="#2255aa", label="training, mean of ten")
ax.plot(*zip(*held), "o-", color="#cc5500", ms=4, label="held-out")
ax.set(xlabel="million tokens", ylabel="loss, nats a token", ylim=(2, 5), title="Demo model, one NVIDIA H200")
ax.legend()
ax.grid(alpha=0.3)
fig.savefig(here / "loss.png", dpi=130, bbox_inches="tight")
