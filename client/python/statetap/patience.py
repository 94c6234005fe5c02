"""How long a server that cannot be reached is tried again."""
from __future__ import annotations

import time

import grpc

_SECONDS = 120.0


class Patience:
    """Counts from the first failure since something worked, so that it does not matter for how long nobody asked or nothing came before."""

    def __init__(self) -> None:
        self.worked()

    def worked(self) -> None:
        self._failing_since: float | None = None
        self._pause = 0.2

    def tries_again(self, error: grpc.RpcError) -> bool:
        """Waits a while, longer each time. False for an error that no waiting mends, and when it has been long enough."""
        if error.code() != grpc.StatusCode.UNAVAILABLE:
            return False
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        if now - self._failing_since > _SECONDS:
            return False
        time.sleep(self._pause)
        self._pause = min(5.0, 2 * self._pause)
        return True
