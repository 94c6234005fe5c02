"""Statetap for trainers: submit prompts, stream hidden states, read shards.

    client = statetap.connect("host:7070")
    job = client.submit(prompts, taps=[2, 30, 58])
    for sample in client.stream(job, group="train"):
        sample.input_ids, sample.loss_mask, sample.taps, sample.final_prenorm

    statetap.ShardDataset("shards/", where='split == "train"')
    statetap.FeatureStream([job], batch_size=8)                              # needs torch
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statetap.client import Client, connect, state_name
from statetap.dataset import ShardDataset
from statetap.errors import DataLossError, StatetapError
from statetap.sample import Sample, float32
from statetap.stream import SampleStream

__all__ = ["Client", "DataLossError", "FeatureStream", "Sample", "SampleStream", "ShardDataset", "StatetapError", "connect", "float32", "state_name"]
__version__ = "0.1.0"

if TYPE_CHECKING:
    from statetap.features import FeatureStream


def __getattr__(name: str) -> Any:
    if name == "FeatureStream":  # imports torch
        from statetap.features import FeatureStream

        return FeatureStream
    raise AttributeError(f"module 'statetap' has no attribute {name!r}")
