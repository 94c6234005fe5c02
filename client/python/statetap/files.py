"""Files that trainers read, written without their packages: safetensors, torch.save's zip form, npy. Each appears whole or not at all."""
from __future__ import annotations

import contextlib
import json
import os
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, Iterator, Mapping, Union

import numpy as np


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name when it is complete."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    with replaced(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


class Bf16:
    """bf16 values as uint16 bits: numpy has no such type."""

    def __init__(self, bits: np.ndarray) -> None:
        assert bits.dtype == np.uint16
        self.bits = np.ascontiguousarray(bits)


Tensor = Union[np.ndarray, Bf16]
_SAFETENSORS = {"int64": "I64", "int32": "I32", "float32": "F32", "bool": "BOOL", "uint8": "U8"}
_TORCH = {"int64": "LongStorage", "int32": "IntStorage", "float32": "FloatStorage", "bool": "BoolStorage", "uint8": "ByteStorage"}


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.bits if isinstance(tensor, Bf16) else np.ascontiguousarray(tensor)


def _bytes(tensor: Tensor) -> memoryview:
    array = _array(tensor)
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name, tensor in tensors.items():
        array = _array(tensor)
        dtype = "BF16" if isinstance(tensor, Bf16) else _SAFETENSORS[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replaced(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(_bytes(tensor))


def write_torch(path: Path, value: "Mapping[Any, Any]") -> None:
    """What torch.save writes of a dict of tensors, numbers, truths and texts (ints map to ints, too). Members are stored, never deflated, and each
    tensor's storage is its own, at a multiple of 64 bytes: torch.load(mmap=True, weights_only=True) reads it."""
    pickled, storages = _pickle(value)
    with replaced(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        _member(archive, file, "data.pkl", memoryview(pickled))
        _member(archive, file, "byteorder", memoryview(b"little"))
        for number, tensor in enumerate(storages):
            _member(archive, file, f"data/{number}", _bytes(tensor))
        _member(archive, file, "version", memoryview(b"3\n"))


_LOCAL_HEADER_BYTES = 30  # of a zip archive's member, without its name


def _member(archive: zipfile.ZipFile, file: BinaryIO, name: str, data: memoryview) -> None:
    info = zipfile.ZipInfo(f"archive/{name}")
    header = file.tell() + _LOCAL_HEADER_BYTES + len(info.filename)
    padding = -(header + 4) % 64
    info.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    info.file_size = len(data)
    with archive.open(info, "w", force_zip64=False) as member:
        member.write(data)


def _pickle(value: "Mapping[Any, Any]") -> "tuple[bytes, list[Tensor]]":
    storages: list[Tensor] = []

    def text(value: str) -> bytes:
        raw = value.encode()
        return b"X" + struct.pack("<I", len(raw)) + raw

    def number(value: int) -> bytes:
        if -(2**31) <= value < 2**31:
            return b"J" + struct.pack("<i", value)
        return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)

    def numbers(values: "tuple[int, ...]") -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    def tensor(value: Tensor) -> bytes:
        array = _array(value)
        kind = "BFloat16Storage" if isinstance(value, Bf16) else _TORCH[array.dtype.name]
        strides = tuple(stride // array.itemsize for stride in array.strides)
        storage = b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(str(len(storages))) + text("cpu") + number(array.size) + b"tQ"
        storages.append(value)
        return (b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(0) + numbers(array.shape) + numbers(strides)
                + b"\x89ccollections\nOrderedDict\n)RtR")  # fmt: skip

    def item(value: Any) -> bytes:
        if isinstance(value, (np.ndarray, Bf16)):
            return tensor(value)
        if isinstance(value, bool):
            return b"\x88" if value else b"\x89"
        return number(value) if isinstance(value, int) else text(value)

    body = b"".join(item(key) + item(entry) for key, entry in value.items())
    return b"\x80\x02}(" + body + b"u.", storages


def round_to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 to bf16 bits, to nearest even. NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), (bits >> 16).astype(np.uint16) | 0x40, rounded)
