"""Samples over gRPC: put together from messages, through breaks of the connection."""
from __future__ import annotations

import queue
from typing import Any, Callable, Iterator

import grpc
import numpy as np

from statetap.errors import DataLossError, StatetapError
from statetap.patience import Patience
from statetap.sample import Sample
from statetap.v1 import features_pb2
from statetap.wire import Data, Response, bits


class Assembler:
    """Puts the messages of one sample after another together, each state copied once, into the sample's own memory."""

    def __init__(self) -> None:
        self.header = features_pb2.StreamHeader()  # of the job whose sample came last
        self._headers: dict[int, features_pb2.StreamHeader] = {}
        self._sample: Sample | None = None
        self._filled: list[int] = []

    def add(self, message: Response) -> "tuple[int, Sample] | None":
        """(delivery, sample) where this message completes one. DataLossError for messages that do not fit together."""
        if isinstance(message, Data):
            self._copy(message)
        elif message.HasField("header"):
            self._headers[message.header.job_index] = message.header
        elif message.HasField("sample"):
            self._begin(message.sample)
        if self._sample is None or any(rows != len(self._sample) for rows in self._filled):
            return None
        done, self._sample = self._sample, None
        return self._delivery, done

    def _begin(self, sample: features_pb2.SampleHeader) -> None:
        if self._sample is not None:
            raise DataLossError(f"sample {self._sample.id!r} was not finished before the next one")
        if sample.job_index not in self._headers:
            raise DataLossError(f"sample {sample.id!r} came before the header of its job")
        self.header = self._headers[sample.job_index]
        tokens, boundaries = len(sample.input_ids), tuple(self.header.boundaries)
        if len(sample.loss_mask) != tokens:
            raise DataLossError(f"sample {sample.id!r} has {tokens} ids and {len(sample.loss_mask)} mask values")
        self._delivery, self._filled = sample.delivery, [0] * len(boundaries)
        self._sample = Sample(
            job=self.header.job, id=sample.id, source=sample.source, split=sample.split, meta_json=sample.meta_json,
            finish_reason=sample.finish_reason, prompt_tokens=sample.prompt_tokens, truncated=sample.truncated, index=sample.source_index,
            layers=self.header.layers, boundaries=boundaries, input_ids=np.array(sample.input_ids, np.int64),
            loss_mask=np.frombuffer(sample.loss_mask, np.uint8).copy(), logprobs=_floats(sample.logprobs, tokens),
            entropies=_floats(sample.entropies, tokens), block=np.empty((len(boundaries), tokens, self.header.hidden), np.uint16),
        )  # fmt: skip

    def _copy(self, data: Data) -> None:
        sample = self._sample
        if sample is None or data.delivery != self._delivery or data.boundary not in sample.boundaries:
            raise DataLossError(f"states of delivery {data.delivery}, boundary {data.boundary} came without their sample")
        i = sample.boundaries.index(data.boundary)
        rows, rest = divmod(len(data.states), 2 * self.header.hidden)
        # Pieces of a boundary come in order, so that none can be missing or twice.
        if rest or data.first_row != self._filled[i] or data.first_row + rows > len(sample):
            raise DataLossError(f"sample {sample.id!r} has {len(data.states)} bytes at row {data.first_row} of boundary {data.boundary}")
        sample.block[i, data.first_row : data.first_row + rows] = bits(data.states).reshape(rows, self.header.hidden)
        self._filled[i] += rows


def _floats(values: Any, tokens: int) -> np.ndarray:
    return np.array(values, np.float32) if len(values) else np.full(tokens, np.nan, np.float32)


class SampleStream(Iterator[Sample]):
    """Samples of a group, each once, whatever breaks. One thread.

    A sample is acknowledged when the next one is asked for: acknowledged samples are not sent to the group again. With `ack=False` nothing is
    acknowledged until `ack()` is called, which covers everything handed out so far.
    """

    def __init__(
        self,
        open_call: Callable[[Iterator[features_pb2.StreamFeaturesRequest]], Any],
        start: features_pb2.StreamStart,
        *,
        ack: bool,
        as_torch: bool,
        explain: Callable[[grpc.RpcError], StatetapError],
    ) -> None:
        self._open_call, self._start, self._auto_ack, self._as_torch = open_call, start, ack, as_torch
        self._explain = explain
        self._call: Any = None
        self._delivery = 0  # of the sample handed out last
        self._seen: set[tuple[str, str]] = set()  # job and id: after a break the server sends again what it had no acknowledgement for
        self._connect()

    @property
    def header(self) -> features_pb2.StreamHeader:
        """Of the job whose sample came last: hidden, layers, boundaries, eps, model."""
        return self._assembler.header

    def __next__(self) -> Sample:
        if self._auto_ack and self._delivery:
            self.ack()
        while True:
            message = self._read()
            if not isinstance(message, Data) and message.HasField("end"):
                self.close()
                raise StopIteration
            complete = self._assembler.add(message)
            if complete is None:
                continue
            self._delivery, sample = complete
            self._requests.put(features_pb2.StreamFeaturesRequest(credit_bytes=sample.block.nbytes))
            if (sample.job, sample.id) not in self._seen:
                self._seen.add((sample.job, sample.id))
                return sample.torch() if self._as_torch else sample

    def ack(self) -> None:
        """Everything handed out so far is done with."""
        if self._delivery and self._call is not None:
            self._requests.put(features_pb2.StreamFeaturesRequest(ack=features_pb2.StreamAck(delivery=self._delivery)))

    def close(self) -> None:
        """Ends the stream; acknowledgements that were given have arrived when this returns."""
        call, self._call = self._call, None
        if call is None:
            return
        self._requests.put(None)
        try:
            for _ in call:
                pass
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.CANCELLED:
                raise self._explain(error) from None

    def __enter__(self) -> "SampleStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect(self) -> None:
        self._requests: queue.SimpleQueue[features_pb2.StreamFeaturesRequest | None] = queue.SimpleQueue()
        self._requests.put(features_pb2.StreamFeaturesRequest(start=self._start))
        self._assembler, self._delivery = Assembler(), 0
        self._call = self._open_call(iter(self._requests.get, None))

    def _read(self) -> Response:
        if self._call is None:
            raise StopIteration
        patience = Patience()
        while True:
            try:
                response: Response = next(self._call)
                return response
            except StopIteration:
                raise DataLossError("the stream ended without its end message") from None
            except grpc.RpcError as error:
                if not patience.tries_again(error):
                    self._call = None
                    raise self._explain(error) from None
            self._connect()
