"""tokenizer_bench beside tiktoken: the same texts in the same run, one thread and its processor time each, alternating, medians of the rounds.

  english, cjk     messages of the machine's gettext catalogs: the English ones, and their Chinese, Japanese and Korean translations
  letters, spaces  10 MB of one character; here `baseline` is our own rate on the English text, and 0.5 the bar
  chats            seconds that `statetap tokens` takes to validate, render and tokenise 25,000 chats of such messages
The ids of both are equal, or the bench fails. Ends each case with a line of JSON.
"""
import argparse
import array
import gettext
import json
import pathlib
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time

root = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root / "tests/python"))
import kimi_tiktoken  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--bin", type=pathlib.Path, default=root / "build/bin")
parser.add_argument("--bytes", type=int, default=10_000_000)
parser.add_argument("--rounds", type=int, default=5)
options = parser.parse_args()


def catalogs(languages):
    """Pairs (English, translation) of all installed catalogs of these languages, in a fixed order."""
    for language in languages:
        for path in sorted(pathlib.Path("/usr/share/locale", language, "LC_MESSAGES").glob("*.mo")):
            try:
                catalog = gettext.GNUTranslations(path.open("rb"))._catalog
            except (UnicodeDecodeError, OSError):
                continue
            for english, translation in catalog.items():
                if isinstance(english, str) and english and isinstance(translation, str):
                    yield english, translation


def filled(messages):
    """The messages joined and repeated up to --bytes."""
    text = "\n".join(messages)
    size = len(text.encode())
    if size < 200_000:
        sys.exit("too few gettext catalogs under /usr/share/locale: install some, such as gcc's or git's translations")
    print(f"{size:,} bytes of different messages, repeated up to {options.bytes:,}", file=sys.stderr)
    return (text * (options.bytes // size + 1)).encode()[:options.bytes].decode(errors="ignore")


def report(case, value, unit="MB/s", baseline=None, baseline_value=None, ratio=None):
    def number(x, digits):
        return None if x is None else round(x, digits)
    print(json.dumps({"bench": "tokenizer_bench", "case": case, "value": number(value, 2), "unit": unit, "baseline": baseline,
                      "baseline_value": number(baseline_value, 2), "ratio": number(ratio, 3)}), flush=True)


def write_chats(path, messages, count):
    """Chats of one to three rounds, a question, a thought and an answer each; returns their bytes."""
    generator = random.Random(1)

    def prose(most):
        return " ".join(generator.choice(messages) for _ in range(generator.randrange(1, most)))
    with path.open("w") as file:
        for i in range(count):
            chat = []
            for _ in range(generator.randrange(1, 4)):
                chat += [{"role": "user", "content": prose(8)}, {"role": "assistant", "reasoning_content": prose(16), "content": prose(16)}]
            file.write(json.dumps({"id": f"chat-{i}", "messages": chat}, ensure_ascii=False) + "\n")
    return path.stat().st_size


with tempfile.TemporaryDirectory() as work:
    work = pathlib.Path(work)
    data = root / "tests/data/text"
    (work / "tiktoken.model").write_bytes((data / "bpe20k.tiktoken.model").read_bytes())
    (work / "tokenizer_config.json").write_bytes((data / "bpe20k.tokenizer_config.json").read_bytes())
    encoding = kimi_tiktoken.load(work / "tiktoken.model", work / "tokenizer_config.json")

    def ours(text):
        (work / "text").write_bytes(text.encode())
        seconds = subprocess.run([options.bin / "tokenizer_bench", work, work / "text", work / "ids"], check=True, capture_output=True, text=True).stdout
        ids = array.array("i")
        ids.frombytes((work / "ids").read_bytes())
        return len(text.encode()) / 1e6 / float(seconds), ids.tolist()

    def theirs(text):
        parts = list(kimi_tiktoken.chunks(text))
        begun = time.process_time()
        ids = [encoding.encode_ordinary(part) for part in parts]
        return len(text.encode()) / 1e6 / (time.process_time() - begun), [i for part in ids for i in part]

    chinese_japanese_korean = list(catalogs(["zh_CN", "ja", "ko", "zh_TW"]))
    texts = {"english": filled(sorted({english for english, _ in chinese_japanese_korean})),
             "cjk": filled([translation for _, translation in chinese_japanese_korean])}
    rates = {}
    for case, text in texts.items():
        mine, peer, ratios = [], [], []
        for number in range(options.rounds):
            order = [ours, theirs] if number % 2 == 0 else [theirs, ours]
            results = {side: side(text) for side in order}
            if results[ours][1] != results[theirs][1]:
                sys.exit(f"{case}: ids differ from tiktoken's")
            mine.append(results[ours][0])
            peer.append(results[theirs][0])
            ratios.append(mine[-1] / peer[-1])
        rates[case] = statistics.median(mine)
        report(case, rates[case], "MB/s", f"tiktoken-{kimi_tiktoken.tiktoken.__version__}", statistics.median(peer), statistics.median(ratios))
    for case, character in (("letters", "a"), ("spaces", " ")):
        prose, run = [], []
        for _ in range(options.rounds):
            prose.append(ours(texts["english"])[0])
            run.append(ours(character * options.bytes)[0])
        report(case, statistics.median(run), "MB/s", "statetap-english", statistics.median(prose),
               statistics.median(r / p for r, p in zip(run, prose)))
    size = write_chats(work / "chats.jsonl", [m for pair in chinese_japanese_korean for m in pair], 25_000)
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([options.bin / "statetap", "tokens", work / "chats.jsonl", "--model", work, "--template", "kimi-k2.5", "--json"],
                   check=True, stdout=subprocess.DEVNULL)
    seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"25,000 chats, {size:,} bytes: {after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime:.2f} s of processor time", file=sys.stderr)
    report("chats", seconds, "s")
