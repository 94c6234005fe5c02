"""`where`: an expression over samples, the same language as `--where` of the command line (docs/operate.md).

    source == "toolbench" and not (tokens > 4096 or meta.lang in ("de", "fr"))

A comparison with a value that is missing or of another kind is false, so `not` of it is true. The command line's implementation is
extractor/shard/sample_filter; tests/data/sample_filter_cases.json holds both to the same cases.
"""
from __future__ import annotations

import json
import math
import operator
import re
from typing import Any, Callable, Mapping, Union

Value = Union[str, float, bool]
Facts = Mapping[str, Any]  # the fields below, those that are missing left out, and meta_json
Predicate = Callable[[Facts], bool]

FIELDS: dict[str, type] = {
    "id": str, "source": str, "split": str, "finish": str, "index": float, "prompt_tokens": float, "tokens": float,
    "supervised_tokens": float, "generated_tokens": float, "logprob": float, "truncated": bool,
}  # fmt: skip
_KINDS = {str: "text in quotes", float: "a number", bool: "true or false"}
_RELATIONS = {"==": operator.eq, "!=": operator.ne, "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
_ESCAPES = {"\\": "\\", '"': '"', "'": "'", "n": "\n", "t": "\t"}
_NUMBER = re.compile(r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_WORD = re.compile(r"\w*", re.ASCII)
_MAX_DEPTH = 100


def parse(text: str) -> Predicate:
    """A predicate over a sample's facts. ValueError names the place and what is wanted there."""
    if not text.strip():
        return lambda facts: True
    return _Parser(text).parse()


def fields_of(text: str) -> set[str]:
    """The fields that an expression reads; "meta_json" for any of meta's."""
    if not text.strip():
        return set()
    parser = _Parser(text)
    parser.parse()
    return parser.fields


def _kind(value: Any) -> type | None:
    if isinstance(value, bool):
        return bool
    if isinstance(value, (int, float)):
        return float
    return str if isinstance(value, str) else None


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.fields: set[str] = set()

    def parse(self) -> Predicate:
        found = self.any(0)
        self.space()
        if self.at != len(self.text):
            raise self.wanted("and, or, or the end")
        return found

    def space(self) -> None:
        while self.at < len(self.text) and self.text[self.at] in " \t\n\v\f\r":
            self.at += 1

    def word(self) -> str:
        self.space()
        return _WORD.match(self.text, self.at).group()  # type: ignore[union-attr]

    def take_word(self, word: str) -> bool:
        if self.word() != word:
            return False
        self.at += len(word)
        return True

    def take(self, symbol: str) -> bool:
        self.space()
        if not self.text.startswith(symbol, self.at):
            return False
        self.at += len(symbol)
        return True

    def wanted(self, what: str) -> ValueError:
        self.space()
        return ValueError(f'where: at character {self.at + 1}, before "{self.text[self.at:self.at + 20]}": {what} is wanted here')

    def any(self, depth: int) -> Predicate:
        return self.joined_by(depth, "or", any, self.every)

    def every(self, depth: int) -> Predicate:
        return self.joined_by(depth, "and", all, self.negation)

    def joined_by(self, depth: int, word: str, joined: Callable[..., bool], part: Callable[[int], Predicate]) -> Predicate:
        if depth > _MAX_DEPTH:
            raise self.wanted("an expression of fewer levels")
        parts = [part(depth + 1)]
        while self.take_word(word):
            parts.append(part(depth + 1))
        return parts[0] if len(parts) == 1 else lambda facts: joined(p(facts) for p in parts)

    def negation(self, depth: int) -> Predicate:
        if depth > _MAX_DEPTH:
            raise self.wanted("an expression of fewer levels")
        if self.take_word("not"):
            inner = self.negation(depth + 1)
            return lambda facts: not inner(facts)
        if not self.take("("):
            return self.comparison()
        inner = self.any(depth + 1)
        if not self.take(")"):
            raise self.wanted("and, or, or a closing parenthesis")
        return inner

    def comparison(self) -> Predicate:
        name, read, kind = self.field()
        negated = False
        relation = self.relation()
        if relation is None and kind is bool:  # `truncated` alone
            return lambda facts: read(facts) is True
        if relation is None and self.take_word("not"):
            if not self.take_word("in"):
                raise self.wanted("in")
            relation, negated = "in", True
        if relation is None:
            raise self.wanted("a comparison (== != < <= > >= in)")
        values = self.values(relation, name, kind)
        compare = _RELATIONS.get(relation, operator.eq)

        def holds(facts: Facts) -> bool:
            found = read(facts)
            return negated != any(_kind(found) is _kind(value) and compare(found, value) for value in values)

        return holds

    def field(self) -> tuple[str, Callable[[Facts], Any], type | None]:
        word = self.word()
        if word == "meta":
            self.at += len(word)
            name = self.meta_name()
            self.fields.add("meta_json")
            return name, lambda facts: _meta(facts.get("meta_json"), name), None
        if word not in FIELDS:
            raise self.wanted(f"a field ({', '.join(FIELDS)}, meta.NAME)")
        self.at += len(word)
        self.fields.add(word)
        return word, lambda facts: facts.get(word), FIELDS[word]

    def meta_name(self) -> str:
        if not self.take("."):
            raise self.wanted("a name as in meta.lang")
        self.space()
        if self.text[self.at : self.at + 1] in ('"', "'"):
            return self.string()
        name = self.word()
        if not name:
            raise self.wanted("a name as in meta.lang")
        self.at += len(name)
        return name

    def relation(self) -> str | None:
        for symbol in _RELATIONS:
            if self.take(symbol):
                return symbol
        return "in" if self.take_word("in") else None

    def values(self, relation: str, name: str, kind: type | None) -> list[Value]:
        if relation != "in":
            return [self.value(relation, name, kind)]
        if not self.take("("):
            raise self.wanted('a list as in ("a", "b")')
        values = [self.value(relation, name, kind)]
        while self.take(","):
            values.append(self.value(relation, name, kind))
        if not self.take(")"):
            raise self.wanted("a comma or a closing parenthesis")
        return values

    def value(self, relation: str, name: str, kind: type | None) -> Value:
        self.space()
        begin = self.at
        value = self.any_value()
        if kind is not None and _kind(value) is not kind:
            self.at = begin
            raise self.wanted(f"{_KINDS[kind]} to compare {name} with")
        if isinstance(value, bool) and relation not in ("==", "!=", "in"):
            self.at = begin
            raise self.wanted("a value with an order (true and false have == and != only)")
        return value

    def any_value(self) -> Value:
        if self.text[self.at : self.at + 1] in ('"', "'"):
            return self.string()
        for word, value in (("true", True), ("false", False)):
            if self.take_word(word):
                return value
        number = _NUMBER.match(self.text, self.at)
        word_follows = number is not None and _WORD.match(self.text, number.end()).group()  # type: ignore[union-attr]
        if number is None or word_follows or not math.isfinite(float(number.group())):
            raise self.wanted("text in quotes, a number, true or false")
        self.at = number.end()
        return float(number.group())

    def string(self) -> str:
        begin, quote = self.at, self.text[self.at]
        self.at += 1
        text = ""
        while self.at < len(self.text) and self.text[self.at] != quote:
            c = self.text[self.at]
            if c == "\\":
                self.at += 1
                c = _ESCAPES.get(self.text[self.at : self.at + 1], "")
                if not c:
                    raise self.wanted("one of \\\\ \\\" \\' \\n \\t")
            text += c
            self.at += 1
        if self.at == len(self.text):
            self.at = begin
            raise self.wanted("text that ends with the quote it begins with")
        self.at += 1
        return text


def _meta(text: str | None, name: str) -> Any:
    try:
        meta = json.loads(text) if text else None
    except ValueError:
        return None
    return meta.get(name) if isinstance(meta, dict) else None
