"""deploy/ held to the server that is built: the unit and the batch script start and drain it, what the dashboard and the rules ask for is exported.

Run by ctest with STATETAP_BIN (the programs) and STATETAP_ROOT (the repository) in the environment. That every file of deploy/config is understood is in
server_config_test.
"""
import collections
import contextlib
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
import tomllib
import unittest
import urllib.request

BIN = pathlib.Path(os.environ["STATETAP_BIN"])
ROOT = pathlib.Path(os.environ["STATETAP_ROOT"])
DEPLOY = ROOT / "deploy"
ON_GPUS_ALONE = {"statetap_gpu_memory_bytes"}  # on a CPU there is none

work = pathlib.Path(tempfile.mkdtemp(prefix="statetap-deploy-"))


def tearDownModule():
    shutil.rmtree(work, ignore_errors=True)


def unit():
    """The unit's settings; none of ours is given twice."""
    lines = (DEPLOY / "systemd/statetapd.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if re.match("[A-Z]", line))


def seconds(span):
    number, scale = re.fullmatch(r"(\d+)(s|min|h)", span).groups()
    return int(number) * {"s": 1, "min": 60, "h": 3600}[scale]


def local_config(name):
    """deploy/config/NAME with folders and ports that can be had here."""
    text = (DEPLOY / "config" / name).read_text()
    for setting, value in {"model": ROOT / "models/tiny-kimi", "data": work / "data", "listen": "127.0.0.1:0", "http": "127.0.0.1:0"}.items():
        text, count = re.subn(f"^{setting} = .*$", f'{setting} = "{value}"', text, flags=re.M)
        assert count == 1, setting
    path = work / name
    path.write_text(text)
    return path


def start_as_the_unit_does(config):
    program, flag, file = shlex.split(unit()["ExecStart"])
    assert (pathlib.Path(program).name, flag, file) == ("statetapd", "--config", "/etc/statetap/statetapd.toml")
    with open(work / "server.log", "w") as log:
        server = subprocess.Popen([BIN / "statetapd", flag, config], stdout=subprocess.PIPE, stderr=log, text=True)
    ready = server.stdout.readline()
    assert ready.startswith("statetapd ready "), (ready, (work / "server.log").read_text())
    return server, *(ready.split(f"{name}=")[1].split()[0] for name in ("grpc", "http"))


class UnitTest(unittest.TestCase):
    def test_sigterm_drains_within_what_systemd_waits(self):
        self.assertEqual(unit()["KillSignal"], "SIGTERM")
        for config in DEPLOY.glob("config/*.toml"):
            drain = tomllib.loads(config.read_text()).get("drain-seconds", 60)
            self.assertGreaterEqual(seconds(unit()["TimeoutStopSec"]), drain + 120, f"{config}: shards are closed after the drain")

    def test_a_restart_is_not_tried_where_it_would_change_nothing(self):
        wrong = subprocess.run([BIN / "statetapd", "--no-such-flag"], capture_output=True)
        self.assertEqual(unit()["RestartPreventExitStatus"].split(), [str(wrong.returncode)])

    def test_data_lie_where_the_unit_may_write(self):
        for config in DEPLOY.glob("config/*.toml"):
            self.assertEqual(tomllib.loads(config.read_text())["data"], f"/var/lib/{unit()['StateDirectory']}", config)


class MetricsTest(unittest.TestCase):
    """One server with a job that was read, a reject and a group, so that every metric has a series."""

    @classmethod
    def setUpClass(cls):
        server, grpc, http = start_as_the_unit_does(local_config("tiny-kimi.toml"))
        try:
            lines = [{"id": "kept", "input_ids": [5, 6, 7]}, {"id": "refused", "input_ids": [1 << 20]}]
            (work / "job.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            for arguments in (["submit", work / "job.jsonl", "--name", "job", "--max-rejected", "1", "--wait"],
                              ["stream", "job", "--group", "trainer", "--out", work / "read"]):
                subprocess.run([BIN / "statetap", "--server", grpc, *arguments], check=True, capture_output=True, timeout=120)
            text = urllib.request.urlopen(f"http://{http}/metrics", timeout=60).read().decode()
        finally:
            server.terminate()
            cls.exit_code = server.wait(60)
            server.stdout.close()
        cls.kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
        cls.labels = collections.defaultdict(lambda: {"instance", "job"})  # which Prometheus adds; a server's own of that name it calls exported_…
        for name, labels in re.findall(r"^(statetap_\w+)(?:\{(.*)\})? \S+$", text, re.M):
            cls.labels[name] = cls.labels[name] | {"exported_job" if label == "job" else label for label in re.findall(r'(\w+)="', labels)}

    def test_the_unit_s_command_line_ends_with_0(self):
        self.assertEqual(self.exit_code, 0)

    def queries(self):
        """(where, expression, legend)"""
        board = json.loads((DEPLOY / "grafana/statetap.json").read_text())
        for panel in board["panels"]:
            for target in panel["targets"]:
                yield panel["title"], target["expr"], target["legendFormat"]
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                yield variable["name"], variable["definition"], ""
        for alert, expression in re.findall(r"alert: (\w+)\n +expr: (.+)\n", (DEPLOY / "prometheus/statetap.rules.yml").read_text()):
            yield alert, expression, ""

    def test_every_metric_that_is_asked_for_is_exported_with_its_labels(self):
        asked = list(self.queries())
        self.assertGreater(len(asked), 15)
        for where, expression, legend in asked:
            names = re.findall(r"statetap_\w+", expression)
            for name in set(names) - ON_GPUS_ALONE:
                with self.subTest(where=where, metric=name):
                    self.assertIn(name, self.kinds)
                    for selector in re.findall(name + r"\{([^}]*)\}", expression):
                        self.assertLessEqual(set(re.findall(r'(\w+)=', selector)), self.labels[name])
                    self.assertLessEqual(set(re.findall(r"\{\{(\w+)\}\}", legend)), self.labels[name] - {"job"})
                    if re.search(r"rate\(" + name, expression):
                        self.assertEqual(self.kinds[name], "counter")

    def test_every_metric_is_on_the_dashboard(self):
        shown = {name for _, expression, _ in self.queries() for name in re.findall(r"statetap_\w+", expression)}
        self.assertEqual(shown, set(self.kinds) | ON_GPUS_ALONE)

    def test_what_only_gpus_export_is_still_called_so(self):
        source = (ROOT / "server/web/metrics.cc").read_text()
        for name in ON_GPUS_ALONE:
            self.assertIn(f'"{name}"', source)


class SlurmTest(unittest.TestCase):
    """The batch script outside Slurm: as plain bash, with what Slurm sets and a scontrol that writes down how it is called."""

    @classmethod
    def setUpClass(cls):
        cls.folder = work / "slurm"
        (cls.folder / "bin").mkdir(parents=True)
        cls.calls = cls.folder / "scontrol.log"
        scontrol = cls.folder / "bin/scontrol"
        scontrol.write_text(f'#!/bin/sh\necho "$@" >> {cls.calls}\n')
        scontrol.chmod(0o755)

    def start(self, *flags):
        environment = os.environ | {"PATH": f"{self.folder / 'bin'}:{BIN}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711", "SLURMD_NODENAME": "127.0.0.1"}
        script, config = DEPLOY / "slurm/statetapd.sbatch", local_config("tiny-kimi.toml")
        with open(self.folder / "slurm.out", "a") as log:
            self.job = subprocess.Popen(["bash", script, self.folder / "data", config, *flags], env=environment, stdout=log, stderr=log,
                                        start_new_session=True)
        self.addCleanup(self.leave_nothing_running, self.job.pid)
        address = self.folder / "data/address"
        while not address.exists():
            self.assertIsNone(self.job.poll(), (self.folder / "slurm.out").read_text())
            time.sleep(0.05)
        self.address = address.read_text().strip()

    @staticmethod
    def leave_nothing_running(group):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)

    def cli(self, *arguments):
        return subprocess.run([BIN / "statetap", "--server", self.address, *arguments], check=True, capture_output=True, text=True, timeout=120).stdout

    def submit(self, name, *options):
        path = self.folder / f"{name}.jsonl"
        path.write_text(json.dumps({"id": name, "input_ids": [5, 6, 7]}) + "\n")
        self.cli("submit", path, "--name", name, *options)

    def end(self, how):
        """How often the job had been queued again after it. Slurm sends USR1 to the script and TERM to all its processes."""
        (os.kill if how == signal.SIGUSR1 else os.killpg)(self.job.pid, how)
        self.assertEqual(self.job.wait(120), 0, (self.folder / "slurm.out").read_text())
        self.assertFalse((self.folder / "data/address").exists())
        calls = self.calls.read_text().splitlines() if self.calls.exists() else []
        self.assertEqual(set(calls) - {"requeue 4711"}, set())
        return len(calls)

    def test_a_job_that_the_end_of_the_time_interrupts_goes_on_in_the_next_run(self):
        self.start("--max-shard-bytes", "1")  # once the first is stored, nothing starts
        self.submit("first", "--wait")
        self.submit("second")
        self.assertEqual(self.end(signal.SIGUSR1), 1)
        self.start()
        self.cli("watch", "second")
        self.assertEqual([json.loads(self.cli("--json", "show", name))["counts"]["stored"] for name in ("first", "second")], [1, 1])
        self.assertEqual(self.end(signal.SIGUSR1), 1, "nothing is unfinished")
        self.start("--max-shard-bytes", "1")
        self.submit("third")
        self.assertEqual(self.end(signal.SIGTERM), 1, "somebody wanted it to end")


if __name__ == "__main__":
    unittest.main()
