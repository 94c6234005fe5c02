"""The draft vocabulary: the target tokens that answers use most, as the maps d2t and t2d.

Draft token i is target token i + d2t[i]; t2d marks the target tokens that have a draft token. Chosen by (count descending, id ascending), then
sorted by id, as speculators does it.
"""
from __future__ import annotations

from pathlib import Path

import numpy as np

from statetap.errors import missing_package
from statetap.files import replaced, write_torch


class Counts:
    """How often each token is supervised, by source. Counts of parts add."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.by_source: dict[str, np.ndarray] = {}

    def add(self, source: str, input_ids: np.ndarray, loss_mask: np.ndarray) -> None:
        supervised = input_ids[loss_mask != 0]
        if len(supervised) and supervised.max() >= self.vocab:
            raise ValueError(f"token {supervised.max()} of source {source!r} is not below the vocabulary of {self.vocab}: another model's")
        if source not in self.by_source:
            self.by_source[source] = np.zeros(self.vocab, np.int64)
        np.add.at(self.by_source[source], supervised, 1)  # at its own cost, not the vocabulary's

    @property
    def total(self) -> np.ndarray:
        return sum(self.by_source.values(), np.zeros(self.vocab, np.int64))


def choose(counts: np.ndarray, size: int) -> "tuple[np.ndarray, np.ndarray]":
    """(d2t int64 [size], t2d bool [vocab])."""
    if not 0 < size <= len(counts):
        raise ValueError(f"draft vocabulary {size}: give 1 to {len(counts)}")
    ids = np.sort(np.argsort(-counts, kind="stable")[:size])
    t2d: np.ndarray = np.zeros(len(counts), bool)
    t2d[ids] = True
    return ids - np.arange(size), t2d


def covered(counts: np.ndarray, t2d: np.ndarray) -> float:
    """Share of the counted tokens that the draft vocabulary has."""
    return float(counts[t2d].sum() / max(1, counts.sum()))


def write_maps(folder: Path, counts: Counts, size: int) -> None:
    """d2t-<size>.npy and t2d-<size>.npy (speculators), vocab_mapping-<size>.pt (SpecForge, AngelSlim)."""
    d2t, t2d = choose(counts.total, size)
    for name, array in (("d2t", d2t), ("t2d", t2d)):
        with replaced(folder / f"{name}-{size}.npy") as file:
            np.save(file, array)
    write_torch(folder / f"vocab_mapping-{size}.pt", {"d2t": d2t, "t2d": t2d})


def write_frequencies(folder: Path, counts: Counts) -> None:
    """token_freq.pt: a dict of id and count, as speculators counts."""
    total = counts.total
    write_torch(folder / "token_freq.pt", {int(i): int(total[i]) for i in np.flatnonzero(total)})


def read_map(path: Path) -> np.ndarray:
    """t2d of an earlier map: a .npy file of it, a folder with exactly one, or a torch file of d2t and t2d."""
    if path.is_dir():
        found = sorted(path.glob("t2d*.npy"))
        if len(found) != 1:
            raise ValueError(f"{path} holds {len(found)} files t2d*.npy; name the one that is meant")
        path = found[0]
    t2d: np.ndarray = _torch_map(path) if path.suffix == ".pt" else np.load(path)
    if t2d.dtype != bool or t2d.ndim != 1:
        raise ValueError(f"{path} is {t2d.dtype} {t2d.shape}; t2d is a list of truths, one a target token")
    return t2d


def _torch_map(path: Path) -> np.ndarray:
    try:
        import torch
    except ImportError:
        raise missing_package("torch", "torch", "reading a map from a .pt file") from None
    held = torch.load(path, weights_only=True)
    if "t2d" not in held:
        raise ValueError(f"{path} holds {', '.join(map(str, held))}; a map of d2t and t2d is read")
    t2d: np.ndarray = held["t2d"].numpy()
    return t2d
