"""What goes wrong, by whom it can be mended."""
from __future__ import annotations

import grpc


class StatetapError(Exception):
    """A server refused or could not be reached. `code` is the gRPC status code; the text says what would help."""

    def __init__(self, message: str, code: grpc.StatusCode = grpc.StatusCode.UNKNOWN) -> None:
        super().__init__(message)
        self.code = code


class DataLossError(StatetapError):
    """Data arrived or lies on disk damaged or incomplete; the text names the sample or the file."""

    def __init__(self, message: str) -> None:
        super().__init__(message, grpc.StatusCode.DATA_LOSS)


def missing_package(package: str, extra: str, purpose: str) -> ImportError:
    return ImportError(f"{purpose} needs {package}: pip install 'statetap[{extra}]'", name=package)
