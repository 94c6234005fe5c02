"""The hidden-states backend `statetap` of speculators (hs_connectors): rows come from a running statetapd, at random, every epoch anew.

    statetap export --to speculators JOB --rows-only --out data/
    python -m statetap.speculators train --hidden-states-backend statetap --statetap-server host:7070 --data-path data/ …

The rows' numbers are those of data/statetap-rows.jsonl, which --rows-only writes. The jobs have ended when their rows are exported, so that nothing changes
under a training run.
"""
from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer
from safetensors.torch import load_file

from statetap.client import Client, connect
from statetap.export.run import MANIFEST, ROWS
from statetap.export.speculators import Speculators, slots

BACKEND = "statetap"


class StatetapTransfer(HiddenStatesTransfer):
    """Pickled into the loader's processes; each connects with its first row."""

    def __init__(self, data_path: Path, server: str | None, cache: Path | None) -> None:
        manifest, rows = data_path / MANIFEST, data_path / ROWS
        if not manifest.exists() or not rows.exists():
            raise FileNotFoundError(f"{data_path} has no {ROWS}: write it with `statetap export --to speculators JOB --rows-only --out {data_path}`")
        configuration = json.loads(manifest.read_text())
        self._boundaries = [*configuration["taps"], configuration["final_boundary"]]
        self._rows = [(row["job"], row["id"]) for row in map(json.loads, rows.read_text().splitlines())]
        self._server = server
        self._client: Client | None = None
        self._cache: Path | None = None
        if cache is not None:
            # A folder an export: rows of another one have other taps, or other samples, under the same numbers.
            self._cache = cache / hashlib.sha256(manifest.read_bytes()).hexdigest()[:16]
            self._cache.mkdir(parents=True, exist_ok=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor] | None:
        """Of a row: hidden_states bf16 [S, taps + 1, hidden], final state last, before the norm; token_ids int64 [S]."""
        row = int(file_idx)
        path = self._cache / f"hs_{row}.safetensors" if self._cache is not None else None
        if path is not None and path.exists():
            return load_file(path)
        if self._client is None:
            self._client = connect(self._server)
        job, id = self._rows[row]
        sample = self._client.sample(job, id, taps=self._boundaries)
        if path is not None:
            Speculators().write(path, row, sample, None)
        states = torch.from_numpy(slots(sample).view("int16")).view(torch.bfloat16)
        return {"hidden_states": states, "token_ids": torch.from_numpy(sample.input_ids)}

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        raise NotImplementedError("the backend statetap has every row and generates none: give --on-missing raise")


@HiddenStatesBackend.register(BACKEND)
class StatetapBackend(HiddenStatesBackend):
    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--statetap-server", default=None, help="HOST:PORT of a statetapd [STATETAP_SERVER, else 127.0.0.1:7070]")
        parser.add_argument("--statetap-cache", default=None, help="folder in which rows are kept after their first epoch [none]")

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """None: statetapd takes the place of vLLM."""

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> HiddenStatesTransfer:
        return StatetapTransfer(Path(data_path), args.statetap_server, Path(args.statetap_cache) if args.statetap_cache else None)

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        raise NotImplementedError("the backend statetap is served by statetapd, not by vLLM")
