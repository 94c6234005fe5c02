"""Kimi's tokenizer on top of tiktoken, as the vendor's own code has it: the independent reference of our tokenizer.

Only the pattern, the cutting of long text and the names of special tokens are Kimi's; splitting and merging are tiktoken's.
"""
import base64
import json
import pathlib

import tiktoken

UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join([
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTION}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTION}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
])
WINDOW, LONGEST_RUN, SPECIALS = 400_000, 25_000, 256


def load(model, config):
    """The encoding of a tiktoken.model and its tokenizer_config.json."""
    ranks = {}
    for line in pathlib.Path(model).read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    names = {int(i): entry["content"] for i, entry in json.loads(pathlib.Path(config).read_text())["added_tokens_decoder"].items()}
    specials = {names.get(i, f"<|reserved_token_{i}|>"): i for i in range(len(ranks), len(ranks) + SPECIALS)}
    return tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=specials)


def chunks(text):
    """Windows of 400,000 characters, cut where a run of spaces or of non-spaces gets longer than 25,000."""
    for start in range(0, len(text), WINDOW):
        window = text[start:start + WINDOW]
        begin = run = 0
        space = None
        for at, character in enumerate(window):
            if character.isspace() == space:
                run += 1
            else:
                space, run = character.isspace(), 1
            if run > LONGEST_RUN:
                yield window[begin:at]
                begin, run = at, 1
        yield window[begin:]


def encode(encoding, text, specials=False):
    ids = []
    for chunk in chunks(text):
        ids += encoding.encode(chunk, allowed_special="all" if specials else set(), disallowed_special=())
    return ids
