"""One sample: its tokens and its states, unshifted, each in the place of its token."""
from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from statetap.errors import missing_package


@dataclass(repr=False, eq=False)
class Sample:
    """Arrays are numpy's, states bf16 bits as uint16; `torch()` gives tensors over the same memory, states as bfloat16.

    Boundary k is the residual stream after k decoder layers; boundary `layers` is the final state, before the final norm.
    """

    job: str
    id: str
    source: str
    split: str  # train or eval
    meta_json: str  # a JSON object of scalars, or empty
    finish_reason: str  # stop, length or prefill
    prompt_tokens: int
    truncated: bool
    index: int  # place among the job's submitted samples, from 0
    layers: int
    boundaries: tuple[int, ...]  # ascending: of `block`
    input_ids: Any  # int64 [S]
    loss_mask: Any  # uint8 [S]: 1 where the assistant produced the token
    logprobs: Any  # float32 [S], NaN where not computed
    entropies: Any  # float32 [S], NaN where not computed
    block: Any  # uint16 or bfloat16 [boundaries, S, hidden]

    def __repr__(self) -> str:
        return f"Sample({self.id!r} of {self.job}: {len(self)} tokens, boundaries {list(self.boundaries)} of {self.layers} layers)"

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def meta(self) -> dict[str, Any]:
        return json.loads(self.meta_json) if self.meta_json else {}

    @property
    def states(self) -> dict[int, Any]:
        """By boundary: [S, hidden], views of `block`."""
        return dict(zip(self.boundaries, self.block))

    @property
    def tap_boundaries(self) -> tuple[int, ...]:
        return tuple(b for b in self.boundaries if b != self.layers)

    @property
    def taps(self) -> Any:
        """[S, taps, hidden] by ascending boundary, without the final one: a view of `block`."""
        return self.block[: len(self.tap_boundaries)].swapaxes(0, 1)

    @property
    def final_prenorm(self) -> Any:
        """[S, hidden]: the residual stream after all layers, before the final norm."""
        if not self.boundaries or self.boundaries[-1] != self.layers:
            raise KeyError(f"sample {self.id!r} has boundaries {list(self.boundaries)}, not the final one ({self.layers}): it was not captured or not asked for")
        return self.block[-1]

    def torch(self) -> "Sample":
        """The same sample as torch tensors that share its memory."""
        try:
            import torch
        except ImportError:
            raise missing_package("torch", "torch", "Sample.torch()") from None
        arrays: dict[str, Any] = {name: torch.from_numpy(getattr(self, name)) for name in ("input_ids", "loss_mask", "logprobs", "entropies")}
        block = torch.from_numpy(self.block.view(np.int16)).view(torch.bfloat16)
        return dataclasses.replace(self, block=block, **arrays)


def float32(bits: np.ndarray) -> np.ndarray:
    """bf16 bits as the numbers they are."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
