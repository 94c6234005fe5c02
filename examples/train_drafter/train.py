#!/usr/bin/env python3
"""Trains a small EAGLE-3 drafter on the features of a running statetapd, start to end, and shows what three public mistakes cost.

    build/bin/statetapd --model models/tiny-kimi --data /tmp/statetap                       # in one terminal
    python examples/train_drafter/train.py --model models/tiny-kimi --out /tmp/drafter       # in another

Submits the prompts (greedy answers; every tenth chat is held out), streams the features and trains five drafters alike:
    right              taps at the boundaries that serving will give, row p beside token p+1, the final state normed once
    off by one         each tap one boundary too low
    shifted            states moved by one token against the text
    post-norm          a final state that was normed already and is normed again
    post-norm, spread  the same with a norm whose weights differ more: the model computes what it did (norm times s, head over s, with ln s
                       normal of deviation --spread), but a second norm costs more
Each is then measured as it would be served: with the right taps, on the held-out chats. Needs the package with torch; numbers and a picture go to --out.
"""
import argparse
import copy
import json
import time
from pathlib import Path

import statetap
import torch
from statetap import accept
from statetap.checkpoint import EMBEDDINGS, HEAD, Checkpoint
from statetap.drafter import Drafter, DrafterConfig, save
from statetap.export.vocabulary import Counts, choose
from statetap.sample import float32

CASES = ("right", "off by one", "shifted", "post-norm", "post-norm, spread")
FOLDER = Path(__file__).resolve().parent


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default=None, help="HOST:PORT [127.0.0.1:7070]")
    parser.add_argument("--model", type=Path, required=True, help="the served model's folder")
    parser.add_argument("--prompts", type=Path, default=FOLDER / "prompts_1000.jsonl")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--taps", type=lambda text: [int(t) for t in text.split(",")], help="boundaries [the server's default]")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--draft-vocab", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3, help="draft steps in training and measuring")
    parser.add_argument("--batch", type=int, default=4, help="samples an update")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--spread", type=float, default=1.5, help="of the last case [1.5]")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()

    def say(text):
        print(f"{time.monotonic() - begin:6.1f} s  {text}", flush=True)

    client = statetap.connect(options.server)
    taps = options.taps or list(client.model().taps)
    captured = sorted({b for tap in taps for b in (tap, tap - 1)})
    job = client.submit(options.prompts, name=f"drafter {captured}", temperature=0, max_new_tokens=128, taps=captured, eval_fraction=0.1)
    say(f"{job.id}: {job.counts.submitted} chats, taps {taps}")
    client.wait(job)
    say("captured")

    model = Model(options.model, options.device)
    counts = Counts(model.vocab)
    for sample in client.stream(job, group=f"counts {time.time()}", taps=[]):
        if sample.split == "train":
            counts.add(sample.source, sample.input_ids, sample.loss_mask)
    d2t, t2d = choose(counts.total, options.draft_vocab)
    # One fetch for all cases and epochs: the features of this example fit into memory.
    train = [s for batch in statetap.FeatureStream(job, server=client.server, where='split == "train"', batch_size=options.batch).batches() for s in batch]
    held_out = list(client.stream(job, group=f"held out {time.time()}", where='split == "eval"'))

    results = {}
    for case in options.cases:
        teacher = model.spread(options.spread) if "spread" in case else model
        targets = share_of_right_targets(case, held_out, taps, teacher)
        drafter, curve = fit(case, train, taps, teacher, torch.from_numpy(d2t), torch.from_numpy(t2d), options)
        measured = accept.joined(accept.measure(drafter, held_out, accept.Features(tuple(taps)), options.steps).values(), options.steps)
        save(drafter, options.out / case.replace(",", "").replace(" ", "-"), taps, torch.from_numpy(t2d))
        results[case] = {"accepted": measured.by_position.tolist(), "length": measured.length, "drafts": int(measured.drafts[0]), "loss": curve, "targets": targets}
        say(f"{case:<17} accepted by position {', '.join(f'{a:.3f}' for a in measured.by_position)}; mean length {measured.length:.3f}; "
            f"right targets {targets:.3f}; last loss {curve[-1]:.2f}")
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "results.svg").write_text(picture(results))
    print(f"{options.out}/results.json, results.svg; measure again: python -m statetap.accept {options.out}/right --data {job.id} --model {options.model} --where 'split == \"eval\"'")


class Model:
    """The parts of the served model that training needs."""

    def __init__(self, folder, device):
        checkpoint = Checkpoint(folder)
        self.embeddings, self.head = (torch.from_numpy(float32(checkpoint.bits(name))).to(device) for name in (EMBEDDINGS, HEAD))
        self.norm, self.eps = torch.from_numpy(float32(checkpoint.bits("model.norm.weight"))).to(device), checkpoint.eps
        self.vocab, self.hidden = self.head.shape

    def spread(self, deviation):
        """The same logits from a norm whose weights spread: what the norm is multiplied by, the head is divided by."""
        other, random = copy.copy(self), torch.Generator().manual_seed(0)
        scale = torch.exp(deviation * torch.randn(self.hidden, generator=random)).to(self.norm.device)
        other.norm, other.head = self.norm * scale, self.head / scale
        return other

    def final_norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.norm


def features(case, sample, taps, model, device):
    """What a trainer that makes this mistake would have: taps [S, taps, hidden] and the state that the head is applied to [S, hidden]."""
    states = {boundary: state.to(device).float() for boundary, state in sample.states.items()}
    stacked = torch.stack([states[tap - 1 if case == "off by one" else tap] for tap in taps], 1)
    final = model.final_norm(states[sample.layers])
    if case.startswith("post-norm"):
        final = model.final_norm(final)
    if case == "shifted":
        stacked, final = stacked.roll(1, 0), final.roll(1, 0)
    return stacked, final


@torch.no_grad()
def share_of_right_targets(case, samples, taps, model):
    """How often the most likely token of what this case teaches is the one that the model wrote (greedily: always, without a mistake)."""
    right = total = 0
    for sample in samples:
        sample = sample.torch()
        _, final = features(case, sample, taps, model, model.head.device)
        written = sample.input_ids[1:][sample.loss_mask[1:] == 1].to(model.head.device)
        taught = (final[:-1][sample.loss_mask[1:] == 1] @ model.head.T).argmax(-1)
        right, total = right + int((taught == written).sum()), total + len(written)
    return right / total


def fit(case, samples, taps, model, d2t, t2d, options):
    torch.manual_seed(0)
    device = options.device
    config = DrafterConfig(hidden=model.hidden, intermediate=4 * model.hidden, num_heads=8, num_kv_heads=8, head_dim=model.hidden // 8, vocab=model.vocab,
                           draft_vocab=len(d2t), num_taps=len(taps), eps=1e-5, rope={"rope_theta": 10000.0})  # fmt: skip
    drafter = Drafter(config, model.embeddings).to(device)
    drafter.d2t.copy_(d2t)
    head = model.head[t2d.to(device)]
    updates = options.epochs * (len(samples) // options.batch)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=options.lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=updates, pct_start=0.05)
    losses, order = [], torch.Generator().manual_seed(0)
    for epoch in range(options.epochs):
        places = torch.randperm(len(samples), generator=order).tolist()
        for begin in range(0, len(places) - options.batch + 1, options.batch):
            batch = [samples[p] for p in places[begin : begin + options.batch]]
            loss = loss_of(drafter, batch, [features(case, sample, taps, model, device) for sample in batch], head, options.steps)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
    curve = [float(sum(part) / len(part)) for part in (losses[i : i + 20] for i in range(0, len(losses), 20))]
    return drafter.eval(), curve


def loss_of(drafter, batch, features, head, steps):
    """Cross entropy with the target's own distribution over the draft vocabulary (`head`'s rows); row p of step j learns what the target says behind
    token p + j. The samples go through the drafter one after another, at once."""
    taps, final = (torch.cat(parts) for parts in zip(*features))
    ids = torch.cat([sample.input_ids for sample in batch]).to(taps.device)
    mask = torch.cat([sample.loss_mask for sample in batch]).to(taps.device)
    documents = torch.repeat_interleave(torch.tensor([len(sample) for sample in batch])).to(taps.device)
    with torch.no_grad():
        wanted = (final @ head.T).softmax(-1)
    total = 0.0
    for step, logits in enumerate(drafter(taps, ids, steps, documents), 1):
        rows = len(ids) - step - 1
        weight = mask[step + 1 :] * (documents[:rows] == documents[step + 1 :])
        each = -(wanted[step : step + rows] * logits[:rows].log_softmax(-1)).sum(-1)
        total = total + 0.8 ** (step - 1) * (each * weight).sum() / weight.sum().clamp(min=1)
    return total


def picture(results):
    """Bars of the mean accepted length, as SVG."""
    width, left, row, top = 640, 160, 44, 40
    longest = max(result["length"] for result in results.values())
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top + row * len(results) + 16}" font-family="sans-serif" font-size="14">',
             '<rect width="100%" height="100%" fill="white"/>', '<text x="16" y="24">Tokens a verification, held-out chats (served with the right taps)</text>']
    for i, (case, result) in enumerate(results.items()):
        y, length = top + row * i, (width - left - 70) * result["length"] / longest
        colour = "#2a7f62" if case == "right" else "#b9553d"
        parts += [f'<text x="16" y="{y + 22}">{case}</text>', f'<rect x="{left}" y="{y + 4}" width="{length:.0f}" height="26" fill="{colour}"/>',
                  f'<text x="{left + length + 8:.0f}" y="{y + 22}">{result["length"]:.2f}</text>']
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
