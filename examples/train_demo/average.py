"""Mean of two saved checkpoints of one run: `python average.py A B --share 0.5 --out C`.

The end of the run fits the training text more closely than the held-out (it sees the corpus
about eight times); the mean with the checkpoint of half time is better on held-out text.
"""

import argparse
import pathlib

from safetensors.torch import load_file, save_file

ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
ap.add_argument("a", type=pathlib.Path)
ap.add_argument("b", type=pathlib.Path)
ap.add_argument("--share", type=float, default=0.5, help="weight of B")
ap.add_argument("--out", type=pathlib.Path, required=True)
args = ap.parse_args()
args.out.mkdir(parents=True, exist_ok=True)
for part in sorted(args.b.glob("*.safetensors")):
    a, b = load_file(args.a / part.name), load_file(part)
    save_file({k: ((1 - args.share) * a[k].float() + args.share * b[k].float()).to(b[k].dtype) for k in b}, args.out / part.name)
