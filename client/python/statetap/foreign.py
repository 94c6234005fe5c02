"""What features are that another tool made: statetap stats --as FORMAT DIR --model DIR
(python -m statetap.foreign). Needs no server.

    speculators   hs_<row>.safetensors (in DIR or DIR/hidden_states): hidden_states [S, taps + 1, hidden], token_ids [S]
    vllm          the raw files of its connector: *.safetensors with the same two tensors
    specforge     *.ckpt: aux_hidden_state [1, S, taps * hidden], hidden_state [1, S, hidden] (needs torch)
    modelopt      *.pt: aux_hidden_states [S, taps * hidden], hidden_states [S, hidden], hidden_states_prenorm (needs torch)

Says whether the final state lies before or behind the model's final norm (behind it, state over the norm's weight has root mean square 1 at every token), and finds rows that are
not tokens, values that are not finite, taps that are zero or equal to another. Exit 1 where something is wrong for the trainer that the format is of.
"""
from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np

from statetap.checkpoint import NORM, Checkpoint, read_tensor
from statetap.errors import missing_package
from statetap.sample import float32


@dataclass
class Features:
    file: str
    tokens: int
    slots: np.ndarray  # float32 [rows, taps + 1, hidden], the final state last
    says_prenorm: "bool | None" = None  # what the file itself says


def _numbers(values: np.ndarray, dtype: str) -> np.ndarray:
    return float32(np.array(values)) if dtype == "BF16" else np.asarray(values, np.float32)


def _safetensors(folder: Path, hidden: int, pattern: str) -> Iterator[Features]:
    below = folder / "hidden_states"
    for path in sorted((below if below.is_dir() else folder).glob(pattern)):
        states = _numbers(*read_tensor(path, "hidden_states"))
        if states.ndim != 3 or states.shape[2] != hidden:
            raise ValueError(f"{path}: hidden_states is {list(states.shape)}; [tokens, taps + 1, {hidden}] is read")
        yield Features(path.name, len(read_tensor(path, "token_ids")[0]), states)


def _torch_files(folder: Path, hidden: int, pattern: str, taps: str, final: str) -> Iterator[Features]:
    try:
        import torch
    except ImportError:
        raise missing_package("torch", "torch", "reading torch files") from None
    for path in sorted(folder.rglob(pattern)):
        held = torch.load(path, map_location="cpu", weights_only=True)
        missing = [name for name in ("input_ids", taps, final) if name not in held]
        if missing:
            raise ValueError(f"{path}: no {', '.join(missing)}; it holds {', '.join(map(str, held))}")
        aux, last = held[taps].float().reshape(-1, held[taps].shape[-1]), held[final].float().reshape(-1, held[final].shape[-1])
        if last.shape[1] != hidden or aux.shape[1] % hidden or len(aux) != len(last):
            raise ValueError(f"{path}: {taps} {list(held[taps].shape)} and {final} {list(held[final].shape)} do not fit a model of {hidden}")
        slots = torch.cat([aux.reshape(len(aux), -1, hidden), last[:, None]], 1).numpy()
        yield Features(path.name, held["input_ids"].numel(), slots, held.get("hidden_states_prenorm"))


READERS: "dict[str, Callable[[Path, int], Iterator[Features]]]" = {
    "speculators": lambda folder, hidden: _safetensors(folder, hidden, "hs_*.safetensors"),
    "vllm": lambda folder, hidden: _safetensors(folder, hidden, "*.safetensors"),
    "specforge": lambda folder, hidden: _torch_files(folder, hidden, "*.ckpt", "aux_hidden_state", "hidden_state"),
    "modelopt": lambda folder, hidden: _torch_files(folder, hidden, "*.pt", "aux_hidden_states", "hidden_states"),
}
WANTS_PRENORM = {"speculators": True, "vllm": True, "specforge": False, "modelopt": None}  # None: the file says


@dataclass
class Findings:
    files: int = 0
    rows: int = 0
    normed_rows: int = 0
    squares: "np.ndarray | None" = None  # by slot, summed over values
    zero_rows: "np.ndarray | None" = None
    nonfinite_rows: "np.ndarray | None" = None
    equal: "dict[tuple[int, int], int]" = field(default_factory=dict)  # files in which two slots are equal
    faults: list[str] = field(default_factory=list)

    @property
    def post_norm(self) -> bool:
        return self.normed_rows > 0.5 * self.rows


def examine(features: Iterator[Features], weight: np.ndarray, wants_prenorm: "bool | None") -> Findings:
    found, says = Findings(), set()
    for one in features:
        slots = one.slots
        if found.squares is None:
            found.squares, found.zero_rows, found.nonfinite_rows = (np.zeros(slots.shape[1]) for _ in range(3))
        if slots.shape[1] != len(found.squares):
            found.faults.append(f"{one.file} has {slots.shape[1]} slots, the files before {len(found.squares)}")
            continue
        found.files, found.rows = found.files + 1, found.rows + len(slots)
        if len(slots) != one.tokens:
            found.faults.append(f"{one.file} has {len(slots)} rows for {one.tokens} tokens: every later sample of a packed row is shifted")
        found.nonfinite_rows += (~np.isfinite(slots)).any(axis=2).sum(axis=0)
        found.zero_rows += (slots == 0).all(axis=2).sum(axis=0)
        found.squares += (np.where(np.isfinite(slots), slots, 0).astype(np.float64) ** 2).sum(axis=(0, 2))
        for a in range(slots.shape[1]):
            for b in range(a):
                if np.array_equal(slots[:, a], slots[:, b]):
                    found.equal[b, a] = found.equal.get((b, a), 0) + 1
        rms = np.sqrt(np.mean((slots[:, -1] / weight) ** 2, axis=1))
        found.normed_rows += int((np.abs(rms - 1) < 0.02).sum())
        says.add(one.says_prenorm)
    if found.files == 0 or found.zero_rows is None or found.nonfinite_rows is None:
        raise FileNotFoundError("no file of this format is there")
    last = len(found.zero_rows) - 1
    name = [f"tap {i + 1}" for i in range(last)] + ["the final state"]
    found.faults += [f"{name[i]} is zero at {int(n):,} of {found.rows:,} rows" for i, n in enumerate(found.zero_rows) if n]
    found.faults += [f"{name[i]} is not finite at {int(n):,} of {found.rows:,} rows" for i, n in enumerate(found.nonfinite_rows) if n]
    found.faults += [f"{name[a]} and {name[b]} are equal in {n:,} of {found.files:,} files" for (a, b), n in found.equal.items()]
    if len(says) > 1:
        found.faults.append("hidden_states_prenorm is not the same in all files")
    wanted = next(iter(says)) or False if wants_prenorm is None else wants_prenorm
    if wanted == found.post_norm:
        what = "the files say" if wants_prenorm is None else "the trainer takes them for"
        found.faults.append(f"final states lie {'behind' if found.post_norm else 'before'} the final norm, and {what} {'before' if wanted else 'behind'} it")
    return found


def main(arguments: "list[str] | None" = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m statetap.foreign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--as", dest="format", required=True, choices=READERS)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="the base model's folder: final norm, width")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quiet", action="store_true", help="as everywhere; there is no progress to leave out")
    options = parser.parse_args(arguments)
    try:
        model = Checkpoint(options.model)
        weight = float32(model.bits(NORM))
        found = examine(READERS[options.format](options.folder, len(weight)), weight, WANTS_PRENORM[options.format])
    except (ValueError, FileNotFoundError, ImportError, KeyError) as error:
        print(f"foreign: {error}", file=sys.stderr)
        return 2
    assert found.squares is not None
    rms = np.sqrt(found.squares / (found.rows * len(weight)))
    result: dict[str, Any] = {"files": found.files, "rows": found.rows, "post_norm": found.post_norm, "normed_rows": found.normed_rows, "rms": rms.tolist(), "faults": found.faults}
    text = [f"{found.files:,} files, {found.rows:,} rows, {len(rms) - 1} taps; final state {'behind' if found.post_norm else 'before'} the final norm ({found.normed_rows:,} rows look normed)",
            "rms: " + ", ".join(f"{x:.4g}" for x in rms) + " (taps as they lie, then the final state)", *(f"FAULT  {fault}" for fault in found.faults)]  # fmt: skip
    print(json.dumps(result) if options.json else "\n".join(text))
    return 1 if found.faults else 0


if __name__ == "__main__":
    sys.exit(main())
