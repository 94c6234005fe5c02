"""Samples as the batches that trainers take. Needs torch.

    DataLoader(ShardDataset("shards/"), batch_size=8, collate_fn=Pad())
    DataLoader(ShardDataset("shards/"), batch_size=8, collate_fn=Pack(8192))

What a draft step needs for row p is the embedding of token p+1, the taps of p and the target state of p+1 (the prediction of token p+2); `Shift`
says whether that is done here or by the trainer, and which mask entry weighs the row.
"""
from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Sequence

import numpy as np

from statetap.errors import missing_package
from statetap.sample import Sample

try:
    import torch
except ImportError:
    raise missing_package("torch", "torch", "statetap.collate") from None


class Shift(enum.Enum):
    """Which tensors are moved against the taps."""

    NONE = "none"  # all in the place of their token: SpecForge, TorchSpec and Model-Optimizer shift for themselves
    SHORTEN = "shorten"  # row p: ids, final and mask of p+1 beside the taps of p; S-1 rows a sample, as speculators does


@dataclass(frozen=True)
class Pad:
    """A row a sample, filled up at the end.

    input_ids int64 [B, S] · attention_mask int64 [B, S], 1 where there is a token · loss_mask int64 [B, S] · position_ids int64 [B, S] ·
    hidden_states bf16 [B, S, taps * hidden] · target bf16 [B, S, hidden], before the final norm · lengths int64 [B].
    """

    length: int = 0  # rows are this long, longer samples are refused. 0: as long as the longest of the batch
    multiple: int = 1  # lengths are rounded up to a multiple of this
    shift: Shift = Shift.NONE
    pad_id: int = 0

    def __call__(self, samples: Sequence[Sample]) -> "dict[str, torch.Tensor]":
        rows = [_rows(sample, self.shift) for sample in samples]
        longest = max(map(_length, rows))
        if self.length and longest > self.length:
            worst = max(samples, key=len)
            raise ValueError(f"sample {worst.id!r} has {len(worst)} tokens, rows are {self.length} long; leave it out (where tokens <= …) or pack it")
        length = -(-(self.length or longest) // self.multiple) * self.multiple
        batch = _empty(len(rows), length, samples[0], self.pad_id)
        for b, row in enumerate(rows):
            _fill(batch, b, 0, row, _length(row))
            batch["attention_mask"][b, : _length(row)] = 1
        batch["lengths"] = torch.tensor([_length(row) for row in rows])
        return batch


@dataclass(frozen=True)
class Pack:
    """All samples of the batch one after another in one row of `length` tokens. The sample that crosses the end is cut where `cut` is true, and
    refused otherwise; samples that would begin behind the end are refused always: nothing is dropped in silence.

    As Pad, with document_ids int64 [1, length]: the sample's place in the batch, -1 where there is none; position_ids count from 0 in each sample
    (from 1 with SHORTEN, as speculators does).
    """

    length: int
    shift: Shift = Shift.NONE
    cut: bool = False
    pad_id: int = 0

    def __call__(self, samples: Sequence[Sample]) -> "dict[str, torch.Tensor]":
        batch = _empty(1, self.length, samples[0], self.pad_id)
        batch["document_ids"] = torch.full((1, self.length), -1)
        at = 0
        for number, sample in enumerate(samples):
            row = _rows(sample, self.shift)
            room = min(_length(row), self.length - at)
            if room < _length(row) and not (self.cut and room > 0):
                raise ValueError(f"sample {sample.id!r} has {_length(row)} rows, {room} of {self.length} are left; pack fewer or give cut=True")
            _fill(batch, 0, at, row, room)
            batch["document_ids"][0, at : at + room] = number
            at += room
        batch["attention_mask"][0, :at] = 1
        batch["lengths"] = torch.tensor([at])
        return batch


def _rows(sample: Sample, shift: Shift) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]":
    """ids, mask, taps [taps, S, hidden], final, and the first position."""
    if isinstance(sample.block, np.ndarray):
        sample = sample.torch()
    taps, final = sample.block[: len(sample.tap_boundaries)], sample.final_prenorm
    if shift is Shift.NONE:
        return sample.input_ids, sample.loss_mask, taps, final, 0
    return sample.input_ids[1:], sample.loss_mask[1:], taps[:, :-1], final[1:], 1


def _length(row: "tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]") -> int:
    return len(row[0])


def _empty(rows: int, length: int, like: Sample, pad_id: int) -> "dict[str, torch.Tensor]":
    hidden, taps = like.block.shape[2], len(like.tap_boundaries)
    return {
        "input_ids": torch.full((rows, length), pad_id),
        "attention_mask": torch.zeros((rows, length), dtype=torch.int64),
        "loss_mask": torch.zeros((rows, length), dtype=torch.int64),
        "position_ids": torch.zeros((rows, length), dtype=torch.int64),
        "hidden_states": torch.zeros((rows, length, taps * hidden), dtype=torch.bfloat16),
        "target": torch.zeros((rows, length, hidden), dtype=torch.bfloat16),
    }


def _fill(batch: "dict[str, torch.Tensor]", b: int, at: int, row: "tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]", rows: int) -> None:
    ids, mask, taps, final, first = row
    end, hidden = at + rows, final.shape[1]
    batch["input_ids"][b, at:end] = ids[:rows]
    batch["loss_mask"][b, at:end] = mask[:rows]
    batch["position_ids"][b, at:end] = torch.arange(first, first + rows)
    for i, tap in enumerate(taps):
        batch["hidden_states"][b, at:end, i * hidden : (i + 1) * hidden] = tap[:rows]
    batch["target"][b, at:end] = final[:rows]
