"""NVIDIA Model-Optimizer 0.47, offline files (OfflineSupervisedDataset).

Shift: none, labels are made as the next token. Norm: the final state is as captured, before the norm, and the file says so
(hidden_states_prenorm; without it the trainer takes states for normed). One torch file a sample, loadable with weights_only: input_ids int64 [S],
loss_mask int64 [S] (used with answer-only loss), hidden_states bf16 [S, hidden], aux_hidden_states bf16 [S, taps * hidden], conversation_id.
"""
from __future__ import annotations

from pathlib import Path

import numpy as np

from statetap.checkpoint import Checkpoint
from statetap.export.formats import taps_side_by_side
from statetap.files import Bf16, write_torch
from statetap.sample import Sample


class ModelOptimizer:
    name, post_norm = "modelopt", False

    def file(self, row: int) -> str:
        return f"{row:08}.pt"

    def write(self, path: Path, row: int, sample: Sample, checkpoint: "Checkpoint | None") -> None:
        write_torch(path, {
            "input_ids": sample.input_ids,
            "loss_mask": sample.loss_mask.astype(np.int64),
            "hidden_states": Bf16(sample.final_prenorm),
            "aux_hidden_states": Bf16(taps_side_by_side(sample)),
            "hidden_states_prenorm": True,
            "conversation_id": sample.id,
        })  # fmt: skip
