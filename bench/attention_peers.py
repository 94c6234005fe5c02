#!/usr/bin/env python3
"""Attention of prompts (heads of 192 and 128, causal, 8 heads) beside torch's scaled_dot_product_attention by each of its back ends, in one run,
turn by turn: microseconds, TFLOP/s, error against fp32. Theirs get equal lengths as a batch, with keys laid out for them beforehand; ours is packed
and reads the expanded keys and the latents as the model leaves them.

    attention_peers.py libstatetap_peers.so [--sustained]
"""
import argparse
import ctypes
import math

import torch
from graph_timing import graph_of, interleaved
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, SCALE = 8, 1 / math.sqrt(192)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("library")
    ap.add_argument("--sustained", action="store_true", help="no rest between launches")
    args = ap.parse_args()
    ours = ctypes.CDLL(args.library).statetap_attend_prompts
    pointer = lambda tensor: ctypes.c_void_p(tensor.data_ptr())
    for seqs, length in [(1, 2048), (4, 2048), (16, 2048), (1, 8192), (4, 8192), (1, 32768)]:
        n = seqs * length
        new = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        queries, expanded, latents, out = new(n, HEADS, 192), new(n, HEADS, 256), new(n, 576), new(n, HEADS, 128)
        q = queries.view(seqs, length, HEADS, 192).transpose(1, 2).contiguous()
        rotated = latents[:, 512:].view(n, 1, 64).expand(n, HEADS, 64)
        k = torch.cat([expanded[..., :128], rotated], -1).view(seqs, length, HEADS, 192).transpose(1, 2).contiguous()
        v = expanded[..., 128:].reshape(seqs, length, HEADS, 128).transpose(1, 2).contiguous()

        def run(portable, to=out):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            ours(pointer(queries), pointer(expanded), pointer(latents), seqs, length, HEADS, ctypes.c_float(SCALE), portable, pointer(to), stream)

        launches = {"ours": lambda: run(0), "ours portable": lambda: run(1)}
        for name, backend in [("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION), ("efficient", SDPBackend.EFFICIENT_ATTENTION)]:
            def theirs(backend=backend):
                with sdpa_kernel(backend):
                    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE)
            try:
                theirs()
                launches[name] = theirs
            except RuntimeError as error:
                print(f"  {name}: {str(error).splitlines()[0][:100]}")
        errors = {}
        for name, portable in [("ours", 0), ("ours portable", 1)]:
            out.fill_(float("nan"))
            run(portable)
            worst = 0.0
            for s in {0, seqs - 1}:
                rows = torch.arange(0, length, max(1, length // 512), device="cuda")
                scores = (q[s][:, rows].float() @ k[s].float().transpose(1, 2)) * SCALE
                scores.masked_fill_(torch.arange(length, device="cuda") > rows[:, None], -math.inf)
                want = (scores.softmax(-1) @ v[s].float()).transpose(0, 1)
                got = out.view(seqs, length, HEADS, 128)[s][rows].float()
                worst = max(worst, ((got - want).norm(dim=-1) / want.norm(dim=-1)).max().item())
            errors[name] = worst
        us = interleaved({name: graph_of(launch, 20) for name, launch in launches.items()}, 100 if args.sustained else 25, 0.0 if args.sustained else 0.02)
        flop = 2 * seqs * HEADS * length * (length + 1) / 2 * (192 + 128)
        best = min(time for name, time in us.items() if not name.startswith("ours"))
        print(f"{seqs} x {length}: " + ", ".join(f"{name} {time:.1f} us ({flop / time / 1e6:.0f} TF)" for name, time in us.items())
              + f" | best of theirs / ours {best / us['ours']:.2f} | worst error of a row {errors}", flush=True)


if __name__ == "__main__":
    main()
