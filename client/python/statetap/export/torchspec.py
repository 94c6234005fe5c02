"""TorchSpec, offline files as its OfflineEagle3Dataset reads them (commit 6f21829; the indexed folder of later versions was not read).

Shift: none, the trainer shifts ids and target by one. Norm: the final state is normed (its logits are lm_head of it). One torch file a sample:
input_ids int64 [S], loss_mask int64 [S], aux_hidden_states bf16 [1, S, taps * hidden], hidden_states bf16 [1, S, hidden].
"""
from __future__ import annotations

from pathlib import Path

import numpy as np

from statetap.checkpoint import Checkpoint
from statetap.export.formats import taps_side_by_side, target
from statetap.files import Bf16, write_torch
from statetap.sample import Sample


class TorchSpec:
    name, post_norm = "torchspec", True

    def file(self, row: int) -> str:
        return f"data_{row:08}.ckpt"

    def write(self, path: Path, row: int, sample: Sample, checkpoint: "Checkpoint | None") -> None:
        write_torch(path, {
            "input_ids": sample.input_ids,
            "loss_mask": sample.loss_mask.astype(np.int64),
            "aux_hidden_states": Bf16(taps_side_by_side(sample)[None]),
            "hidden_states": Bf16(target(sample, checkpoint)[None]),
        })  # fmt: skip
