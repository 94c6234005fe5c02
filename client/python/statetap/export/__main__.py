"""`statetap export` and `statetap vocab-map`: python -m statetap.export (the command line calls it)."""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import grpc

from statetap.checkpoint import Checkpoint
from statetap.client import connect
from statetap.errors import StatetapError
from statetap.export.angelslim import AngelSlim
from statetap.export.formats import Format
from statetap.export.head import write_head
from statetap.export.modelopt import ModelOptimizer
from statetap.export.run import Request, export
from statetap.export.speculators import Speculators
from statetap.export.specforge import SpecForge
from statetap.export.torchspec import TorchSpec
from statetap.export.vocabulary import Counts, choose, covered, read_map, write_frequencies, write_maps
from statetap.source import Source

FORMATS: "dict[str, type[Format]]" = {f.name: f for f in (Speculators, SpecForge, TorchSpec, ModelOptimizer, AngelSlim)}
REPORTED = [8192, 16384, 32000, 32768, 65536]


def main(arguments: "list[str] | None" = None) -> int:
    parser = argparse.ArgumentParser(prog="statetap", description=__doc__.splitlines()[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    exporting = commands.add_parser("export", help="a trainer's files", description="Writes a trainer's files from jobs or shards.", allow_abbrev=False)
    exporting.add_argument("--to", required=True, choices=[*FORMATS, "head"], help="the trainer; head: embeddings, head, final norm and config alone")
    exporting.add_argument("--rows-only", action="store_true", help="speculators: rows and counts without states, for states that come from the server")
    exporting.add_argument("--order", choices=["shuffled", "stored"], default="shuffled", help="of the rows; train before eval either way [shuffled]")
    exporting.add_argument("--seed", type=int, default=0, help="of the shuffled order [0]")
    exporting.add_argument("--draft-vocab", type=int, action="append", default=[], metavar="N", help="writes the vocabulary map of this size, too")
    exporting.add_argument("--flat", action="store_true", help="head: the text model's config at the top level, for SpecForge")
    exporting.add_argument("--taps", type=_numbers, help="boundaries, as in 2,30,58 [all that are stored]")
    mapping = commands.add_parser("vocab-map", help="d2t and t2d from the supervised tokens", description="Writes d2t and t2d, from counted supervised tokens.", allow_abbrev=False)
    mapping.add_argument("--draft-vocab", type=int, action="append", default=[], metavar="N", help="draft tokens; may be given more than once")
    mapping.add_argument("--report", action="store_true", help="share of the supervised tokens that maps of several sizes have, by source")
    mapping.add_argument("--against", type=Path, metavar="OLD", help="an earlier map: what it has of these tokens, and how far the new one differs")
    for command in (exporting, mapping):
        command.add_argument("source", nargs="*", metavar="JOB|PATH", help="jobs of the server, or folders and files of shards")
        command.add_argument("--out", type=Path, help="folder to write to")
        command.add_argument("--where", default="", help="only samples that this expression holds for (docs/operate.md)")
        command.add_argument("--model", type=Path, metavar="DIR", help="the base model's folder: final norm, vocabulary size")
        command.add_argument("--server", help="HOST:PORT [STATETAP_SERVER, else 127.0.0.1:7070]")
        command.add_argument("--json", action="store_true")
        command.add_argument("--quiet", action="store_true")
    options = parser.parse_args(arguments)
    try:
        result = _vocab_map(options) if options.command == "vocab-map" else _head(options) if options.to == "head" else _export(options)
    except (ValueError, FileNotFoundError, ImportError) as error:
        print(f"statetap: {error}", file=sys.stderr)
        return 2
    except StatetapError as error:
        print(f"statetap: {error}", file=sys.stderr)
        return 2 if error.code == grpc.StatusCode.INVALID_ARGUMENT else 1
    except (KeyError, OSError) as error:
        print(f"statetap: {error.args[0] if isinstance(error, KeyError) else error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("statetap: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130
    print(json.dumps(result) if options.json else "\n".join(result["text"]))
    return 0


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _needed(options: argparse.Namespace, *names: str) -> None:
    missing = [name for name in names if not getattr(options, name)]
    if missing:
        raise ValueError(f"{' and '.join('JOB|PATH' if n == 'source' else '--' + n.replace('_', '-') for n in missing)} must be given")


def _vocabulary(options: argparse.Namespace) -> int:
    """Of the target; 0 where nobody can say."""
    if options.model:
        return int(Checkpoint(options.model).text["vocab_size"])
    try:
        with connect(options.server) as client:
            return client.model().vocab
    except StatetapError:
        return 0


def _export(options: argparse.Namespace) -> dict[str, Any]:
    _needed(options, "source", "out")
    if options.rows_only and options.to != "speculators":
        raise ValueError(f"--rows-only: only speculators takes states from elsewhere, not {options.to}")
    vocab = _vocabulary(options) if options.to == "speculators" or options.draft_vocab else 0
    if options.draft_vocab and not vocab:
        raise ValueError("--draft-vocab needs the target's vocabulary size: name the base model's folder with --model")
    source = Source(options.source, server=options.server, taps=options.taps, where=options.where)
    request = Request(FORMATS[options.to](), options.out, options.order, options.seed, options.rows_only, options.draft_vocab,
                      Checkpoint(options.model) if options.model else None, vocab)  # fmt: skip
    done = export(source, request, options.quiet)
    taps = [b for b in source.boundaries if b != source.layers]
    text = [
        f"{options.out}: {done.rows:,} rows, {done.tokens:,} tokens" + (", without states" if options.rows_only else f", {done.written:,} files written"),
        f"taps {', '.join(map(str, taps))} (outputs of layers {', '.join(str(b - 1) for b in taps)}), final state "
        + ("behind" if request.format.post_norm else "before") + " the final norm",
    ]  # fmt: skip
    if done.left_out:
        text.append(f"{len(done.left_out):,} samples have no supervised token behind their first and are no rows: {', '.join(done.left_out[:5])}{', …' if len(done.left_out) > 5 else ''}")
    if options.to == "speculators" and not vocab:
        text.append("no token_freq.pt: the target's vocabulary size is not known; name the base model's folder with --model")
    if 0 < done.train_rows < done.rows:
        text.append(f"the first {done.train_rows:,} rows are for training: --train-data-ratio {done.train_rows / done.rows:.6f} keeps the split")
    return {"rows": done.rows, "tokens": done.tokens, "written": done.written, "left_out": done.left_out, "train_rows": done.train_rows,
            "taps": taps, "text": text}  # fmt: skip


def _head(options: argparse.Namespace) -> dict[str, Any]:
    _needed(options, "model", "out")
    model = Checkpoint(options.model)
    write_head(model, options.out, options.flat)
    kind = "flat deepseek_v3" if options.flat else f"as {options.model} has it"
    return {"out": str(options.out), "flat": options.flat, "text": [f"{options.out}: embeddings, head and final norm, config {kind}"]}


def _vocab_map(options: argparse.Namespace) -> dict[str, Any]:
    _needed(options, "source")
    if not (options.report or options.draft_vocab or options.against):
        raise ValueError("give --draft-vocab N, --report or --against OLD")
    if options.draft_vocab:
        _needed(options, "out")
    vocab = _vocabulary(options)
    if not vocab:
        raise ValueError("the target's vocabulary size is not known: name the base model's folder with --model, or a running server")
    source = Source(options.source, server=options.server, taps=[], where=options.where)
    counts = Counts(vocab)
    for sample in source.read(source.entries, boundaries=[]):
        counts.add(sample.source, sample.input_ids, sample.loss_mask)
    total = counts.total
    result: dict[str, Any] = {"tokens": int(total.sum()), "distinct": int((total > 0).sum()), "vocab": vocab}
    text = [f"{result['tokens']:,} supervised tokens of {len(source.entries):,} samples, {result['distinct']:,} of {vocab:,} ids"]
    if options.report:
        result["coverage"], lines = report(counts)
        text += lines
    if options.against:
        old = read_map(options.against)
        if len(old) != vocab:
            raise ValueError(f"--against {options.against}: for a vocabulary of {len(old)}, the target has {vocab}")
        size = int(old.sum())
        _, new = choose(total, size)
        result["against"] = {"size": size, "coverage": covered(total, old), "new_coverage": covered(total, new), "kept": int((old & new).sum())}
        text.append(f"{options.against}: {size:,} tokens cover {covered(total, old):.4%}; a new map of that size {covered(total, new):.4%}, with {int((old & new).sum()):,} tokens of the old")
    if options.draft_vocab:
        options.out.mkdir(parents=True, exist_ok=True)
        write_frequencies(options.out, counts)
        for size in options.draft_vocab:
            write_maps(options.out, counts, size)
            text.append(f"{options.out}/d2t-{size}.npy, t2d-{size}.npy, vocab_mapping-{size}.pt: {covered(total, choose(total, size)[1]):.4%} of the supervised tokens")
    return {**result, "text": text}


def report(counts: Counts) -> "tuple[dict[str, dict[str, float]], list[str]]":
    """Share of the counted tokens that maps of several sizes have, by source, and the same as text."""
    sizes = [size for size in REPORTED if size < counts.vocab] or [counts.vocab]
    chosen = {size: choose(counts.total, size)[1] for size in sizes}
    rows = {"all": counts.total, **{source or "(none)": counts.by_source[source] for source in sorted(counts.by_source)}}
    table = {name: {str(size): covered(row, chosen[size]) for size in sizes} for name, row in rows.items()}
    width = max(map(len, rows))
    lines = [" " * width + "".join(f"{size:>10,}" for size in sizes)]
    lines += [f"{name:<{width}}" + "".join(f"{table[name][str(size)]:>10.3%}" for size in sizes) for name in rows]
    return table, lines


if __name__ == "__main__":
    sys.exit(main())
