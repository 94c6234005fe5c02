"""docs/trainers.md word for word: its commands, one after another, in a folder that looks like a checkout. Needs .venv-trainers. Run by ctest as package_test.py is.

Other than on the page: what is installed there was installed by the build; ports and folders are the test's; trainings run on a CPU, as the page says it, in
short rows with one draft step; the example trains one drafter on 64 chats.
"""
import os
import re
import socket
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

try:
    import speculators  # noqa: F401
except ImportError:
    print(f"{sys.executable} has no speculators (scripts/setup.sh --trainers makes .venv-trainers with it): not tested")
    sys.exit(77)
from served import BIN, ROOT, losses_of

INSTALLS = ("scripts/setup.sh", "python3 -m venv", ". trainer/bin/activate", "pip install")
SERVERS = ("build/bin/statetapd ", "python -m statetap.endpoint ")
ON_A_CPU = f"{sys.executable} {ROOT}/tests/python/speculators_on_cpu.py \"$@\" --total-seq-len 128 --num-workers 0 --ttt-steps 1 --optimizer adamw"
SPECULATORS = f"exec {ON_A_CPU}"
PYTHON = f"""
case "$1 $2" in
  "-m statetap.speculators") shift 2; exec {ON_A_CPU} ;;
  examples/train_drafter/*) exec {sys.executable} "$@" --prompts examples/prompts_64.jsonl --cases right --epochs 1 --draft-vocab 256 ;;
  *) exec {sys.executable} "$@" ;;
esac"""


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class TrainersPageTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="statetap-page-")))
        for name in ("models", "examples", "tests", "client"):
            (self.folder / name).symlink_to(ROOT / name)
        (self.folder / "build").mkdir()
        (self.folder / "build/bin").symlink_to(BIN)
        (self.folder / "path").mkdir()
        for name, text in (("speculators", SPECULATORS), ("python", PYTHON)):
            (self.folder / "path" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
            (self.folder / "path" / name).chmod(0o755)
        server = free_address()
        self.own = {"127.0.0.1:7070": server, "127.0.0.1:8000": free_address(), "/tmp/statetap": f"{self.folder}/server", "/dev/shm/statetap": f"{self.folder}/states"}
        self.environment = {**os.environ, "STATETAP_SERVER": server, "STATETAP_PYTHON": sys.executable, "PATH": f"{self.folder}/path:{os.environ['PATH']}"}

    def blocks(self):
        """(language, text) of the page's code blocks, without what is installed."""
        page = (ROOT / "docs/trainers.md").read_text()
        for found, own in self.own.items():
            page = page.replace(found, own)
        for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
            lines = [line for line in text.splitlines() if not line.startswith(INSTALLS)]
            if any(lines):
                yield language, "\n".join(lines)

    def start(self, command):
        more = f" --listen {self.environment['STATETAP_SERVER']} --http ''" if "statetapd" in command else ""
        log = self.enterContext(open(self.folder / "servers.log", "a"))
        process = subprocess.Popen(["bash", "-c", f"exec {command}{more}"], cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=log, text=True)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait, 60)
        self.addCleanup(process.terminate)
        self.assertIn("ready", process.stdout.readline(), (self.folder / "servers.log").read_text()[-2000:])

    def run_block(self, command):
        done = subprocess.run(command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800)
        self.assertEqual(done.returncode, 0, f"{command[-1]}\n{done.stdout[-3000:]}")
        return done.stdout

    def test_every_command_of_the_page_works_in_its_place(self):
        losses, script, commands = [], "", 0
        for language, text in self.blocks():
            if language == "python":
                script += text + "\n"
                self.run_block([sys.executable, "-c", script])
            elif text.startswith(SERVERS):
                self.start(text)
            else:
                told = self.run_block(["bash", "-e", "-o", "pipefail", "-c", text])
                losses += [losses_of(told, epochs=5)] if "--epochs 5" in text else []
            commands += 1
        self.assertEqual(losses, [losses[0]] * 3, "the same rows in the same order, whichever of the three ways they come")
        _, first, last = losses[0]
        self.assertLess(last, first)
        self.assertGreater(commands, 10)
        print(f"loss of the first epoch {first:.3f}, of the fifth {last:.3f}, three ways alike", file=sys.stderr)


if __name__ == "__main__":
    unittest.main()
