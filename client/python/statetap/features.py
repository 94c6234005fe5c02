"""Features of a server for training over epochs. Needs torch."""
from __future__ import annotations

import itertools
import os
from typing import Any, Callable, Iterable, Iterator, Sequence

import numpy as np

from statetap.client import Client, connect, state_name
from statetap.errors import missing_package
from statetap.sample import Sample
from statetap.v1 import jobs_pb2

try:
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info
except ImportError:
    raise missing_package("torch", "torch", "statetap.FeatureStream") from None

_ENDED = ("succeeded", "cancelled")
_SAMPLES_A_CALL = 256


class FeatureStream(IterableDataset[Sample]):
    """The samples of jobs that have ended, in a seeded order that is new each epoch, dealt to ranks and DataLoader workers by themselves.

        stream = FeatureStream([job], batch_size=8, seed=1)
        for epoch in range(3):
            for batch in stream.batches(collate_fn=Pad(), num_workers=2):
                train(batch)
                save(state := stream.state_dict())  # goes back with load_state_dict(): what counts is the trainer's checkpoint
                stream.saved(state)                 # with retain="checkpoint": once the file is safe
        DataLoader(stream, batch_size=8)           # works too; call set_epoch(e) before each epoch then. With workers of its own
                                                   # nobody here knows what the trainer has had, and state_dict() says so

    jobs            ids, names or Job messages; their samples are one set
    server          HOST:PORT. Default: the environment's STATETAP_SERVER, else 127.0.0.1:7070
    taps            boundaries to fetch beside the final one. Default: all
    where           an expression over the samples (docs/operate.md)
    batch_size      the DataLoader's: workers are dealt whole batches, so that the order is the same with any number of them
    shuffle, seed   the order of epoch e depends on seed and e alone
    rank, world     Default: torch.distributed's, else the environment's RANK and WORLD_SIZE, else 0 of 1
    wait            wait until the jobs have ended. Default: ValueError for one that runs, as its ranks would count differently
    retain          what a server with `--retain until-acked` has to keep for this training. "all" (default): nothing is acknowledged, so
                    everything. "checkpoint": all but what a saved checkpoint is past in the last epoch; needs `epochs` and calls of saved()
    group           under which acknowledgements are noted, as in Client.stream
    epochs          how many there are; more are refused. Default: any number

    Every rank gets the same number of whole batches; the samples at the end of the order that do not fill them are left out of this epoch
    (`left_out`), others in the next. len() is the number of samples of this rank in an epoch.

    Each process has a connection of its own. The epoch is in shared memory, so that workers that persist begin the new one, too.
    """

    def __init__(
        self,
        jobs: "str | jobs_pb2.Job | Sequence[str | jobs_pb2.Job]",
        *,
        server: str | None = None,
        taps: "Sequence[int] | None" = None,
        where: str = "",
        batch_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world: int | None = None,
        wait: bool = False,
        retain: str = "all",
        group: str = "default",
        epochs: int | None = None,
        as_torch: bool = True,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size}: give 1 or more")
        if retain not in ("all", "checkpoint"):
            raise ValueError(f"retain {retain!r}: give all or checkpoint")
        if retain == "checkpoint" and epochs is None:
            raise ValueError('retain "checkpoint": give epochs, too; states may go only in the last one')
        self.retain, self.group, self.epochs = retain, group, epochs
        self.batch_size, self.shuffle, self.seed, self.as_torch = batch_size, shuffle, seed, as_torch
        self.rank, self.world = _placed(rank, world)
        self.where = where
        with connect(server) as client:
            self.server = client.server
            jobs = [jobs] if isinstance(jobs, (str, jobs_pb2.Job)) else jobs
            states = [_ended(client, job, wait) for job in jobs]
            self.jobs = [state.id for state in states]
            self.taps = _with_final(states, taps)
            self._samples = [(n, s.id) for n, job in enumerate(self.jobs) for s in client.samples(job, where) if not s.excluded]
        self.left_out = len(self._samples) - len(self) * self.world
        if not len(self):
            raise ValueError(
                f"{len(self._samples)} samples of {', '.join(self.jobs)}" + (f" that {where!r} holds for" if where else "")
                + f", and {self.world} ranks with batches of {batch_size} take {self.world * batch_size} at a time: give fewer ranks, smaller batches or more samples")  # fmt: skip
        self._progress = torch.zeros(3, dtype=torch.int64)  # epoch, position, whether workers read that are not of batches()
        self._progress.share_memory_()  # type: ignore[no-untyped-call]
        self._batches: "tuple[int, int] | None" = None  # epoch and position at which batches() began: its workers start late, when the trainer is ahead
        self._acknowledged = 0  # samples of this rank's last epoch

    def __len__(self) -> int:
        return len(self._samples) // (self.world * self.batch_size) * self.batch_size

    @property
    def epoch(self) -> int:
        return int(self._progress[0])

    @property
    def position(self) -> int:
        """Samples of this rank that the trainer has had in this epoch, to the last whole batch."""
        return int(self._progress[1])

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is the beginning of this epoch. Not needed with batches()."""
        self._place(epoch, 0)

    def _place(self, epoch: int, position: int) -> None:
        self._progress[:] = torch.tensor([epoch, position, 0])

    def order(self, epoch: int) -> "list[tuple[str, str]]":
        """This rank's samples of an epoch as (job, id)."""
        dealt = self._places(epoch)[: len(self) * self.world]
        return self._named(dealt.reshape(-1, self.world, self.batch_size)[:, self.rank].reshape(-1))

    def _places(self, epoch: int) -> np.ndarray:
        """All samples in the order of an epoch, those that are left out last."""
        if not self.shuffle:
            return np.arange(len(self._samples))
        return np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(len(self._samples))

    def _named(self, places: np.ndarray) -> "list[tuple[str, str]]":
        return [(self.jobs[n], id) for n, id in (self._samples[p] for p in places)]

    def __iter__(self) -> Iterator[Sample]:
        """From `position` on, from the beginning where the epoch was had whole: all of this rank's samples or, in a DataLoader's worker, this worker's
        share of whole batches."""
        epoch, begin = self._batches or (self.epoch, self.position % len(self))
        if self.epochs is not None and epoch >= self.epochs:
            raise ValueError(f"epoch {epoch} (from 0) of {self.epochs}: give more epochs")
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        if worker is not None and self._batches is None:
            self._progress[2] = 1
        order = self.order(epoch)
        batches = range(begin // self.batch_size + first, len(order) // self.batch_size, step)
        mine = (sample for batch in batches for sample in order[batch * self.batch_size : (batch + 1) * self.batch_size])
        for had, sample in enumerate(self._fetch(mine), 1):
            if worker is None and self._batches is None and had % self.batch_size == 0:
                self._progress[1] = begin + had
            yield sample

    def _fetch(self, mine: "Iterable[tuple[str, str]]") -> Iterator[Sample]:
        with Client(self.server) as client:
            for job, samples in itertools.groupby(mine, key=lambda sample: sample[0]):
                while ids := [id for _, id in itertools.islice(samples, _SAMPLES_A_CALL)]:
                    yield from client.fetch(job, ids=ids, taps=self.taps, as_torch=self.as_torch)

    def batches(self, *, collate_fn: "Callable[[list[Sample]], Any]" = list, num_workers: int = 0, **options: Any) -> Iterator[Any]:
        """The rest of this epoch in batches, by a DataLoader; counts what the trainer has had, and goes to the next epoch at the end.
        `options` are the DataLoader's."""
        loader = DataLoader(self, batch_size=self.batch_size, collate_fn=collate_fn, num_workers=num_workers, **options)
        self._place(self.epoch, self.position)
        self._batches = (self.epoch, self.position)
        try:
            iterator = iter(loader)
            while self.position < len(self):
                batch = next(iterator)
                self._progress[1] += self.batch_size
                yield batch
        finally:
            self._batches = None
        self.set_epoch(self.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Where training is: goes into the trainer's checkpoint. ValueError where a DataLoader with workers other than that of batches() reads."""
        if get_worker_info() is not None or self._progress[2]:
            raise ValueError("a DataLoader with workers of its own reads this stream, and only batches() knows what the trainer has had: "
                             "take batches(num_workers=…), or a DataLoader with num_workers=0")  # fmt: skip
        epochs, position = divmod(self.position, len(self))  # an epoch that was had whole: the beginning of the next
        return {"epoch": self.epoch + epochs, "position": position, **self._configuration()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the checkpoint was written. ValueError names what differs in what decides about the order."""
        self._check(state)
        if state["position"] % self.batch_size:
            raise ValueError(f"position is {state['position']} in the checkpoint, within a batch of {self.batch_size}: only whole batches are gone back to")
        self._place(state["epoch"], state["position"])

    def saved(self, state: dict[str, Any]) -> None:
        """The checkpoint with this state_dict() is safe, and training will go back to none before it. With retain "checkpoint" the samples that it is
        past in the last epoch are acknowledged, and with the end of that epoch those that were left out; each rank says it for its own.
        Killed before this call, a trainer has lost nothing: states are kept for the checkpoint before."""
        self._check(state)
        if self.retain == "all" or self.epochs is None or state["epoch"] < self.epochs - 1:
            return
        ended = state["epoch"] >= self.epochs
        done = self.order(self.epochs - 1)[self._acknowledged : len(self) if ended else state["position"]]
        left_out = self._named(self._places(self.epochs - 1)[len(self) * self.world :]) if ended and self.rank == 0 else []
        with Client(self.server) as client:
            for job in self.jobs:
                client.acknowledge(job, [id for of, id in done + left_out if of == job], group=self.group)
        self._acknowledged += len(done)

    def _check(self, state: dict[str, Any]) -> None:
        for name, value in self._configuration().items():
            if state.get(name) != value:
                raise ValueError(f"{name} is {value!r} here and {state.get(name)!r} in the checkpoint: the order would be another one")

    def _configuration(self) -> dict[str, Any]:
        return {"jobs": list(self.jobs), "where": self.where, "samples": len(self._samples), "batch_size": self.batch_size, "shuffle": self.shuffle,
                "seed": self.seed, "world": self.world}  # fmt: skip


def _placed(rank: int | None, world: int | None) -> tuple[int, int]:
    if (rank is None) != (world is None):
        raise ValueError("give rank and world together, or neither")
    if rank is None or world is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        else:
            rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} of {world}: give 0 to {world - 1}")
    return rank, world


def _ended(client: Client, job: "str | jobs_pb2.Job", wait: bool) -> jobs_pb2.Job:
    state = client.wait(job) if wait else client.show(job)
    if state_name(state) not in _ENDED:
        raise ValueError(f"job {state.id} ({state.name}) is {state_name(state)}: give wait=True, or take its samples as they come with Client.stream")
    return state


def _with_final(jobs: "list[jobs_pb2.Job]", taps: "Sequence[int] | None") -> "list[int] | None":
    """Boundaries to ask for: the taps and, where it is stored, the final one. None: all."""
    stored = [list(job.boundaries) for job in jobs]
    if taps is None:
        if any(boundaries != stored[0] for boundaries in stored):
            raise ValueError(f"the jobs hold boundaries {stored}: give taps that all of them have, or jobs with the same")
        return None
    wanted = sorted({*taps, *(job.boundaries[-1] for job in jobs if not job.options.no_final)})
    for job in jobs:
        missing = [b for b in wanted if b not in job.boundaries]
        if missing:
            raise ValueError(f"taps {missing}: job {job.id} holds boundaries {list(job.boundaries)}; boundary k is the output of layer k - 1")
    return wanted
