"""speculators 0.9 (and hs-connectors): an Arrow data set of rows, and a safetensors file of states a row.

Shift: none, the trainer shifts. Norm: the last slot is the final state before the norm. hidden_states/hs_<row>.safetensors holds hidden_states
bf16 [S, taps + 1, hidden], ascending, and token_ids int64 [S]; the Arrow columns are input_ids and loss_mask (lists of int64) and seq_len. The row's
number is the file's number; the trainer cuts the unshuffled rows into training and validation rows.
"""
from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from statetap.checkpoint import Checkpoint
from statetap.errors import missing_package
from statetap.files import Bf16, replaced, write_json, write_safetensors
from statetap.sample import Sample

_ROWS_A_BATCH = 1000
_ARROW = "data-00000-of-00001.arrow"


class Speculators:
    name, post_norm = "speculators", False

    def file(self, row: int) -> str:
        return f"hidden_states/hs_{row}.safetensors"

    def write(self, path: Path, row: int, sample: Sample, checkpoint: "Checkpoint | None") -> None:
        write_safetensors(path, {"hidden_states": Bf16(slots(sample)), "token_ids": sample.input_ids})


def slots(sample: Sample) -> np.ndarray:
    """bf16 bits [S, taps + 1, hidden]: the final state last, whichever boundary it has."""
    sample.final_prenorm  # KeyError where it was not captured
    return np.ascontiguousarray(sample.block.swapaxes(0, 1))


class ArrowRows:
    """Writes the rows as `datasets` saves them; complete when finish() has returned."""

    def __init__(self, folder: Path) -> None:
        try:
            import pyarrow
        except ImportError:
            raise missing_package("pyarrow", "parquet", "the export for speculators") from None
        self._arrow, self._folder = pyarrow, folder
        ids = pyarrow.list_(pyarrow.int64())
        self._schema = pyarrow.schema([("input_ids", ids), ("loss_mask", ids), ("seq_len", pyarrow.int64())])
        self._pending: list[Sample] = []
        self._digest = hashlib.sha256()
        self._open = replaced(folder / _ARROW)
        self._writer = pyarrow.ipc.new_stream(self._open.__enter__(), self._schema)

    def add(self, sample: Sample) -> None:
        self._pending.append(sample)
        self._digest.update(sample.input_ids.tobytes() + sample.loss_mask.tobytes())
        if len(self._pending) == _ROWS_A_BATCH:
            self._flush()

    def finish(self) -> None:
        self._flush()
        self._writer.close()
        self._open.__exit__(None, None, None)
        values: dict[str, Any] = {"dtype": "int64", "_type": "Value"}
        features = {"input_ids": {"feature": values, "_type": "List"}, "loss_mask": {"feature": values, "_type": "List"}, "seq_len": values}
        write_json(self._folder / "dataset_info.json", {"citation": "", "description": "", "features": features, "homepage": "", "license": ""})
        # "torch" makes the trainer's rows tensors; it does not set the format itself.
        write_json(self._folder / "state.json", {
            "_data_files": [{"filename": _ARROW}], "_fingerprint": self._digest.hexdigest()[:16], "_format_columns": None, "_format_kwargs": {},
            "_format_type": "torch", "_output_all_columns": False, "_split": None,
        })  # fmt: skip

    def _flush(self) -> None:
        arrow, lengths = self._arrow, [len(sample) for sample in self._pending]
        offsets = arrow.array(np.cumsum([0] + lengths), arrow.int32())

        def column(name: str) -> Any:
            values = [getattr(sample, name).astype(np.int64) for sample in self._pending]
            return arrow.ListArray.from_arrays(offsets, arrow.array(np.concatenate(values) if values else np.array([], np.int64)))

        batch = [column("input_ids"), column("loss_mask"), arrow.array(lengths, arrow.int64())]
        self._writer.write_batch(arrow.record_batch(batch, schema=self._schema))
        self._pending = []
