"""StreamFeaturesResponse off the wire with one copy of the states.

Protobuf's own parser copies a message's `bytes` twice on their way to an array. States come in SampleData, whose fields are few, so that they are
read here, and everything else goes to protobuf.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Union

import numpy as np

from statetap.errors import DataLossError
from statetap.v1 import features_pb2

_DATA = features_pb2.StreamFeaturesResponse.DESCRIPTOR.fields_by_name["data"].number
_FIELD = {field.number: field.name for field in features_pb2.SampleData.DESCRIPTOR.fields}
_VARINT, _BYTES = 0, 2


@dataclass
class Data:
    """A SampleData whose states still lie in the message."""

    delivery: int = 0
    boundary: int = 0
    first_row: int = 0
    states: memoryview = memoryview(b"")


Response = Union[Data, features_pb2.StreamFeaturesResponse]


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def parse(message: bytes) -> Response:
    """The deserializer of calls that send samples."""
    if not message or message[0] != _DATA << 3 | _BYTES:
        return features_pb2.StreamFeaturesResponse.FromString(message)
    try:
        size, at = _varint(message, 1)
        if at + size != len(message):
            return features_pb2.StreamFeaturesResponse.FromString(message)
        data = Data()
        while at < len(message):
            key, at = _varint(message, at)
            name = _FIELD.get(key >> 3)
            if key & 7 == _VARINT:
                value, at = _varint(message, at)
                if name is not None:
                    setattr(data, name, value)
            elif key & 7 == _BYTES:
                size, at = _varint(message, at)
                if at + size > len(message):
                    raise IndexError
                if name is not None:
                    setattr(data, name, memoryview(message)[at : at + size])
                at += size
            else:  # a field of a later version
                return features_pb2.StreamFeaturesResponse.FromString(message)
    except IndexError:
        raise DataLossError("a message of the stream ends within a field") from None
    return data


def bits(states: memoryview) -> np.ndarray:
    """bf16 values as uint16, without a copy."""
    return np.frombuffer(states, dtype="<u2")
