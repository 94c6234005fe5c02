#!/usr/bin/env python3
"""Keeps of hf_reference.py's output what a test needs: all rows of short samples, every 97th and the last 8 of long ones.

    thin.py ref.safetensors out.safetensors [SHORT]     samples of at most SHORT tokens [80] are kept whole

Saved for sample s: s.ids [S] int32, s.rows [R] int32 (positions kept), s.H [boundaries, R, hidden] f32, s.post [R, hidden] f32,
s.argmax [S] int32, s.margin [S] f32 (top-1 minus top-2 logit), s.clear [layers + 1, S] f32: the smallest routing margin that the token
met before boundary k (infinity before the first MoE layer).
"""
import sys
import torch
from safetensors.torch import load_file, save_file

ref, out = load_file(sys.argv[1]), {}
short = int(sys.argv[3]) if len(sys.argv) > 3 else 80
for s in sorted({int(k.split(".")[0]) for k in ref}):
    ids, states, margin = ref[f"{s}.ids"], ref[f"{s}.H"], ref[f"{s}.route_margin"]
    n, dense = len(ids), states.shape[0] - 1 - margin.shape[0]
    rows = torch.tensor([i for i in range(n) if n <= short or i % 97 == 0 or i >= n - 8])
    clear = torch.full((states.shape[0], n), float("inf"))
    for layer in range(margin.shape[0]):
        clear[dense + layer + 1] = torch.minimum(clear[dense + layer], margin[layer])
    out |= {f"{s}.ids": ids.int(), f"{s}.rows": rows.int(), f"{s}.H": states[:, rows].contiguous(), f"{s}.post": ref[f"{s}.post"][rows].contiguous(),
            f"{s}.argmax": ref[f"{s}.argmax"].int(), f"{s}.margin": ref[f"{s}.margin"], f"{s}.clear": clear}
save_file(out, sys.argv[2])
