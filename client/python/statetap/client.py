"""A server's calls, with deadlines and errors that say what would help."""
from __future__ import annotations

import os
import time
from typing import Any, Callable, Iterable, Iterator, Sequence

import grpc

from statetap.errors import StatetapError
from statetap.inputs import Prompt, samples_of
from statetap.patience import Patience
from statetap.sample import Sample
from statetap.stream import Assembler, SampleStream
from statetap.v1 import features_pb2, jobs_pb2, jobs_pb2_grpc, model_pb2, model_pb2_grpc
from statetap.wire import parse

_ENDED = {jobs_pb2.JOB_STATE_SUCCEEDED, jobs_pb2.JOB_STATE_FAILED, jobs_pb2.JOB_STATE_CANCELLED}
_MAX_BATCH_BYTES, _MAX_BATCH_SAMPLES = (4 << 20) - 4096, 10_000
_DEADLINE_SECONDS = 30.0
_KEEPALIVE_MS, _KEEPALIVE_TIMEOUT_MS = 30_000, 20_000
_DELETING_SECONDS = 600.0  # of a call that may rewrite many shards


def connect(server: str | None = None) -> "Client":
    """A client of `server`, HOST:PORT. Default: the environment's STATETAP_SERVER, else 127.0.0.1:7070. Connects with the first call."""
    return Client(server or os.environ.get("STATETAP_SERVER") or "127.0.0.1:7070")


def state_name(job: jobs_pb2.Job) -> str:
    """queued, running, waiting, paused, succeeded, failed or cancelled."""
    return jobs_pb2.JobState.Name(job.state).removeprefix("JOB_STATE_").lower()


def has_ended(job: jobs_pb2.Job) -> bool:
    """Succeeded, failed or cancelled: nothing more will be stored, unless it is retried."""
    return job.state in _ENDED


class Client:
    """One server. Jobs may be named by id or name, or given as the Job that a call returned. Errors are StatetapError.

    Threads may share a client. A fork may not: gRPC's connections do not outlive one. FeatureStream opens a client of its own in each process.
    """

    def __init__(self, server: str) -> None:
        host, _, port = server.rpartition(":")
        if "://" in server or not (server.startswith("unix:") or (host and port.isdigit())):
            raise ValueError(f'server "{server}": give HOST:PORT, as in 127.0.0.1:7070')
        self.server = server
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0),
                   # A server whose machine vanished is noticed, by one who only listens too: two pings would be all that it sends.
                   ("grpc.keepalive_time_ms", _KEEPALIVE_MS), ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
                   ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS), ("grpc.http2.max_pings_without_data", 0),
                   ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 2000)]  # fmt: skip
        self._channel = grpc.insecure_channel(server, options)
        self._jobs = jobs_pb2_grpc.JobsStub(self._channel)  # type: ignore[no-untyped-call]
        self._model = model_pb2_grpc.ModelStub(self._channel)  # type: ignore[no-untyped-call]
        service = "/statetap.v1.Features/"
        self._stream_features = self._channel.stream_stream(
            service + "StreamFeatures", features_pb2.StreamFeaturesRequest.SerializeToString, parse)
        self._get_samples = self._channel.unary_stream(service + "GetSamples", features_pb2.GetSamplesRequest.SerializeToString, parse)
        self._describe = self._channel.unary_unary(
            service + "DescribeStream", features_pb2.StreamStart.SerializeToString, features_pb2.StreamDescription.FromString)
        self._acknowledge = self._channel.unary_unary(
            service + "Acknowledge", features_pb2.AcknowledgeRequest.SerializeToString, features_pb2.AcknowledgeResponse.FromString)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Jobs ---------------------------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompts: "str | os.PathLike[str] | Iterable[Prompt]",
        *,
        mode: str = "",
        taps: Sequence[int] = (),
        name: str = "",
        source: str = "",
        **options: Any,
    ) -> jobs_pb2.Job:
        """Creates a job of the prompts (inputs.samples_of says which shapes there are) and returns it; does not wait.

        mode: "generate" or "prefill"; taps: boundaries, default 2, layers/2, layers-3. `options` are the other fields of JobOptions
        (proto/statetap/v1/jobs.proto): temperature, max_new_tokens, max_length, seed, thinking, eval_fraction, …
        """
        if mode not in ("", "generate", "prefill"):
            raise ValueError(f'mode "{mode}": give "generate" or "prefill"')
        known = jobs_pb2.JobOptions.DESCRIPTOR.fields_by_name
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(f"no such option: {', '.join(unknown)}; there are {', '.join(known)}")
        mode_name = f"JOB_MODE_{mode.upper() or 'UNSPECIFIED'}"
        job_options = jobs_pb2.JobOptions(name=name, mode=mode_name, taps=taps, **options)
        # All before the first is sent: a prompt that is refused leaves nothing on the server.
        samples = list(samples_of(prompts, source))

        def requests() -> Iterator[jobs_pb2.CreateJobRequest]:
            yield jobs_pb2.CreateJobRequest(options=job_options)
            batch, size = jobs_pb2.CreateJobRequest(), 0
            for sample in samples:
                bytes_more = sample.ByteSize() + 16
                if batch.samples and (size + bytes_more > _MAX_BATCH_BYTES or len(batch.samples) >= _MAX_BATCH_SAMPLES):
                    yield batch
                    batch, size = jobs_pb2.CreateJobRequest(), 0
                batch.samples.append(sample)
                size += bytes_more
            yield batch

        created: jobs_pb2.Job = self._ask(lambda _: self._jobs.CreateJob(requests()), attempts=1)
        return created

    def show(self, job: "str | jobs_pb2.Job") -> jobs_pb2.Job:
        request = jobs_pb2.GetJobRequest(job=_name(job))
        shown: jobs_pb2.Job = self._ask(lambda deadline: self._jobs.GetJob(request, timeout=deadline))
        return shown

    def list(self) -> Sequence[jobs_pb2.Job]:
        """All jobs, newest first."""
        return list(self._ask(lambda deadline: self._jobs.ListJobs(jobs_pb2.ListJobsRequest(), timeout=deadline)).jobs)

    def watch(self, job: "str | jobs_pb2.Job") -> "Iterator[jobs_pb2.Job]":
        """The job now and after every change, until it has ended; through restarts of the server."""
        patience = Patience()
        while True:
            try:
                # Renewed now and then, so that a server that vanished without a word is noticed.
                for state in self._jobs.WatchJob(jobs_pb2.GetJobRequest(job=_name(job)), timeout=120):
                    patience.worked()
                    yield state
                    if has_ended(state):
                        return
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                    patience.worked()
                elif not patience.tries_again(error):
                    raise self._explain(error) from None

    def wait(self, job: "str | jobs_pb2.Job") -> jobs_pb2.Job:
        """The job once it has ended. StatetapError with its message where it failed."""
        *_, last = self.watch(job)
        if last.state == jobs_pb2.JOB_STATE_FAILED:
            raise StatetapError(f"job {last.id} ({last.name}) failed: {last.message}", grpc.StatusCode.FAILED_PRECONDITION)
        return last

    def samples(self, job: "str | jobs_pb2.Job", where: str = "") -> "Iterator[jobs_pb2.Sample]":
        """Stored samples in the order they were submitted, without their states."""
        yield from self._pages(self._jobs.ListSamples, jobs_pb2.ListSamplesRequest(job=_name(job), page_size=10_000, where=where), "samples")

    def rejected(self, job: "str | jobs_pb2.Job") -> "Iterator[jobs_pb2.Rejected]":
        yield from self._pages(self._jobs.ListRejected, jobs_pb2.ListSamplesRequest(job=_name(job), page_size=10_000), "rejected")

    def model(self) -> model_pb2.ModelDescription:
        """What the server serves."""
        served: model_pb2.ModelDescription = self._ask(lambda deadline: self._model.DescribeModel(model_pb2.DescribeModelRequest(), timeout=deadline))
        return served

    # States -------------------------------------------------------------------------------------------------------------------

    def sample(self, job: "str | jobs_pb2.Job", id: str, *, taps: "Sequence[int] | None" = None, as_torch: bool = False) -> Sample:
        """One stored sample by id. `taps`: boundaries (default: all; []: none, tokens alone)."""
        (sample,) = self.fetch(job, ids=[id], taps=taps, as_torch=as_torch)
        return sample

    def header(self, job: "str | jobs_pb2.Job") -> features_pb2.StreamHeader:
        """What holds for all samples of a job: hidden, layers, boundaries, eps, model, the shards' attributes. OUT_OF_RANGE without a sample."""
        request = features_pb2.GetSamplesRequest(job=_name(job), rows=[0], boundaries=[-1])
        first: features_pb2.StreamFeaturesResponse = self._ask(lambda deadline: next(iter(self._get_samples(request, timeout=deadline))))
        return first.header

    def fetch(
        self,
        job: "str | jobs_pb2.Job",
        *,
        ids: Iterable[str] = (),
        rows: Iterable[int] = (),
        taps: "Sequence[int] | None" = None,
        as_torch: bool = False,
    ) -> Iterator[Sample]:
        """Stored samples at random, in the order asked for: by ids, or by rows in stored order, which stay the same while the job grows. Breaks of
        the connection are mended. Nothing is acknowledged."""
        by = "ids" if ids else "rows"
        left: list[Any] = list(ids) or list(rows)
        patience = Patience()
        while left:
            asked = left[:_MAX_BATCH_SAMPLES]
            request = features_pb2.GetSamplesRequest(job=_name(job), boundaries=_boundaries(taps), **{by: asked})
            assembler = Assembler()
            try:
                for message in self._get_samples(request):
                    complete = assembler.add(message)
                    if complete is not None:
                        del left[0]
                        patience.worked()
                        yield complete[1].torch() if as_torch else complete[1]
            except grpc.RpcError as error:
                if not patience.tries_again(error):
                    raise self._explain(error) from None

    def acknowledge(self, job: "str | jobs_pb2.Job", ids: Iterable[str], *, group: str = "default") -> None:
        """The group is done with these samples, as the acknowledgements of its streams say it: they are not sent to it again, and a server with
        `--retain until-acked` may delete their states. For samples that were fetched; NOT_FOUND names one that is not there."""
        left = list(ids)
        while left:
            request = features_pb2.AcknowledgeRequest(job=_name(job), group=group, ids=left[:_MAX_BATCH_SAMPLES])
            self._ask(lambda _: self._acknowledge(request, timeout=_DELETING_SECONDS))
            left = left[_MAX_BATCH_SAMPLES:]

    def stream(
        self,
        jobs: "str | jobs_pb2.Job | Sequence[str | jobs_pb2.Job]",
        *,
        group: str = "default",
        rank: int = 0,
        world: int = 0,
        equal_counts: bool = False,
        taps: "Sequence[int] | None" = None,
        where: str = "",
        shuffle: bool = False,
        seed: int = 0,
        follow: bool = True,
        credit_bytes: int = 0,
        ack: bool = True,
        as_torch: bool = False,
    ) -> SampleStream:
        """Samples of the jobs, each delivered to the group until it was acknowledged.

        Works with a job that still runs: with `follow` the stream waits for more and ends when the jobs have. Streams of one group that run at
        once share the samples; with `world` above 1 each has its own part, by place in the order, and with `equal_counts` as many as the others.
        `shuffle`: one order of all samples of all jobs that `seed` fixes; like `equal_counts` it waits for the jobs to end. `taps`: boundaries to
        send (default: all that are stored; []: none). A new epoch is a new group. StreamStart in proto/statetap/v1/features.proto has the rest.
        """
        start = self._start(jobs, group, rank, world, equal_counts, taps, where, shuffle, seed)
        start.follow, start.credit_bytes = follow, credit_bytes
        return SampleStream(self._stream_features, start, ack=ack, as_torch=as_torch, explain=self._explain)

    def describe(
        self, jobs: "str | jobs_pb2.Job | Sequence[str | jobs_pb2.Job]", *, group: str = "default", rank: int = 0, world: int = 0,
        equal_counts: bool = False, where: str = "",
    ) -> features_pb2.StreamDescription:  # fmt: skip
        """What such a stream holds now, and how much of it the group has acknowledged."""
        start = self._start(jobs, group, rank, world, equal_counts, None, where, False, 0)
        description: features_pb2.StreamDescription = self._ask(lambda deadline: self._describe(start, timeout=deadline))
        return description

    def _start(
        self, jobs: "str | jobs_pb2.Job | Sequence[str | jobs_pb2.Job]", group: str, rank: int, world: int, equal_counts: bool,
        taps: "Sequence[int] | None", where: str, shuffle: bool, seed: int,
    ) -> features_pb2.StreamStart:  # fmt: skip
        order = features_pb2.STREAM_ORDER_SHUFFLED if shuffle else features_pb2.STREAM_ORDER_STORED
        names = [_name(job) for job in ([jobs] if isinstance(jobs, (str, jobs_pb2.Job)) else jobs)]
        return features_pb2.StreamStart(jobs=names, group=group, boundaries=_boundaries(taps), where=where, order=order, seed=seed, rank=rank,
                                        world=world, equal_counts=equal_counts)  # fmt: skip

    # ---------------------------------------------------------------------------------------------------------------------------

    def _pages(self, call: Any, request: jobs_pb2.ListSamplesRequest, field: str) -> Iterator[Any]:
        while True:
            page = self._ask(lambda deadline: call(request, timeout=deadline))
            yield from getattr(page, field)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def _ask(self, call: Callable[[float], Any], attempts: int = 4) -> Any:
        """A call that changes nothing is tried again while the server cannot be reached."""
        pause = 0.2
        while True:
            attempts -= 1
            try:
                return call(_DEADLINE_SECONDS)
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE or attempts == 0:
                    raise self._explain(error) from None
            time.sleep(pause)
            pause = min(5.0, 2 * pause)

    def _explain(self, error: grpc.RpcError) -> StatetapError:
        code, details = error.code(), error.details() or ""
        if code == grpc.StatusCode.UNAVAILABLE:
            details = f"cannot reach a server at {self.server} ({details}); start one with `statetapd --model DIR --data DIR`"
        elif code == grpc.StatusCode.DEADLINE_EXCEEDED:
            details = f"no answer from {self.server} in time; is it overloaded, or is something else on that port?"
        elif code == grpc.StatusCode.UNIMPLEMENTED:
            details = f"the server at {self.server} does not know this call ({details}); is it an older statetapd?"
        return StatetapError(details, code)


def _name(job: "str | jobs_pb2.Job") -> str:
    return job.id if isinstance(job, jobs_pb2.Job) else job


def _boundaries(taps: "Sequence[int] | None") -> "list[int]":
    """As the protocol says it: empty is all, a single -1 none."""
    return [] if taps is None else list(taps) or [-1]
