"""Makes the pictures of docs/inspect.md anew, from the programs of build/ and tiny-kimi:
    .venv/bin/python docs/pictures/make.py
Needs chromium and, for the terminal's, `pip install ansi2html`."""
import fcntl
import json
import os
import pathlib
import pty
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time

from ansi2html import Ansi2HTMLConverter

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BIN, MODEL = ROOT / "build/bin", ROOT / "models/tiny-kimi"
sys.path.insert(0, str(ROOT / "tests/e2e"))
from browser import Browser  # noqa: E402

SAMPLE = "chat-65-000000"
work = pathlib.Path(tempfile.mkdtemp(prefix="statetap-"))


def cli(*arguments):
    result = subprocess.run([BIN / "statetap", *map(str, arguments)], capture_output=True, text=True)
    if result.returncode not in (0, 3):
        sys.exit(f"statetap {arguments}: exit {result.returncode}\n{result.stderr}")
    return result.stdout


def show(job):
    return json.loads(cli("--json", "show", job))


def at_a_terminal(width, *arguments):
    """What a command prints at a terminal of so many columns, as a page."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    process = subprocess.Popen([BIN / "statetap", *map(str, arguments)], stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm-256color"})
    os.close(theirs)
    text = b""
    try:
        while more := os.read(ours, 1 << 16):
            text += more
    except OSError:  # how Linux says that the other end is closed
        pass
    process.wait()
    words = " ".join(f"'{a}'" if " " in str(a) else str(a) for a in ("statetap", *arguments))
    page = work / "terminal.html"
    html = Ansi2HTMLConverter(scheme="xterm", dark_bg=True).convert(f"$ {words}\n{text.decode()}".replace("\r\n", "\n"))
    page.write_text(html.replace("</style>", "pre { font: 14px/1.35 'DejaVu Sans Mono', monospace; margin: 8px; }</style>"))
    return page.as_uri()


def jobs():
    """othertemplate: read under another model's template; four: that with three more faults; demo: sound, with rejects; chats: read under the
    model's own template; running: not done."""
    chats = ROOT / "tests/data/tiny-kimi/conversations_64.jsonl"
    read = ("--mode", "prefill", "--logprobs", "on", "--shard-bytes", "1MiB", "--wait")
    cli("submit", chats, "--name", "chats", *read)
    cli("submit", chats, "--name", "othertemplate", "--template", "kimi-k2-instruct", *read)
    subprocess.run([ROOT / "build/tests/alter_shards", show("othertemplate")["shards_path"], work / "four", "zero=4", f"normed={MODEL}", "scaled=1:2"],
                   check=True)
    prompts = (ROOT / "examples/prompts_64.jsonl").read_text()
    refused = [{"id": "of-another-tokenizer", "input_ids": [9000, 9001]}, {"id": "too-long", "input_ids": [7] * 9000}]
    (work / "prompts.jsonl").write_text(prompts + "".join(json.dumps(line) + "\n" for line in refused))
    cli("submit", work / "prompts.jsonl", "--name", "demo", "--mode", "generate", "--shard-bytes", "1MiB", "--max-rejected", 2, "--wait")
    (work / "long.jsonl").write_text("".join(json.dumps({"id": f"{i}", "prompt": f"Tell me about {i}."}) + "\n" for i in range(4000)))
    cli("submit", work / "long.jsonl", "--name", "running", "--temperature", 5, "--top-p", 1, "--shard-bytes", "1MiB")
    while show("running")["counts"]["stored"] < 200:
        time.sleep(0.1)


def pictures(browser, http):
    browser.look(1000)
    browser.open(f"{http}/")
    browser.picture(HERE / "jobs.png")
    cli("cancel", "running")
    browser.open(f"{http}/job?id={show('othertemplate')['id']}")
    browser.picture(HERE / "job.png", end="By kind of token")
    browser.open(f"{http}/job?id={show('demo')['id']}")
    browser.picture(HERE / "rejected.png", begin="Shards")
    sample = f"{http}/sample?job={show('chats')['id']}&id={SAMPLE}"
    browser.open(sample)
    browser.picture(HERE / "sample.png")
    browser.look(400, dark=True)
    browser.open(sample)
    browser.picture(HERE / "sample-narrow-dark.png")
    subprocess.run([BIN / "statetap", "stats", "four", "--model", MODEL, "--html", "report.html"], cwd=work, check=True, stdout=subprocess.DEVNULL)
    browser.look(1080)
    browser.open((work / "report.html").as_uri())
    browser.picture(HERE / "report.png")
    browser.look(1100, 100)
    browser.open(at_a_terminal(110, "view", "chats", SAMPLE))
    browser.picture(HERE / "view.png")


server = subprocess.Popen([BIN / "statetapd", "--model", MODEL, "--data", work / "data", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--backend", "cpu"],
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
try:
    ready = server.stdout.readline()
    os.environ["STATETAP_SERVER"], http = (ready.split(f"{name}=")[1].split()[0] for name in ("grpc", "http"))
    jobs()
    browser = Browser(work)
    pictures(browser, f"http://{http}")
    browser.close()
finally:
    server.terminate()
    server.wait()
    shutil.rmtree(work)
