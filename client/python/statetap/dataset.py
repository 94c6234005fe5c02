"""Samples of shard files by number, for a DataLoader."""
from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Iterable, Sequence

import numpy as np

from statetap import where as filters
from statetap.sample import Sample
from statetap.shard import Shard


class ShardDataset:
    """A map-style dataset over shards: `len(dataset)`, `dataset[i]` gives a Sample.

    paths       a folder (searched below for *.h5), a file, or several of either
    taps        boundaries to read, ascending, the final one apart; the others are not touched. Default: all taps that are stored
    final       read the final state as well. Default: where it is stored
    where       an expression over the samples (docs/operate.md)
    as_torch    samples hold torch tensors rather than numpy arrays

    Samples lie in the order of the files' names, within a file as stored. Opening reads a footer and a small table a file, and with `where`
    what it asks for. No file stays open in the dataset: each process keeps at most 32 descriptors of its own, so that it works with any number
    of shards, with DataLoader workers (fork or spawn) and with threads.

    Sampling in random order reads from many shards; `dataset.lengths` lets a batch sampler group samples of like length.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        taps: Sequence[int] | None = None,
        final: bool | None = None,
        where: str = "",
        as_torch: bool = False,
    ) -> None:
        self.shards = [Shard(path) for path in find_shards(paths)]
        first = self.shards[0]
        for shard in self.shards:
            if (shard.hidden, shard.layers) != (first.hidden, first.layers):
                raise ValueError(f"{shard.path} is of a model with {shard.layers} layers of {shard.hidden}, {first.path} of one with {first.layers} of {first.hidden}")
        self.hidden, self.layers, self.as_torch = first.hidden, first.layers, as_torch
        self.boundaries = self._choose(taps, final)
        self.where = where
        self._shard, self._sample = self._select(filters.parse(where), filters.fields_of(where))
        offsets = [shard.row_offset for shard in self.shards]
        lengths = np.concatenate([np.diff(o) for o in offsets])
        starts = np.cumsum([0] + [len(shard) for shard in self.shards])
        #: Tokens of each sample: int64 [len].
        self.lengths: np.ndarray = lengths[starts[self._shard] + self._sample]

    def _choose(self, taps: Sequence[int] | None, final: bool | None) -> tuple[int, ...]:
        stored = self.shards[0].boundaries
        wanted = tuple(b for b in stored if b != self.layers) if taps is None else tuple(taps)
        if list(wanted) != sorted(set(wanted)):
            raise ValueError(f"taps {list(wanted)}: give boundaries in ascending order, each once")
        if final or (final is None and self.layers in stored):
            wanted = wanted + (() if self.layers in wanted else (self.layers,))
        for shard in self.shards:
            missing = [b for b in wanted if b not in shard.boundaries]
            if missing:
                raise ValueError(f"taps {missing}: {shard.path} holds boundaries {list(shard.boundaries)}; boundary k is the output of layer k - 1")
            if wanted and shard.dtype == "none":
                raise ValueError(f"{shard.path}: its states were evicted; capture them again with `statetap submit --from {shard.job}`")
        return wanted

    def _select(self, holds: filters.Predicate, fields: set[str]) -> tuple[np.ndarray, np.ndarray]:
        chosen = []
        for number, shard in enumerate(self.shards):
            keep = np.arange(len(shard)) if not fields else np.array([i for i, facts in enumerate(_facts(shard, fields)) if holds(facts)], np.int64)
            chosen.append(np.stack([np.full(len(keep), number), keep], 1))
        table = np.concatenate(chosen)
        if len(table) == 0:
            raise ValueError(f"where {self.where!r} holds for none of {sum(map(len, self.shards))} samples")
        return table[:, 0], table[:, 1]

    def __len__(self) -> int:
        return len(self._shard)

    def __getitem__(self, i: int) -> Sample:
        shard, place = self.locate(i)
        sample = shard.sample(place, self.boundaries)
        return sample.torch() if self.as_torch else sample

    def locate(self, i: int) -> "tuple[Shard, int]":
        """The file of sample i, and its place there."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        return self.shards[int(self._shard[i])], int(self._sample[i])

    def ids(self) -> list[str]:
        """Of the samples, in the dataset's order."""
        return [shard.column("id")[place] for shard, place in map(self.locate, range(len(self)))]

    def attributes(self) -> dict[str, Any]:
        """The first file's: model, digests, eps, template (docs/shard-format.md)."""
        return self.shards[0].attributes()


def find_shards(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Shard files in the order of their names. FileNotFoundError where there are none."""
    found: list[Path] = []
    for path in map(Path, [paths] if isinstance(paths, (str, os.PathLike)) else paths):
        if path.is_dir():
            below = sorted(path.rglob("*.h5"))
            if not below:
                raise FileNotFoundError(f"{path}: no shards (*.h5) below this folder")
            found += below
        elif path.exists():
            found.append(path)
        else:
            raise FileNotFoundError(f"{path}: no such file or folder")
    if not found:
        raise FileNotFoundError("no shards were named")
    return found


_COLUMNS = {"id": "id", "source": "source", "split": "split", "finish": "finish_reason", "index": "source_index", "prompt_tokens": "prompt_tokens",
            "truncated": "truncated", "meta_json": "meta"}  # fmt: skip
_COUNTED = {"supervised_tokens", "generated_tokens", "logprob"}


def _facts(shard: Shard, fields: set[str]) -> Iterable[dict[str, Any]]:
    """What `where` knows of each sample."""
    wanted = {name: column for name, column in _COLUMNS.items() if name in fields}
    if fields & _COUNTED:
        wanted |= {"finish": "finish_reason", "prompt_tokens": "prompt_tokens"}
    shard.load_columns(list(wanted.values()))
    offsets = shard.row_offset
    for i in range(len(shard)):
        begin, end = int(offsets[i]), int(offsets[i + 1])
        facts = {name: shard.column(column)[i] for name, column in wanted.items()}
        facts = {name: value.item() if isinstance(value, np.generic) else value for name, value in facts.items()}
        if "truncated" in facts:
            facts["truncated"] = bool(facts["truncated"])
        facts["tokens"] = end - begin
        if "supervised_tokens" in fields:
            facts["supervised_tokens"] = int(shard.tokens("loss_mask", begin, end).sum())
        if fields & _COUNTED:
            generated = facts["finish"] != "prefill"  # nothing was sampled of a text that was given
            facts["generated_tokens"] = end - begin - facts["prompt_tokens"] if generated else 0
            if "logprob" in fields and generated:
                sampled: np.ndarray = shard.tokens("logprob", begin + facts["prompt_tokens"], end).astype(np.float64)
                if not np.isnan(sampled).all():
                    facts["logprob"] = float(np.nanmean(sampled))
        yield facts
