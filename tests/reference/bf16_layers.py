#!/usr/bin/env python3
"""How far transformers' own bf16 is from fp32 in one layer, by cuda_reference_test's measure: what a tolerance for bf16 can ask.

Each layer of the bf16 model gets the fp32 reference's input; rows whose routing margin is below 4e-3, and those whose experts differ, are left out.

    bf16_layers.py CHECKPOINT REFERENCE.safetensors [--device cpu]
"""
import argparse
import pathlib

import torch
from hf_reference import build
from safetensors.torch import load_file

TOLERANCE, STREAM_ROUNDING, CLEAR_MARGIN = 1e-2, 3e-3, 4e-3


def forced(model, ids, inputs):
    """Outputs of each layer and its sorted experts, layer k fed inputs[k]."""
    outputs, experts, hooks = [], {}, []
    for k, layer in enumerate(model.model.layers):
        def feed(module, args, kwargs, k=k):
            x = inputs[k].to(model.dtype)[None]
            return ((x,) + args[1:], kwargs) if args else (args, dict(kwargs, hidden_states=x))

        def keep(module, args, output):
            outputs.append((output[0] if isinstance(output, tuple) else output).reshape(len(ids), -1).float())

        def route(module, args, kwargs, k=k):
            x = (args[0] if args else kwargs["hidden_states"])[0].float()
            scores = torch.sigmoid(x @ module.gate.weight.float().T) + module.gate.e_score_correction_bias.float()
            experts[k] = scores.topk(model.config.num_experts_per_tok, dim=-1).indices.sort(-1).values

        hooks += [layer.register_forward_pre_hook(feed, with_kwargs=True), layer.register_forward_hook(keep)]
        if hasattr(layer.mlp, "gate"):
            hooks.append(layer.mlp.register_forward_pre_hook(route, with_kwargs=True))
    model(torch.tensor([ids], device=inputs.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    return outputs, experts


@torch.no_grad()
def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("checkpoint", type=pathlib.Path)
    ap.add_argument("reference", type=pathlib.Path)
    ap.add_argument("--device", default="cpu")
    args = ap.parse_args()
    half, full = (build(args.checkpoint, dtype, 1e-5).to(args.device) for dtype in (torch.bfloat16, torch.float32))
    reference = load_file(args.reference)
    clear = within = flipped = 0
    worst_stream = worst_delta = 0.0
    for s in range(len(reference)):
        if f"{s}.ids" not in reference or len(reference[f"{s}.rows"]) != len(reference[f"{s}.ids"]):
            continue  # a layer needs every token's input
        ids, margins = reference[f"{s}.ids"].tolist(), reference[f"{s}.clear"]
        states = reference[f"{s}.H"].to(args.device)
        inputs = states.to(torch.bfloat16)
        outputs, experts = forced(half, ids, inputs)
        _, wanted = forced(full, ids, inputs)
        for k, output in enumerate(outputs):
            error, stream = (output - states[k + 1]).norm(dim=-1), states[k + 1].norm(dim=-1)
            of_stream = error / stream
            of_delta = (error - STREAM_ROUNDING * stream).clamp(min=0) / (states[k + 1] - states[k]).norm(dim=-1)
            same = (experts[k] == wanted[k]).all(-1) if k in experts else torch.ones(len(ids), dtype=torch.bool, device=args.device)
            is_clear = (margins[k + 1] >= CLEAR_MARGIN).to(args.device)
            flipped += int((is_clear & ~same).sum())
            rows = is_clear & same
            clear += int(rows.sum())
            within += int((rows & (of_stream <= TOLERANCE) & (of_delta <= TOLERANCE)).sum())
            if rows.any():
                worst_stream, worst_delta = max(worst_stream, of_stream[rows].max().item()), max(worst_delta, of_delta[rows].max().item())
    print(f"{args.checkpoint.name}, transformers in bf16: worst relative error of a layer {worst_stream:.1e} of the stream, {worst_delta:.1e} of what it adds; "
          f"{100 * within / max(1, clear):.1f} % of {clear} clear rows within 1e-2; {flipped} more went another way")


if __name__ == "__main__":
    main()
