"""A shard file (docs/shard-format.md). Rows are read straight from where the file's footer says they lie; only the table of samples goes
through h5py, whose handle is closed again at once."""
from __future__ import annotations

import contextlib
import functools
import os
import struct
from pathlib import Path
from typing import Any, Iterator

import numpy as np

from statetap.errors import DataLossError, missing_package
from statetap.sample import Sample

try:
    import h5py
except ImportError:  # said where it is needed
    h5py = None

_TRAILER = struct.Struct("<5Q16s")
_MAGIC = b"statetap-shard-1"
_DTYPES: dict[int, np.dtype[Any]] = {0: np.dtype("u1"), 1: np.dtype("<i4"), 4: np.dtype("<f4"), 6: np.dtype("<u2"), 7: np.dtype("u1")}
_MAX_OPEN_FILES = 32


class _Files:
    """Descriptors of this process by path, the longest unused closed first. A descriptor is closed once nobody reads from it; reads are by place
    (preadv), so that threads and forked children share descriptors without harm. No lock: each step is one operation on a dict."""

    class Handle:
        def __init__(self, path: str) -> None:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

        def __del__(self) -> None:
            if hasattr(self, "fd"):
                os.close(self.fd)

    def __init__(self) -> None:
        self._open: dict[str, _Files.Handle] = {}

    def get(self, path: str) -> "_Files.Handle":
        handle = self._open.pop(path, None) or _Files.Handle(path)
        self._open[path] = handle
        while len(self._open) > _MAX_OPEN_FILES:
            try:
                self._open.pop(next(iter(self._open)), None)
            except (RuntimeError, StopIteration):  # another thread was faster
                pass
        return handle


_files = _Files()


class _Table:
    """Where the chunks of one dataset lie."""

    def __init__(self, kind: np.dtype[Any], rows: int, width: int, rows_per_chunk: int, offsets: np.ndarray) -> None:
        self.dtype, self.rows, self.width, self.rows_per_chunk, self.offsets = kind, rows, width, rows_per_chunk, offsets
        self.row_bytes = kind.itemsize * max(1, width)

    def read(self, path: str, begin: int, end: int, to: np.ndarray) -> None:
        """Rows [begin, end) into `to`, contiguous."""
        file = _files.get(path)
        view, at = to.data.cast("B"), 0
        for offset, size in self._extents(begin, end):
            while size > 0:
                got = os.preadv(file.fd, [view[at : at + size]], offset)
                if got == 0:
                    raise DataLossError(f"{path} ends at byte {offset}, within a chunk; the file was cut")
                at, offset, size = at + got, offset + got, size - got

    def _extents(self, begin: int, end: int) -> "list[tuple[int, int]]":
        """(offset, size) of rows [begin, end), neighbours joined."""
        joined: list[tuple[int, int]] = []
        first = begin // self.rows_per_chunk
        for chunk, offset in enumerate(self.offsets[first : -(-end // self.rows_per_chunk)].tolist(), first):
            chunk_begin = chunk * self.rows_per_chunk
            low, high = max(begin, chunk_begin), min(end, chunk_begin + self.rows_per_chunk)
            offset, size = offset + (low - chunk_begin) * self.row_bytes, (high - low) * self.row_bytes
            if joined and sum(joined[-1]) == offset:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((offset, size))
        return joined


def _chunk_tables(path: str) -> dict[str, _Table]:
    fd = _files.get(path).fd
    size = os.fstat(fd).st_size
    trailer = os.pread(fd, _TRAILER.size, max(0, size - _TRAILER.size))
    if len(trailer) != _TRAILER.size or not trailer.endswith(_MAGIC):
        raise DataLossError(f"{path} is no shard, or was cut, or was opened for writing by another program: it does not end with a shard's footer")
    hdf5_size, table_size, *_ = _TRAILER.unpack(trailer)
    if hdf5_size + table_size + _TRAILER.size != size:
        raise DataLossError(f"{path} has {size} bytes, its footer says {hdf5_size + table_size + _TRAILER.size}: it was cut or grew")
    raw, at = os.pread(fd, table_size, hdf5_size), 4
    tables = {}
    try:
        for _ in range(struct.unpack_from("<I", raw)[0]):
            (length,) = struct.unpack_from("<I", raw, at)
            name = raw[at + 4 : at + 4 + length].decode()
            at += 4 + length
            kind, rows, width, rows_per_chunk = struct.unpack_from("<BQQQ", raw, at)
            at += 25
            chunks = -(-rows // rows_per_chunk)
            tables[name] = _Table(_DTYPES[kind], rows, width, rows_per_chunk, np.frombuffer(raw, "<u8", chunks, at))
            at += 8 * chunks
    except (struct.error, KeyError, ValueError, ZeroDivisionError):
        raise DataLossError(f"{path}: its table of chunks is damaged") from None
    return tables


def _decode_fp8() -> np.ndarray:
    """float8 e4m3 codes as float32."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return np.where(code & 128, -magnitude, magnitude).astype(np.float32)


_FP8_VALUES = _decode_fp8()


class Shard:
    """One file. Nothing is read but the footer and the samples' rows until a sample is asked for; holds no handle, so it may be pickled, forked
    and shared between threads.

    DataLossError for a file that is cut or no shard. The digests are not compared here: `statetap check` does.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self._tables = _chunk_tables(self.path)
        with self._hdf5() as file:
            # h5py's own layer below its comfortable one, which takes milliseconds a file: a job of a big model has a thousand.
            read = functools.partial(_low_level, file)
            version = int(read(h5py.h5a.open, b"version"))
            if version != 1:
                raise ValueError(f"{self.path} is version {version} of the format; this package reads version 1")
            self.row_offset: np.ndarray = read(h5py.h5d.open, b"/samples/row_offset")
            self.job = str(_attribute(read(h5py.h5a.open, b"job").item()))
            self.hidden, self.layers = (int(read(h5py.h5a.open, name)) for name in (b"hidden", b"layers"))
            self.boundaries = tuple(int(b) for b in read(h5py.h5a.open, b"boundaries"))
            self.dtype = str(_attribute(read(h5py.h5a.open, b"dtype").item()))
        self._columns: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.row_offset) - 1

    @contextlib.contextmanager
    def _hdf5(self) -> Iterator[Any]:
        """The file's low-level handle."""
        if h5py is None:
            raise missing_package("h5py", "shards", "reading shards")
        try:
            file = h5py.h5f.open(os.fsencode(self.path), h5py.h5f.ACC_RDONLY)
        except OSError:  # a network file system may refuse locks; a shard is not written any more
            unlocked = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
            unlocked.set_file_locking(False, True)
            try:
                file = h5py.h5f.open(os.fsencode(self.path), h5py.h5f.ACC_RDONLY, unlocked)
            except OSError as error:
                raise DataLossError(f"{self.path}: {error}") from None
        try:
            yield file
        finally:
            file.close()

    def attributes(self) -> dict[str, Any]:
        """All attributes of the file, by the names of docs/shard-format.md."""
        with self._hdf5() as file:
            return {name: _attribute(value) for name, value in h5py.File(file).attrs.items()}

    def column(self, name: str) -> Any:
        """A dataset of /samples: texts as a list, numbers as an array."""
        if name not in self._columns:
            self.load_columns([name])
        return self._columns[name]

    def load_columns(self, names: list[str]) -> None:
        """Several columns with one opening of the file."""
        with self._hdf5() as file:
            samples = h5py.File(file)["samples"]
            for name in names:
                data = samples[name]
                self._columns[name] = data.asstr()[:].tolist() if h5py.check_string_dtype(data.dtype) else data[:]

    def tokens(self, name: str, begin: int, end: int) -> np.ndarray:
        """Rows [begin, end) of a dataset of /tokens."""
        table = self._tables[f"/tokens/{name}"]
        to = np.empty(end - begin, table.dtype)
        table.read(self.path, begin, end, to)
        return to

    def states(self, boundary: int, begin: int, end: int, to: np.ndarray) -> None:
        """Rows [begin, end) of a boundary as bf16 bits into `to` (uint16 [end - begin, hidden], contiguous)."""
        table = self._tables[f"/states/{boundary}"]
        if self.dtype == "bfloat16":
            table.read(self.path, begin, end, to)
            return
        codes = np.empty(to.shape, np.uint8)
        table.read(self.path, begin, end, codes)
        scales: np.ndarray = np.empty(end - begin, np.float32)
        self._tables[f"/scales/{boundary}"].read(self.path, begin, end, scales)
        values = _FP8_VALUES[codes] * scales[:, None]  # a bf16 value, exactly
        to[:] = values.view(np.uint32) >> 16

    def sample(self, i: int, boundaries: tuple[int, ...]) -> Sample:
        begin, end = int(self.row_offset[i]), int(self.row_offset[i + 1])
        if "id" not in self._columns:
            self.load_columns(["id", "source", "split", "meta", "finish_reason", "prompt_tokens", "truncated", "source_index"])
        block: np.ndarray = np.empty((len(boundaries), end - begin, self.hidden), np.uint16)
        for boundary, to in zip(boundaries, block):
            self.states(boundary, begin, end, to)
        return Sample(
            job=self.job, id=self.column("id")[i], source=self.column("source")[i], split=self.column("split")[i],
            meta_json=self.column("meta")[i], finish_reason=self.column("finish_reason")[i], prompt_tokens=int(self.column("prompt_tokens")[i]),
            truncated=bool(self.column("truncated")[i]), index=int(self.column("source_index")[i]), layers=self.layers, boundaries=boundaries,
            input_ids=self.tokens("ids", begin, end).astype(np.int64), loss_mask=self.tokens("loss_mask", begin, end),
            logprobs=self.tokens("logprob", begin, end), entropies=self.tokens("entropy", begin, end), block=block,
        )  # fmt: skip


def _low_level(file: Any, open: Any, name: bytes) -> np.ndarray:
    """The whole of an attribute or dataset."""
    found = open(file, name)
    values: np.ndarray = np.empty(found.shape, found.dtype)
    if isinstance(found, h5py.h5a.AttrID):
        found.read(values)
    else:
        found.read(h5py.h5s.ALL, h5py.h5s.ALL, values)
    return values


def _attribute(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value
