"""AngelSlim 0.5, offline files (OfflineEagle3Dataset).

Shift: none. Norm: the final state is normed. One torch file a sample: input_ids int64 [1, S], loss_mask int64 [1, S],
hidden_states bf16 [1, S, taps * hidden], target_hiddens bf16 [1, S, hidden]. Its loader takes the next file for one that it cannot read.
"""
from __future__ import annotations

from pathlib import Path

import numpy as np

from statetap.checkpoint import Checkpoint
from statetap.export.formats import taps_side_by_side, target
from statetap.files import Bf16, write_torch
from statetap.sample import Sample


class AngelSlim:
    name, post_norm = "angelslim", True

    def file(self, row: int) -> str:
        first = row // 2000 * 2000
        return f"rows_{first:08}-{first + 2000:08}/data_{row:08}.ckpt"

    def write(self, path: Path, row: int, sample: Sample, checkpoint: "Checkpoint | None") -> None:
        write_torch(path, {
            "input_ids": sample.input_ids[None],
            "loss_mask": sample.loss_mask.astype(np.int64)[None],
            "hidden_states": Bf16(taps_side_by_side(sample)[None]),
            "target_hiddens": Bf16(target(sample, checkpoint)[None]),
        })  # fmt: skip
