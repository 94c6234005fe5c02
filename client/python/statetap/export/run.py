"""An export from beginning to end: rows chosen, a manifest, a file a row, resumed where it stopped."""
from __future__ import annotations

import hashlib
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from statetap.checkpoint import Checkpoint
from statetap.export.formats import Format
from statetap.export.speculators import ArrowRows, Speculators
from statetap.export.vocabulary import Counts, write_frequencies, write_maps
from statetap.files import replaced, write_json
from statetap.source import Entry, Source

MANIFEST, ROWS = "statetap-export.json", "statetap-rows.jsonl"


@dataclass
class Request:
    format: Format
    out: Path
    order: str = "shuffled"  # or stored
    seed: int = 0
    rows_only: bool = False
    draft_vocab: list[int] = field(default_factory=list)
    checkpoint: "Checkpoint | None" = None
    vocab: int = 0  # of the target; 0: no counts


@dataclass
class Result:
    rows: int
    tokens: int
    written: int  # files; the others were there
    left_out: list[str]  # ids of samples without a supervised token behind the first
    train_rows: int  # before those of the split "eval"


class Progress:
    """A line on standard error, a few times a second on a terminal, every 30 s elsewhere."""

    def __init__(self, what: str, total: int, quiet: bool) -> None:
        self.what, self.total, self.quiet = what, total, quiet
        self.begin = self.last = time.monotonic()
        self.bytes = 0

    def show(self, done: int, more_bytes: int = 0) -> None:
        self.bytes += more_bytes
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if self.quiet or (done < self.total and now - self.last < (0.2 if terminal else 30)):
            return
        self.last = now
        rate = f" · {self.bytes / max(now - self.begin, 1e-9) / 1e6:,.0f} MB/s" if self.bytes else ""
        end = "\n" if done == self.total or not terminal else ""
        print(f"{chr(13) if terminal else ''}{self.what} {done:,}/{self.total:,}{rate}", end=end, file=sys.stderr, flush=True)


def export(source: Source, request: Request, quiet: bool = False) -> Result:
    if request.format.post_norm and request.checkpoint is None and not request.rows_only:
        raise ValueError(f"{request.format.name} takes the final state behind the final norm, which the base model's weights give: name its folder with --model")
    if not request.rows_only and source.layers not in source.boundaries:
        raise ValueError("the final state was not captured (--no-final), and every trainer needs it: capture again with `statetap submit --from JOB`")
    entries = source.ordered(request.order, request.seed)
    _claim(request, _configuration(source, request, entries))
    kept, left_out = _write_rows(source, request, entries, quiet)
    written = 0 if request.rows_only else _write_states(source, request, kept, quiet)
    manifest = json.loads((request.out / MANIFEST).read_text())
    write_json(request.out / MANIFEST, {**manifest, "rows": len(kept), "left_out": left_out, "complete": True})
    return Result(len(kept), sum(e.tokens for e in kept), written, left_out, sum(e.split != "eval" for e in kept))


def _configuration(source: Source, request: Request, entries: list[Entry]) -> dict[str, Any]:
    samples = hashlib.sha256("\n".join(f"{e.job}\0{e.id}\0{e.tokens}" for e in entries).encode()).hexdigest()
    taps = [b for b in source.boundaries if b != source.layers]
    return {
        "format": request.format.name, "samples": len(entries), "order": request.order, "seed": request.seed,
        "rows_only": request.rows_only, "taps": taps, "tap_layer_outputs": [b - 1 for b in taps], "final_boundary": source.layers,
        "final_norm": "post" if request.format.post_norm else "pre", "hidden": source.hidden, "model_name": source.attributes.get("model_name", ""),
        "model_digest": source.attributes.get("model_digest", ""), "rms_norm_eps": source.attributes.get("rms_norm_eps"), "samples_digest": samples,
    }  # fmt: skip


def _claim(request: Request, configuration: dict[str, Any]) -> None:
    """The folder is new, or holds the same export."""
    request.out.mkdir(parents=True, exist_ok=True)
    manifest = request.out / MANIFEST
    if manifest.exists():
        there = json.loads(manifest.read_text())
        for name, value in configuration.items():
            if there.get(name) != value:
                raise ValueError(f"--out {request.out} holds another export: {name} is {there.get(name)!r} there and {value!r} here; give a new folder")
    elif any(request.out.iterdir()):
        raise ValueError(f"--out {request.out} is not empty and holds no export; give a new folder")
    write_json(manifest, {**configuration, "complete": False})


def _write_rows(source: Source, request: Request, entries: list[Entry], quiet: bool) -> "tuple[list[Entry], list[str]]":
    """Everything but states: which samples become rows, their tokens, the counts. Made again by a run that resumes, with the same result."""
    is_speculators = isinstance(request.format, Speculators)
    arrow = ArrowRows(request.out) if is_speculators else None
    counts = Counts(request.vocab) if request.vocab else None
    kept, left_out, progress = [], [], Progress("tokens", len(entries), quiet)
    for entry, sample in zip(entries, source.read(entries, boundaries=[])):
        if sample.loss_mask[1:].any():
            kept.append(entry)
            if arrow is not None:
                arrow.add(sample)
            if counts is not None:
                counts.add(sample.source, sample.input_ids, sample.loss_mask)
        else:
            left_out.append(entry.id)
        progress.show(len(kept) + len(left_out))
    if not kept:
        raise ValueError(f"none of {len(entries)} samples has a supervised token behind its first")
    if arrow is not None:
        arrow.finish()
    with replaced(request.out / ROWS) as file:
        for row, entry in enumerate(kept):
            file.write((json.dumps({"row": row, "job": entry.job, "id": entry.id, "tokens": entry.tokens}) + "\n").encode())
    if counts is not None:
        if is_speculators:
            write_frequencies(request.out, counts)
        for size in request.draft_vocab:
            write_maps(request.out, counts, size)
    return kept, left_out


def _write_states(source: Source, request: Request, kept: list[Entry], quiet: bool) -> int:
    for folder in {(request.out / request.format.file(row)).parent for row in range(len(kept))}:
        folder.mkdir(parents=True, exist_ok=True)
    missing = sorted((row for row in range(len(kept)) if not (request.out / request.format.file(row)).exists()), key=lambda row: kept[row].place)
    progress = Progress("files", len(missing), quiet)
    for done, (row, sample) in enumerate(zip(missing, source.read([kept[row] for row in missing])), 1):
        path = request.out / request.format.file(row)
        request.format.write(path, row, sample, request.checkpoint if request.format.post_norm else None)
        progress.show(done, path.stat().st_size)
    return len(missing)
