"""Our ids are tiktoken's, over all of Unicode 16: seeded random texts, long runs and windows, spelled special tokens, on two vocabularies.

Run by ctest with STATETAP_BIN and STATETAP_ROOT. Without tiktoken (scripts/setup.sh --tests installs it) it is skipped (exit code 77).
"""
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import unicodedata
import unittest

try:
    import kimi_tiktoken
except ImportError as error:
    print(f"{error}: not tested; scripts/setup.sh --tests installs what is missing")
    sys.exit(77)

BIN = pathlib.Path(os.environ["STATETAP_BIN"])
ROOT = pathlib.Path(os.environ["STATETAP_ROOT"])


def scalar(generator):
    """Any Unicode scalar value, assigned or not."""
    code = generator.randrange(0x110000 - 0x800)
    return chr(code if code < 0xd800 else code + 0x800)


def by_category():
    """The assigned characters of the basic plane by general category, so that rare ones are as likely as common ones."""
    groups = {}
    for code in [*range(0xd800), *range(0xe000, 0x10000)]:
        groups.setdefault(unicodedata.category(chr(code)), []).append(chr(code))
    return list(groups.values())


SEAMS = ["'s", "'LL", "'\u017f", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u180e", "\x1c", "\x00", "a", "B", "1", "½", "\u0301", "\u02b0", "中", "々", "〇", "、",
         "あ", "가", "ǅ", "ª", "_", "!", "…", "🎉", "\U00031350", "\U000323b0", "\U00011f04", "\U0001e030", "\u1c89"]


def texts():
    generator, groups = random.Random(7), by_category()
    yield from ("".join(scalar(generator) for _ in range(generator.randrange(1, 60))) for _ in range(2000))
    yield from ("".join(generator.choice(generator.choice(groups)) for _ in range(generator.randrange(1, 60))) for _ in range(2000))
    yield from ("".join(generator.choice(SEAMS) for _ in range(generator.randrange(1, 30))) for _ in range(3000))
    # Every assigned or unassigned character once, between letters, spaces and Han.
    for start in range(0, 0x110000, 0x400):
        codes = (code for code in range(start, start + 0x400) if not 0xd800 <= code < 0xe000)
        text = "".join(chr(code) + generator.choice(["a", " ", "", "中", "B", "\n"]) for code in codes)
        if text:
            yield text
    # Where the vendor cuts: runs around 25,000, windows of 400,000.
    for length in (24_999, 25_000, 25_001, 50_001, 400_001):
        yield "a" * length
        yield "word" + " " * length + "word"
    yield "".join(generator.choice(["word ", "中文", "\x1c ", "12 "]) for _ in range(150_000))


class TiktokenTest(unittest.TestCase):
    def compare(self, model, config, specials):
        encoding = kimi_tiktoken.load(model, config)
        inputs = list(texts())
        if specials:
            names, generator = sorted(encoding.special_tokens_set), random.Random(8)
            inputs = ["".join(generator.choice(SEAMS + [generator.choice(names)]) for _ in range(20)) for _ in range(1000)]
            # The vendor does not see a token across a cut.
            inputs += ["x" * (25_000 - k) + "<|im_end|>" + "x" * 30 for k in range(12)]
        with tempfile.TemporaryDirectory() as work:
            work = pathlib.Path(work)
            (work / "tiktoken.model").write_bytes(model.read_bytes())
            (work / "tokenizer_config.json").write_bytes(config.read_bytes())
            (work / "texts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in inputs))
            command = [BIN / "statetap", "tokens", work / "texts.jsonl", "--model", work, "--json", *(["--parse-special"] if specials else [])]
            lines = subprocess.run(command, check=True, capture_output=True).stdout.split(b"\n")[:-1]
        self.assertEqual(len(lines), len(inputs))
        for line, text in zip(lines, inputs):
            self.assertEqual(json.loads(line)["input_ids"], kimi_tiktoken.encode(encoding, text, specials), repr(text[:200]))

    def test_bpe20k(self):
        self.compare(ROOT / "tests/data/text/bpe20k.tiktoken.model", ROOT / "tests/data/text/bpe20k.tokenizer_config.json", specials=False)

    def test_bpe20k_with_specials(self):
        self.compare(ROOT / "tests/data/text/bpe20k.tiktoken.model", ROOT / "tests/data/text/bpe20k.tokenizer_config.json", specials=True)

    def test_tiny_kimi(self):
        self.compare(ROOT / "models/tiny-kimi/tiktoken.model", ROOT / "models/tiny-kimi/tokenizer_config.json", specials=False)


if __name__ == "__main__":
    unittest.main()
