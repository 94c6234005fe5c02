"""What trainers need of a base model's checkpoint: its config, embeddings, head and final norm. Nothing else is read."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from statetap.files import round_to_bf16
from statetap.sample import float32

_DTYPES: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "I64": np.dtype("<i8"), "BOOL": np.dtype("?")}
EMBEDDINGS, HEAD, NORM = "embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """A safetensors file's table of tensors and where their bytes begin."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > path.stat().st_size:
            raise ValueError(f"{path}: its header of {size} bytes is longer than the file; it was cut or is no safetensors file")
        return json.loads(file.read(size)), 8 + size


def read_tensor(path: Path, name: str) -> tuple[np.ndarray, str]:
    """(values, dtype as safetensors names it); BF16 as uint16 bits. A view of the file."""
    header, begin = read_header(path)
    entry = header[name]
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{path}: {name} is {entry['dtype']}; bf16, fp16 and fp32 are read")
    first, last = entry["data_offsets"]
    raw = np.memmap(path, np.uint8, "r", begin + first, (last - first,))
    return raw.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"]), entry["dtype"]


class Checkpoint:
    """A folder with config.json and safetensors files, an index among them or a single file."""

    def __init__(self, folder: "str | Path") -> None:
        self.folder = Path(folder)
        try:
            self.config: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.folder} has no config.json; give the base model's folder with --model") from None
        #: The text model's part, where the config is nested.
        self.text: dict[str, Any] = self.config.get("text_config", self.config)
        self._files = self._locate()

    def _locate(self) -> dict[str, Path]:
        indices = sorted(self.folder.glob("*.index.json"))
        if indices:
            return {name: self.folder / file for name, file in json.loads(indices[0].read_text())["weight_map"].items()}
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{self.folder} has neither an index nor a safetensors file")
        return {name: file for file in files for name in read_header(file)[0] if name != "__metadata__"}

    @property
    def eps(self) -> float:
        return float(self.text["rms_norm_eps"])

    def name_of(self, suffix: str) -> str | None:
        """The shortest tensor name with this end, as speculators looks for it."""
        return min((name for name in self._files if name == suffix or name.endswith("." + suffix)), key=len, default=None)

    def bits(self, suffix: str) -> np.ndarray:
        """A tensor as bf16 bits."""
        name = self.name_of(suffix)
        if name is None:
            raise ValueError(f"{self.folder} has no tensor that ends in {suffix}")
        values, dtype = read_tensor(self._files[name], name)
        return values if dtype == "BF16" else round_to_bf16(values.astype(np.float32))

    def final_norm(self, bits: np.ndarray) -> np.ndarray:
        """The final RMSNorm of pre-norm states (bf16 bits [S, hidden]): in fp32, with the checkpoint's eps and weight, rounded to bf16 once."""
        weight = float32(self.bits(NORM))
        if weight.shape != bits.shape[1:]:
            raise ValueError(f"the final norm of {self.folder} is for {weight.shape[0]} values, the states have {bits.shape[1]}: another model's")
        out = np.empty_like(bits)
        for begin in range(0, len(bits), 4096):
            x = float32(bits[begin : begin + 4096])
            out[begin : begin + 4096] = round_to_bf16(x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(self.eps)) * weight)
        return out
