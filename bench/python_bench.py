#!/usr/bin/env python3
"""What the Python package gives, on what stream_bench reads: samples of 512 tokens at Kimi-K2.5's four boundaries (29 MB each), 32 of them (0.94 GB), from
the page cache. The sides alternate; the median counts.
    stream     Client.stream over loopback, samples in numpy arrays, against the C++ client's receiver on the same server
    dataset    ShardDataset, against safetensors files of the same samples (needs torch and safetensors); dataset-cpu: by the process's own time, for
               a machine that others use
    open       a ShardDataset of 25,000 samples: seconds
Needs the package with h5py, and the programs in build/bin.

    python bench/python_bench.py [--work FOLDER] [--rounds N] [--bin build/bin] [CASE…]
"""
import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import statetap
from statetap.export.speculators import Speculators

ROOT = Path(__file__).resolve().parents[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["stream", "dataset", "open"])
    parser.add_argument("--work", type=Path, default=Path("/tmp"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bin", type=Path, default=ROOT / "build/bin")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="statetap-python-bench-", dir=options.work))
    try:
        subprocess.run([options.bin / "stream_bench", "--prepare", folder], check=True)
        for case in options.cases:
            globals()[f"bench_{case}"](folder, options)
    finally:
        shutil.rmtree(folder)


def report(case, unit, baseline, pairs):
    ours, theirs = (statistics.median(side) if side[0] is not None else None for side in zip(*pairs))
    print(json.dumps({"bench": "python_bench", "case": case, "value": ours, "unit": unit, "baseline": baseline, "baseline_value": theirs,
                      "ratio": ours / theirs if theirs else None}), flush=True)  # fmt: skip


def bench_stream(folder, options):
    command = [options.bin / "statetapd", "--model", ROOT / "models/tiny-kimi", "--data", folder / "data", "--backend", "cpu", "--listen", "127.0.0.1:0", "--http", ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        address = server.stdout.readline().split("grpc=")[1].split()[0]
        with statetap.connect(address) as client:
            pairs = [(ours(client, f"ours {i}"), theirs(options.bin, address, f"theirs {i}")) for i in range(options.rounds + 1)][1:]  # the first fills caches
        server.terminate()
    report("stream", "GB/s", "the C++ client", pairs)


def ours(client, group):
    client.show("bench")
    begin = time.perf_counter()
    size = sum(sample.block.nbytes for sample in client.stream("bench", group=group, credit_bytes=256 << 20))
    return size / (time.perf_counter() - begin) / 1e9


def theirs(programs, address, group):
    told = subprocess.run([programs / "stream_bench", "--receive", address, "--group", group], check=True, capture_output=True, text=True).stdout.split()
    return int(told[1]) / float(told[0]) / 1e9


def job_folder(folder, job):
    """Of the two jobs the one with many samples has few boundaries."""
    for path in sorted((folder / "data/shards").iterdir()):
        if (len(statetap.ShardDataset(path).boundaries) == 1) == (job == "many"):
            return path
    sys.exit(f"no shards of {job} in {folder}")


def bench_dataset(folder, options):
    import torch
    from safetensors.torch import load_file

    dataset = statetap.ShardDataset(job_folder(folder, "bench"))
    files = folder / "safetensors"
    files.mkdir()
    for row, sample in enumerate(dataset):
        Speculators().write(files / f"hs_{row}.safetensors", row, sample, None)
    order = np.random.default_rng(0).permutation(len(dataset))

    def shards(clock):
        begin = clock()
        size = sum(dataset[int(i)].block.nbytes for i in order)
        return size / (clock() - begin) / 1e9

    def safetensors(clock):
        begin, size = clock(), 0
        for i in order:
            states = load_file(files / f"hs_{i}.safetensors")["hidden_states"].clone()  # a mapping until it is copied
            size += states.numel() * 2
        return size / (clock() - begin) / 1e9

    torch.set_num_threads(1)
    for case, clock in (("dataset", time.perf_counter), ("dataset-cpu", time.process_time)):
        report(case, "GB/s", "safetensors", [(shards(clock), safetensors(clock)) for _ in range(options.rounds + 1)][1:])


def bench_open(folder, options):
    path = job_folder(folder, "many")

    def once():
        begin = time.perf_counter()
        assert len(statetap.ShardDataset(path)) == 25_000
        return time.perf_counter() - begin

    report("open", "s", "", [(once(), None) for _ in range(options.rounds)])


if __name__ == "__main__":
    main()
