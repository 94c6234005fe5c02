"""How many tokens of a drafter would be accepted, measured on stored features: python -m statetap.accept DRAFTER --data JOB|PATH.

A draft begins behind every token whose next but one is the assistant's; the target has written token p+1 by itself, then step 1 drafts token p+2 and so on.
A drafted token is accepted where it is the most likely of the drafter and equals the stored text, and all before it were. For samples that were answered
greedily this is what an engine's greedy decoding accepts; for sampled text it is less than an engine's rejection sampling would accept.
"""
from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterable

import numpy as np

from statetap.checkpoint import Checkpoint
from statetap.drafter import Drafter, load, named_taps
from statetap.errors import StatetapError
from statetap.sample import Sample
from statetap.source import Source

import torch  # behind drafter, which says what is missing


@dataclass
class Acceptance:
    """accepted[j]: drafts whose first j + 1 tokens were accepted, of `drafts[j]` that had so many tokens to compare with."""

    steps: int
    drafts: np.ndarray = field(init=False)
    accepted: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.drafts, self.accepted = np.zeros(self.steps, np.int64), np.zeros(self.steps, np.int64)

    def add(self, other: "Acceptance") -> None:
        self.drafts += other.drafts
        self.accepted += other.accepted

    @property
    def by_position(self) -> np.ndarray:
        """Share of drafts accepted up to and including each position."""
        shares: np.ndarray = self.accepted / np.maximum(1, self.drafts)
        return shares

    @property
    def length(self) -> float:
        """Mean tokens a verification: those accepted and the one that the target adds."""
        return 1.0 + float(self.by_position.sum())


@dataclass(frozen=True)
class Features:
    """Which boundaries are fed to the drafter; `post_norm`: the final one, if among them, behind the final norm."""

    boundaries: "tuple[int, ...]"
    post_norm: bool = False

    def of(self, sample: Sample, model: "Checkpoint | None") -> torch.Tensor:
        bits = [sample.states[b] for b in self.boundaries]
        if self.post_norm and model is not None:
            bits = [model.final_norm(x) if b == sample.layers else x for b, x in zip(self.boundaries, bits)]
        return torch.from_numpy(np.stack(bits, 1).view(np.int16)).view(torch.bfloat16)

    def __str__(self) -> str:
        return ", ".join(map(str, self.boundaries)) + (" (final behind the norm)" if self.post_norm else "")


@torch.no_grad()
def accept(drafter: Drafter, sample: Sample, taps: torch.Tensor, steps: int) -> Acceptance:
    """taps [S, taps, hidden]."""
    device = drafter.embeddings.device
    ids, mask = torch.as_tensor(sample.input_ids).to(device), torch.as_tensor(sample.loss_mask).to(device).bool()
    result = Acceptance(steps)
    alive = torch.ones(max(0, len(ids) - 2), dtype=torch.bool, device=device)
    if not len(alive):
        return result
    begins = mask[2:]
    for step, logits in enumerate(drafter(taps.to(device), ids, steps), 1):
        rows = len(ids) - step - 1  # those whose token p + step + 1 is known
        if rows <= 0:
            break
        right = drafter.target_ids(logits[:rows].argmax(-1)) == ids[step + 1 :]
        alive = alive[:rows] & right
        counted = begins[:rows] & mask[step + 1 :]
        result.drafts[step - 1] = int(counted.sum())
        result.accepted[step - 1] = int((alive & counted).sum())
    return result


def measure(drafter: Drafter, samples: Iterable[Sample], features: Features, steps: int, model: "Checkpoint | None" = None) -> "dict[str, Acceptance]":
    """By source."""
    found: dict[str, Acceptance] = {}
    for sample in samples:
        found.setdefault(sample.source, Acceptance(steps)).add(accept(drafter, sample, features.of(sample, model), steps))
    return found


def joined(parts: Iterable[Acceptance], steps: int) -> Acceptance:
    total = Acceptance(steps)
    for part in parts:
        total.add(part)
    return total


def search(drafter: Drafter, samples: "list[Sample]", steps: int, model: "Checkpoint | None") -> "list[tuple[Features, Acceptance]]":
    """All ascending choices of the stored boundaries, best first; with a checkpoint the final one before and behind its norm."""
    stored, layers = samples[0].boundaries, samples[0].layers
    candidates = [Features(c) for c in itertools.combinations(stored, drafter.config.num_taps)]
    if model is not None:
        candidates += [Features(c.boundaries, True) for c in candidates if layers in c.boundaries]
    results = [(c, joined(measure(drafter, samples, c, steps, model).values(), steps)) for c in candidates]
    return sorted(results, key=lambda result: -result[1].length)


def main(arguments: "list[str] | None" = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m statetap.accept", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("drafter", type=Path, help="folder with config.json and safetensors")
    parser.add_argument("--data", nargs="+", required=True, metavar="JOB|PATH", help="jobs of the server, or folders and files of shards")
    parser.add_argument("--taps", type=lambda text: [int(t) for t in text.split(",")], help="boundaries, as in 2,30,58 [the drafter's config]")
    parser.add_argument("--where", default="", help="only samples that this expression holds for")
    parser.add_argument("--model", type=Path, help="the base model's folder: embeddings, final norm")
    parser.add_argument("--steps", type=int, default=3, help="drafted tokens [3]")
    parser.add_argument("--samples", type=int, default=0, metavar="N", help="at most N samples, drawn at random [all; 64 with --search]")
    parser.add_argument("--by", choices=["source"], help="a row a source as well")
    parser.add_argument("--search", action="store_true", help="try every choice of the stored boundaries and name the best")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--server", help="HOST:PORT [STATETAP_SERVER, else 127.0.0.1:7070]")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        result, text = _run(options)
    except (ValueError, FileNotFoundError, ImportError) as error:
        print(f"accept: {error}", file=sys.stderr)
        return 2
    except StatetapError as error:
        print(f"accept: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result) if options.json else "\n".join(text))
    return 0


def _run(options: argparse.Namespace) -> "tuple[dict[str, object], list[str]]":
    if options.steps < 1:
        raise ValueError(f"--steps {options.steps}: give 1 or more")
    model = Checkpoint(options.model) if options.model else None
    drafter = load(options.drafter, model).to(options.device)
    named = named_taps(json.loads((options.drafter / "config.json").read_text()))
    taps = options.taps or named
    if taps is None and not options.search:
        raise ValueError(f"{options.drafter}: its config names no taps; give --taps, or --search")
    if taps is not None and len(taps) != drafter.config.num_taps:
        raise ValueError(f"--taps {taps}: the drafter takes {drafter.config.num_taps}")
    source = Source(options.data, server=options.server, taps=None if options.search else taps, where=options.where)
    if source.hidden != drafter.config.hidden:
        raise ValueError(f"the drafter is for states of {drafter.config.hidden}, these have {source.hidden}")
    limit = options.samples or (64 if options.search else len(source.entries))
    chosen = source.ordered("shuffled", 0)[:limit] if limit < len(source.entries) else source.entries
    if options.search:
        ranked = search(drafter, list(source.read(chosen)), options.steps, model)
        rows = [{"taps": list(f.boundaries), "post_norm": f.post_norm, "length": a.length, "by_position": a.by_position.tolist()} for f, a in ranked]
        text = [f"{len(chosen)} samples; the best of {len(ranked)} choices: boundaries {ranked[0][0]}", *(f"{a.length:8.3f}  {f}" for f, a in ranked[:10])]
        if named is not None and sorted(named) != list(ranked[0][0].boundaries):
            text.append(f"the drafter's config names {named}")
        return {"search": rows, "named": named}, text
    assert taps is not None  # refused above
    parts = measure(drafter, source.read(chosen), Features(tuple(taps)), options.steps, model)
    total = joined(parts.values(), options.steps)
    shown = {"all": total, **({name or "(none)": parts[name] for name in sorted(parts)} if options.by else {})}
    width = max(map(len, shown))
    text = [f"{len(chosen):,} samples, {int(total.drafts[0]):,} drafts, boundaries {', '.join(map(str, taps))}",
            " " * width + "".join(f"{'token ' + str(j + 1):>10}" for j in range(options.steps)) + "    length"]  # fmt: skip
    text += [f"{name:<{width}}" + "".join(f"{share:>10.3f}" for share in a.by_position) + f"{a.length:>10.3f}" for name, a in shown.items()]
    return {name: {"drafts": a.drafts.tolist(), "by_position": a.by_position.tolist(), "length": a.length} for name, a in shown.items()}, text


if __name__ == "__main__":
    sys.exit(main())
