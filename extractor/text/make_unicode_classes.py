#!/usr/bin/env python3
"""Writes unicode_classes.inc: runs of code points that Kimi's split pattern treats alike.

    pip install regex==2024.11.6        # its tables are Unicode 16.0, as tiktoken 0.14's are
    python3 make_unicode_classes.py > unicode_classes.inc
"""
import regex

# Names as in split_pattern.h; the bits are the same there.
CLASSES = [
    ("kHan", 1, r"\p{Script=Han}"),
    ("kHead", 2, r"(?!\p{Script=Han})[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"),
    ("kTail", 4, r"(?!\p{Script=Han})[\p{Ll}\p{Lm}\p{Lo}\p{M}]"),
    ("kLetter", 8, r"\p{L}"),
    ("kNumber", 16, r"\p{N}"),
    ("kSpace", 32, r"\p{White_Space}"),
]


def class_of(code, patterns):
    if 0xD800 <= code < 0xE000:
        return 0
    return sum(bit for bit, pattern in patterns if pattern.match(chr(code)))


def main():
    patterns = [(bit, regex.compile(text)) for _, bit, text in CLASSES]
    runs, last = [], None
    for code in range(0x110000):
        bits = class_of(code, patterns)
        if bits != last:
            runs.append((code, bits))
            last = bits
    print("// Made by make_unicode_classes.py (Unicode 16.0): a run's first code point, its class bits.")
    print("// clang-format off")
    for begin in range(0, len(runs), 8):
        print(" ".join(f"{{0x{code:x}, {bits}}}," for code, bits in runs[begin:begin + 8]))
    print("// clang-format on")


main()
