"""A statetapd on tiny-kimi for tests, and what its files hold by means that are none of ours."""
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

import h5py
import numpy as np
import statetap

BIN = pathlib.Path(os.environ["STATETAP_BIN"])
ROOT = pathlib.Path(os.environ["STATETAP_ROOT"])
MODEL = ROOT / "models/tiny-kimi"
HIDDEN, LAYERS, TAPS = 128, 8, (2, 4, 5)


class Served:
    """with Served() as served: served.client, served.address, served.http, served.folder, served.cli(…)"""

    def __init__(self, *options):
        self.options = options

    def __enter__(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="statetap-python-"))
        self.log = open(self.folder / "server.log", "w")
        self.process = subprocess.Popen(
            [BIN / "statetapd", "--model", MODEL, "--data", self.folder / "data", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0",
             "--backend", "cpu", "--tp", "1", *self.options], stdout=subprocess.PIPE, stderr=self.log, text=True)
        ready = self.process.stdout.readline()
        if not ready.startswith("statetapd ready "):
            raise RuntimeError(f"no ready line but {ready!r}: {(self.folder / 'server.log').read_text()[-2000:]}")
        self.address, self.http = (ready.split(f"{name}=")[1].split()[0] for name in ("grpc", "http"))
        self.client = statetap.connect(self.address)
        return self

    def __exit__(self, *_):
        self.client.close()
        self.process.terminate()
        code = self.process.wait(timeout=60)
        self.process.stdout.close()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        assert code == 0, f"statetapd ended with {code}"

    def cli(self, *arguments, expect=0):
        result = subprocess.run([BIN / "statetap", "--server", self.address, *map(str, arguments)], capture_output=True, text=True, timeout=300)
        if result.returncode != expect:
            raise AssertionError(f"statetap {arguments}: exit {result.returncode}, expected {expect}\n{result.stdout}\n{result.stderr}")
        return result

    def run(self, prompts, **options):
        """A job that has ended."""
        return self.client.wait(self.client.submit(prompts, **options))


def losses_of(told, epochs):
    """Of what speculators told about a training: its loss at every step, and the means over the first and the last epoch."""
    steps = [float(loss) for loss in re.findall(r"train/loss=([0-9.]+)", told)]
    assert len(steps) >= epochs and len(re.findall(r"val/loss_epoch=", told)) == epochs, told[-2000:]
    length = len(steps) // epochs
    return steps, sum(steps[:length]) / length, sum(steps[-length:]) / length


def by_h5py(folder):
    """{sample id: {"ids", "mask", boundary: float32 [rows, hidden]}} with stock h5py."""
    samples = {}
    for path in sorted(pathlib.Path(folder).glob("*.h5")):
        with h5py.File(path, "r") as file:
            offset = file["samples/row_offset"][:]
            states = {int(b): file["states"][b][:].astype(np.float32) for b in file["states"]}
            for i, id in enumerate(file["samples/id"].asstr()[:]):
                rows = slice(offset[i], offset[i + 1])
                samples[id] = {"ids": file["tokens/ids"][rows], "mask": file["tokens/loss_mask"][rows], **{b: x[rows] for b, x in states.items()}}
    return samples
