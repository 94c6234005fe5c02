"""A statetapd on tiny-kimi for tests, and what its files hold by means that are none of ours."""
import os
import pathlib
import re
import select
import shutil
import socket
import subprocess
import tempfile
import threading
import time

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
        self._start("127.0.0.1:0", "127.0.0.1:0")
        self.client = statetap.connect(self.address)
        return self

    def _start(self, address, http):
        self.process = subprocess.Popen(
            [BIN / "statetapd", "--model", MODEL, "--data", self.folder / "data", "--listen", address, "--http", http,
             "--backend", "cpu", "--tp", "1", *self.options], stdout=subprocess.PIPE, stderr=self.log, text=True)
        ready = self.process.stdout.readline()
        if not ready.startswith("statetapd ready "):
            raise RuntimeError(f"no ready line but {ready!r}: {(self.folder / 'server.log').read_text()[-2000:]}")
        self.address, self.http = (ready.split(f"{name}=")[1].split()[0] for name in ("grpc", "http"))

    def kill_and_start_again(self):
        """At the same addresses, with the same data."""
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self._start(self.address, self.http)

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


class Proxy:
    """with Proxy(address) as proxy: forwards proxy.address there until freeze(); then nothing arrives any more and nothing ends, as when a machine
    or a route vanishes."""

    def __init__(self, address):
        host, _, port = address.rpartition(":")
        self.there, self.frozen = (host, int(port)), threading.Event()

    def __enter__(self):
        self.listening, self.other = socket.create_server(("127.0.0.1", 0)), {}
        self.address = f"127.0.0.1:{self.listening.getsockname()[1]}"
        self.thread = threading.Thread(target=self._forward)
        self.thread.start()
        return self

    def freeze(self):
        self.frozen.set()
        self.thread.join()

    def __exit__(self, *_):
        self.freeze()
        for end in self.other:
            end.close()

    def _forward(self):
        while not self.frozen.is_set():
            for ready in select.select([self.listening, *self.other], [], [], 0.02)[0]:
                if ready is self.listening:
                    client, server = ready.accept()[0], socket.create_connection(self.there)
                    self.other |= {client: server, server: client}
                elif ready in self.other:
                    if data := ready.recv(1 << 16):
                        self.other[ready].sendall(data)
                    else:
                        for end in (self.other.pop(ready), ready):
                            self.other.pop(end, None)
                            end.close()
        self.listening.close()


class Stalled(Served):
    """A server with a job, "growing", of which a part is stored and the rest does not start before there is room for it: a shard takes at least
    1 MiB a boundary."""

    SAMPLES = [{"id": f"{n:02}", "input_ids": [100 + n] * 300} for n in range(10)]  # 154 kB of states each, and 0.6 MB are left

    def __init__(self):
        super().__init__("--max-shard-bytes", "10MiB")

    def __enter__(self):
        super().__enter__()
        self.run([{"input_ids": [5, 6, 7]}], name="filler", taps=list(range(LAYERS)))
        self.job = self.client.submit(self.SAMPLES, name="growing", taps=[4])
        while not (now := self.client.show(self.job)).counts.stored or "--max-shard-bytes" not in now.message or now.counts.running:
            time.sleep(0.05)
        return self

    def make_room(self):
        self.cli("delete", "filler", "--yes")


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
