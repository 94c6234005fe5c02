"""Prompts as a person has them, as samples of a job."""
from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Union

from statetap.errors import missing_package
from statetap.v1 import jobs_pb2

Prompt = Union[str, Mapping[str, Any]]


def samples_of(prompts: "str | os.PathLike[str] | Iterable[Prompt]", default_source: str = "") -> Iterator[jobs_pb2.SampleInput]:
    """A file (.jsonl, .jsonl.gz, .parquet, .arrow; a row a prompt), a folder that `datasets` saved, or prompts: a text is a user's message, a
    mapping has one of the shapes of sample_of(). ValueError names line, field and remedy."""
    place = "prompt"
    if isinstance(prompts, (str, os.PathLike)):
        path = Path(prompts)
        place, default_source, prompts = str(path), default_source or path.name, _rows(path)
    for number, prompt in enumerate(prompts, 1):
        try:
            sample = sample_of({"messages": [{"role": "user", "content": prompt}]} if isinstance(prompt, str) else prompt)
        except ValueError as error:
            raise ValueError(f"{place} {number}: {error}") from None
        sample.source = sample.source or default_source
        sample.source_line = number
        yield sample


def sample_of(prompt: Mapping[str, Any]) -> jobs_pb2.SampleInput:
    """{"messages", "tools"?} · {"prompt": "raw text"} · {"input_ids", "loss_mask"?} · {"prompt_token_ids", "token_ids"}, and on each, optionally,
    id, source, meta, thinking, max_new_tokens, temperature, top_p. ShareGPT and OpenAI batch lines: `statetap submit` reads them."""
    given = {name: value for name, value in prompt.items() if value is not None}
    shapes = [name for name in ("messages", "prompt", "input_ids", "prompt_token_ids") if name in given]
    other = [name for name in ("conversations", "body") if name in given]
    if other:
        raise ValueError(f"{other[0]} is of a ShareGPT or OpenAI batch line: `statetap submit` reads the file, or give its messages")
    if len(shapes) != 1:
        raise ValueError(f"has {' and '.join(shapes) or 'none'} of messages, prompt, input_ids, prompt_token_ids; give exactly one")
    sample = jobs_pb2.SampleInput()
    if shapes == ["messages"]:
        sample.chat.messages_json = _json("messages", given["messages"], list)
        if "tools" in given:
            sample.chat.tools_json = _json("tools", given["tools"], list)
    elif shapes == ["prompt"]:
        sample.prompt = _text("prompt", given["prompt"])
    elif shapes == ["input_ids"]:
        sample.tokens.ids.extend(_ids("input_ids", given["input_ids"]))
        if "loss_mask" in given:
            mask = [int(m) for m in given["loss_mask"]]
            if len(mask) != len(sample.tokens.ids) or set(mask) - {0, 1}:
                raise ValueError(f"loss_mask has {len(mask)} values for {len(sample.tokens.ids)} input_ids; give 0 or 1 for each token")
            sample.tokens.loss_mask = bytes(mask)
    else:
        if "token_ids" not in given:
            raise ValueError("token_ids is missing; prompt_token_ids needs the answer's token_ids beside it")
        question, answer = _ids("prompt_token_ids", given["prompt_token_ids"]), _ids("token_ids", given["token_ids"])
        sample.tokens.ids.extend(question + answer)
        sample.tokens.loss_mask = bytes([0] * len(question) + [1] * len(answer))
    _set_options(sample, given)
    return sample


def _set_options(sample: jobs_pb2.SampleInput, given: Mapping[str, Any]) -> None:
    if "id" in given:
        sample.id = str(given["id"])
    if "source" in given:
        sample.source = _text("source", given["source"])
    if "meta" in given:
        sample.meta_json = _json("meta", given["meta"], dict)
    for name in ("thinking", "max_new_tokens", "temperature", "top_p"):
        if name in given:
            try:
                setattr(sample, name, given[name])
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name} is {given[name]!r}; {error}") from None


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; give a text")
    return value


def _json(name: str, value: Any, kind: type) -> str:
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r}; give a {'list' if kind is list else 'mapping'}")
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _ids(name: str, value: Any) -> list[int]:
    ids = [int(i) for i in value]
    if any(not -(2**31) <= i < 2**31 for i in ids):
        raise ValueError(f"{name}: a token id is an integer below 2^31")
    return ids


def _rows(path: Path) -> Iterator[Prompt]:
    if path.is_dir():
        for file in _saved_files(path):
            yield from _arrow_rows(file)
        return
    if path.suffix == ".arrow":
        yield from _arrow_rows(path)
        return
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet as parquet
        except ImportError:
            raise missing_package("pyarrow", "parquet", "reading .parquet") from None
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
        return
    if path.suffix == ".zst":
        raise ValueError(f"{path}: zstd is not read here; `statetap submit` does, or decompress it with zstd -d")
    with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield json.loads(line.decode())
                except ValueError as error:  # UnicodeDecodeError is one
                    raise ValueError(f"{path} {number}: {error}; a line must be one JSON object in UTF-8") from None


def _saved_files(folder: Path) -> list[Path]:
    """The files of a folder written by datasets' Dataset.save_to_disk, in order."""
    if (folder / "dataset_dict.json").exists():
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        raise ValueError(f"{folder} holds the splits {', '.join(splits)}; give one of them: {folder / splits[0]}")
    if not (folder / "state.json").exists():
        raise ValueError(f"{folder} has no state.json of datasets' save_to_disk; give such a folder, or one .jsonl, .parquet or .arrow file")
    return [folder / file["filename"] for file in json.loads((folder / "state.json").read_text())["_data_files"]]


def _arrow_rows(path: Path) -> Iterator[Prompt]:
    try:
        import pyarrow.ipc
    except ImportError:
        raise missing_package("pyarrow", "parquet", "reading .arrow") from None
    with pyarrow.memory_map(str(path)) as source:
        try:  # as a stream, which `datasets` writes, or as a file
            batches = pyarrow.ipc.open_stream(source)
        except pyarrow.ArrowInvalid:
            file = pyarrow.ipc.open_file(source)
            batches = (file.get_batch(i) for i in range(file.num_record_batches))
        for batch in batches:
            yield from batch.to_pylist()
