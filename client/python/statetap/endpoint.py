"""As much of OpenAI's API as speculators' `file` backend asks: python -m statetap.endpoint JOB… --model NAME --states DIR.

A stock installation of speculators, without this package, then trains from a running statetapd:

    speculators train --on-missing generate --vllm-endpoint http://HOST:8000/v1 --verifier-name-or-path NAME …

For each row it posts the row's ids and gets the path of a file with their states, which it reads and removes: DIR must be the same folder on both machines, best in
memory (/dev/shm). Rows are found by their ids among the stored samples of the jobs; other ids are answered with 404. The jobs may still run: what is stored is looked up
again when ids are not known yet.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from statetap.client import Client, connect, has_ended, state_name
from statetap.errors import StatetapError
from statetap.export.speculators import Speculators

_MOST_BYTES = 64 << 20  # of a request: two million ids
_LOOK_AGAIN_SECONDS = 5.0


class Rows:
    """Stored samples by their ids. Thread safe."""

    def __init__(self, client: Client, jobs: Sequence[str]) -> None:
        shown = [client.show(job) for job in jobs]
        for job in shown:
            if job.options.no_final:
                raise ValueError(f"job {job.id} ({job.name}) was captured with --no-final, and the trainer needs the final state")
        self._client, self._jobs, self._lock = client, [job.id for job in shown], threading.Lock()
        self._known: dict[bytes, tuple[str, str]] = {}
        self._growing: list[str] = []  # what to say of jobs that had not ended at the last look
        self._seen: dict[str, int] = dict.fromkeys(self._jobs, 0)  # stored rows of each job that were looked at
        self._looked = -_LOOK_AGAIN_SECONDS
        self.look()

    def look(self) -> None:
        growing: list[str] = []
        for job in self._jobs:
            shown = self._client.show(job)
            stored = shown.counts.stored
            if not has_ended(shown):
                growing.append(f"job {shown.id} ({shown.name}) is {state_name(shown)}, {stored} of {shown.counts.submitted} samples are stored")
            for sample in self._client.fetch(job, rows=range(self._seen[job], stored), taps=[]) if stored > self._seen[job] else ():
                self._known[_key(sample.input_ids)] = (job, sample.id)
            self._seen[job] = stored
        self._growing = growing  # at once: why_missing() reads it from other threads
        self._looked = time.monotonic()

    def find(self, ids: np.ndarray) -> "tuple[str, str] | None":
        with self._lock:
            found = self._known.get(_key(ids))
            if found is None and time.monotonic() - self._looked >= _LOOK_AGAIN_SECONDS:
                self.look()
                found = self._known.get(_key(ids))
            return found

    def why_missing(self, ids: np.ndarray) -> str:
        remedy = f"{'; '.join(self._growing)}: ask again when it has more" if self._growing else "capture them (statetap submit --mode prefill), or name their job"
        return f"no stored sample has these {len(ids)} ids: {remedy}"

    def __len__(self) -> int:
        return len(self._known)


def _key(ids: np.ndarray) -> bytes:
    return hashlib.blake2b(ids.astype("<i8").tobytes(), digest_size=16).digest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "Endpoint"

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            return self._answer(404, _error(f"{self.path}: there are GET /v1/models and POST /v1/completions"))
        return self._answer(200, {"object": "list", "data": [{"id": self.server.model, "object": "model", "created": 0, "owned_by": "statetap"}]})

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        if size > _MOST_BYTES:
            self.close_connection = True
            return self._answer(413, _error(f"a request of {size} bytes; {_MOST_BYTES} are read"))
        body = self.rfile.read(size)
        if self.path != "/v1/completions":
            return self._answer(404, _error(f"{self.path}: there are GET /v1/models and POST /v1/completions"))
        try:
            request = json.loads(body)
            ids = np.array(request["prompt"], np.int64)
        except (ValueError, KeyError, TypeError, OverflowError):
            ids = np.array(0)
        if ids.ndim != 1 or not len(ids):
            return self._answer(400, _error("prompt must be a list of token ids"))
        try:
            return self._answer(*self.server.complete(ids))
        except (StatetapError, OSError) as error:  # the server does not answer; no room for the file
            return self._answer(503, _error(str(error)))

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        """Quiet: a line a row and epoch tells nobody anything."""


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error"}}


class Endpoint(ThreadingHTTPServer):
    """Port 0 picks one: server_address says which."""

    daemon_threads = True

    def __init__(self, address: "tuple[str, int]", client: Client, jobs: Sequence[str], model: str, states: Path) -> None:
        self.model, self._client, self._states = model, client, states
        states.mkdir(parents=True, exist_ok=True)
        self.rows = Rows(client, jobs)
        super().__init__(address, _Handler)

    def complete(self, ids: np.ndarray) -> "tuple[int, dict[str, Any]]":
        place = self.rows.find(ids)
        if place is None:
            return 404, _error(self.rows.why_missing(ids))
        # Complete before the answer goes out: the trainer does not wait for it.
        path = self._states / f"{uuid.uuid4().hex}.safetensors"
        Speculators().write(path, 0, self._client.sample(*place), None)
        choice = {"index": 0, "text": "", "finish_reason": "length", "logprobs": None, "prompt_token_ids": ids.tolist(), "token_ids": []}
        return 200, {"id": path.stem, "object": "text_completion", "created": int(time.time()), "model": self.model, "choices": [choice],
                     "usage": {"prompt_tokens": len(ids), "completion_tokens": 0, "total_tokens": len(ids)},
                     "kv_transfer_params": {"hidden_states_path": str(path.resolve())}}  # fmt: skip


def main(arguments: "list[str] | None" = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m statetap.endpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("jobs", nargs="+", metavar="JOB")
    parser.add_argument("--model", required=True, help="as the trainer's --verifier-name-or-path says it")
    parser.add_argument("--states", type=Path, required=True, metavar="DIR", help="folder for the files of states; the trainer removes them")
    parser.add_argument("--listen", default="127.0.0.1:8000", metavar="HOST:PORT", help="[127.0.0.1:8000]; port 0 picks one")
    parser.add_argument("--server", help="HOST:PORT of statetapd [STATETAP_SERVER, else 127.0.0.1:7070]")
    options = parser.parse_args(arguments)
    host, _, port = options.listen.rpartition(":")
    try:
        endpoint = Endpoint((host, int(port)), connect(options.server), options.jobs, options.model, options.states)
    except (ValueError, StatetapError, OSError) as error:
        print(f"endpoint: {error}", file=sys.stderr)
        return 1
    print(f"statetap endpoint ready http://{host}:{endpoint.server_address[1]}/v1 model={options.model} rows={len(endpoint.rows)}", flush=True)
    try:
        endpoint.serve_forever()
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
