"""SpecForge 0.2, offline files (specforge_hidden_states_v1).

Shift: none, the trainer shifts ids and target by one. Norm: the final state is normed. One torch file a sample with stored members (a deflated one
loads as garbage): input_ids int64 [S], loss_mask int64 [S], aux_hidden_state bf16 [1, S, taps * hidden], hidden_state bf16 [1, S, hidden].
Files are found by a walk and sorted as strings, so that numbers are padded.
"""
from __future__ import annotations

from pathlib import Path

import numpy as np

from statetap.checkpoint import Checkpoint
from statetap.export.formats import taps_side_by_side, target
from statetap.files import Bf16, write_torch
from statetap.sample import Sample


class SpecForge:
    name, post_norm = "specforge", True

    def file(self, row: int) -> str:
        first = row // 2000 * 2000
        return f"rows_{first:08}-{first + 2000:08}/data_{row:08}.ckpt"

    def write(self, path: Path, row: int, sample: Sample, checkpoint: "Checkpoint | None") -> None:
        write_torch(path, {
            "input_ids": sample.input_ids,
            "loss_mask": sample.loss_mask.astype(np.int64),
            "aux_hidden_state": Bf16(taps_side_by_side(sample)[None]),
            "hidden_state": Bf16(target(sample, checkpoint)[None]),
        })  # fmt: skip
