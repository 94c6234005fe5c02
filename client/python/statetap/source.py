"""Samples to export, from jobs of a server or from shard files, known by their tables and read when their turn comes."""
from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from typing import Any, Iterator, Sequence

from statetap.client import connect, state_name
from statetap.dataset import ShardDataset
from statetap.sample import Sample


@dataclass(frozen=True)
class Entry:
    """A sample that will be read."""

    job: str
    id: str
    tokens: int
    source: str
    split: str
    place: int  # in its source: sources read neighbours fastest


class Source:
    """`words`: jobs, or paths (a folder, a file that ends in .h5, anything with a /), not both, as on the command line.

    Samples that were excluded on the server are left out; those of a path are what its files hold."""

    def __init__(self, words: Sequence[str], *, server: str | None = None, taps: "Sequence[int] | None" = None, where: str = "") -> None:
        local = [os.path.isdir(word) or word.endswith(".h5") or "/" in word for word in words]
        if any(local) and not all(local):
            raise ValueError(f"{' '.join(words)}: give jobs or paths, not both")
        self.entries: list[Entry] = []
        self._dataset = ShardDataset(list(words), taps=taps, where=where) if any(local) else None
        if self._dataset is not None:
            data = self._dataset
            self.hidden, self.layers, self.boundaries = data.hidden, data.layers, data.boundaries
            self.attributes: dict[str, Any] = data.attributes()
            for i, length in enumerate(data.lengths):
                shard, place = data.locate(i)
                self.entries.append(Entry(shard.job, shard.column("id")[place], int(length), shard.column("source")[place], shard.column("split")[place], i))
        else:
            self._open_jobs(words, server, taps, where)
        if len({(entry.job, entry.id) for entry in self.entries}) != len(self.entries):
            raise ValueError(f"{' '.join(words)}: some samples are there more than once; name each job or file once")

    def _open_jobs(self, words: Sequence[str], server: str | None, taps: "Sequence[int] | None", where: str) -> None:
        self._client = connect(server)
        jobs = [self._client.show(word) for word in words]
        for job in jobs:
            if state_name(job) not in ("succeeded", "cancelled"):
                raise ValueError(f"job {job.id} ({job.name}) is {state_name(job)}: wait until it has ended (statetap watch {job.id})")
            if list(job.boundaries) != list(jobs[0].boundaries):
                raise ValueError(f"job {job.id} holds boundaries {list(job.boundaries)}, {jobs[0].id} {list(jobs[0].boundaries)}: export them apart")
        for job in jobs:
            for sample in self._client.samples(job, where):
                if not sample.excluded:
                    self.entries.append(Entry(job.id, sample.id, sample.tokens, sample.source, sample.split, len(self.entries)))
        if not self.entries:
            raise ValueError(f"{' '.join(words)}: no sample is stored" + (f" that {where!r} holds for" if where else ""))
        header = self._client.header(self.entries[0].job)
        self.hidden, self.layers = header.hidden, header.layers
        stored = tuple(jobs[0].boundaries)
        final = (self.layers,) if self.layers in stored else ()
        wanted = tuple(b for b in stored if b != self.layers) if taps is None else tuple(taps)
        missing = [b for b in wanted if b not in stored]
        if missing:
            raise ValueError(f"taps {missing}: the job holds boundaries {list(stored)}; boundary k is the output of layer k - 1")
        self.boundaries = tuple(sorted({*wanted, *final}))
        self.attributes = json.loads(header.attributes_json or "{}")

    def read(self, entries: Sequence[Entry], boundaries: "Sequence[int] | None" = None) -> Iterator[Sample]:
        """In the order given, one at a time. `boundaries`: [] for tokens alone. Default: the source's."""
        wanted = self.boundaries if boundaries is None else tuple(boundaries)
        if self._dataset is not None:
            for shard, place in (self._dataset.locate(entry.place) for entry in entries):
                yield shard.sample(place, wanted)
            return
        begin = 0
        while begin < len(entries):
            end = begin
            while end < len(entries) and entries[end].job == entries[begin].job and end - begin < 1000:
                end += 1
            yield from self._client.fetch(entries[begin].job, ids=[entry.id for entry in entries[begin:end]], taps=wanted)
            begin = end

    def ordered(self, order: str, seed: int) -> list[Entry]:
        """Training samples first, then those of the split "eval"; within each as stored or by a hash of seed, job and id."""

        def key(entry: Entry) -> tuple[Any, ...]:
            shuffled = hashlib.blake2b(f"{seed}\0{entry.job}\0{entry.id}".encode()).digest() if order == "shuffled" else b""
            return entry.split == "eval", shuffled, entry.place

        return sorted(self.entries, key=key)
