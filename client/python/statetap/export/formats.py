"""What a trainer's files are. One module a trainer; each says at its top shift, norm, dtypes and names."""
from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from statetap.checkpoint import Checkpoint
from statetap.sample import Sample


class Format(Protocol):
    name: str
    post_norm: bool  # files hold the normed final state: the checkpoint is needed

    def file(self, row: int) -> str:
        """Below the target folder. Names sort as rows do, where the trainer sorts names."""

    def write(self, path: Path, row: int, sample: Sample, checkpoint: "Checkpoint | None") -> None:
        """The whole file of one row."""


def taps_side_by_side(sample: Sample) -> np.ndarray:
    """bf16 bits [S, taps * hidden], ascending."""
    return np.ascontiguousarray(sample.taps).reshape(len(sample), -1)


def target(sample: Sample, checkpoint: "Checkpoint | None") -> np.ndarray:
    """The final state [S, hidden]: behind the final norm where a checkpoint is given."""
    return sample.final_prenorm if checkpoint is None else checkpoint.final_norm(sample.final_prenorm)
