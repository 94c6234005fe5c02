"""FeatureStream and the collators: needs torch. Run by ctest as package_test.py is."""
import json
import os
import pickle
import signal
import subprocess
import sys
import unittest
import unittest.mock

try:
    import torch
except ImportError:
    print(f"{sys.executable} has no torch (scripts/setup.sh --trainers makes .venv-trainers with it): not tested")
    sys.exit(77)
import numpy as np
import statetap
from served import HIDDEN, LAYERS, ROOT, Served, Stalled, by_h5py
from statetap.collate import Pack, Pad, Shift
from torch.utils.data import DataLoader

PROMPTS = [json.loads(line) for line in (ROOT / "examples/prompts_64.jsonl").read_text().splitlines()]


def setUpModule():
    global served, jobs, stored
    served = Served()
    served.__enter__()
    jobs = [served.run(PROMPTS[begin : begin + 20], name=f"part {begin}", temperature=0, max_new_tokens=8, eval_fraction=0.3) for begin in (0, 20)]
    stored = {**by_h5py(jobs[0].shards_path), **by_h5py(jobs[1].shards_path)}


def tearDownModule():
    served.__exit__()


def stream(**options):
    return statetap.FeatureStream(jobs, server=served.address, **{"batch_size": 4, "seed": 3, **options})


def ids(batches):
    return [[sample.id for sample in batch] for batch in batches]


class FeatureStreamTest(unittest.TestCase):
    def test_every_sample_once_in_an_order_of_its_own_each_epoch(self):
        features = stream()
        self.assertEqual(len(features), 40)
        epochs = [ids(features.batches()) for _ in range(2)]
        self.assertEqual([sorted(sum(epoch, [])) for epoch in epochs], [sorted(stored)] * 2)
        self.assertNotEqual(*epochs)
        self.assertEqual(ids(stream().batches()), epochs[0])
        self.assertNotEqual(ids(stream(seed=4).batches()), epochs[0])
        for sample in stream():
            self.assertEqual(sample.block.dtype, torch.bfloat16)
            torch.testing.assert_close(sample.final_prenorm.float(), torch.from_numpy(stored[sample.id][LAYERS]), rtol=0, atol=0)

    def test_workers_change_nothing_about_the_order(self):
        alone = ids(stream().batches())
        for workers in (1, 3):
            self.assertEqual(ids(stream().batches(num_workers=workers)), alone)
        loaded = [batch for batch in DataLoader(stream(), batch_size=4, collate_fn=list, num_workers=2)]
        self.assertEqual(ids(loaded), alone)

    def test_ranks_get_equal_counts_and_share_nothing(self):
        ranks = [stream(rank=rank, world=3) for rank in range(3)]
        self.assertEqual([len(r) for r in ranks], [12] * 3)
        self.assertEqual(ranks[0].left_out, 4)
        got = [sum(ids(r.batches(num_workers=2)), []) for r in ranks]
        self.assertEqual([len(g) for g in got], [12] * 3)
        self.assertEqual(len(set(sum(got, []))), 36)
        with unittest.mock.patch.dict("os.environ", {"RANK": "1", "WORLD_SIZE": "3"}):
            self.assertEqual(sum(ids(stream().batches()), []), got[1])
        self.assertEqual({len(stream(rank=r, world=3)) * 3 + stream(rank=r, world=3).left_out for r in range(3)}, {40})

    def test_training_goes_on_from_a_checkpoint(self):
        whole = stream()
        expected = ids(whole.batches()) + ids(whole.batches())
        first = stream()
        batches = first.batches(num_workers=2, prefetch_factor=2)  # workers are ahead of what the trainer had
        got = ids(next(batches) for _ in range(3))
        checkpoint = json.loads(json.dumps(first.state_dict()))
        batches.close()
        second = stream()
        second.load_state_dict(checkpoint)
        got += ids(second.batches(num_workers=1)) + ids(second.batches())
        self.assertEqual(got, expected)
        with self.assertRaisesRegex(ValueError, "seed is 4 here and 3 in the checkpoint"):
            stream(seed=4).load_state_dict(checkpoint)

    def test_a_loader_of_ones_own_is_counted_or_said_not_to_be(self):
        whole = stream()
        expected = ids(whole.batches()) + ids(whole.batches())
        first = stream()
        loaded = iter(DataLoader(first, batch_size=4, collate_fn=list))
        got = ids(next(loaded) for _ in range(3))
        second = stream()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        got += ids(DataLoader(second, batch_size=4, collate_fn=list))
        self.assertEqual(second.state_dict()["epoch"], 1, "the epoch was had whole")
        second.set_epoch(1)
        got += ids(DataLoader(second, batch_size=4, collate_fn=list))
        self.assertEqual(got, expected)

        third = stream()
        third.load_state_dict(first.state_dict())
        loader = DataLoader(third, batch_size=4, collate_fn=list, num_workers=2, persistent_workers=True)
        self.assertEqual(ids(loader), expected[3:10])
        with self.assertRaisesRegex(ValueError, r"batches\(num_workers=…\)"):
            third.state_dict()
        third.set_epoch(1)
        self.assertEqual(ids(loader), expected[10:], "workers that persist begin the new epoch")
        third.set_epoch(1)
        batches = third.batches(num_workers=1)
        next(batches)
        self.assertEqual(third.state_dict()["position"], 4)
        batches.close()
        with self.assertRaisesRegex(ValueError, "position is 3 in the checkpoint"):
            third.load_state_dict({**first.state_dict(), "position": 3})

    def test_processes_of_torchrun_share_an_epoch_and_go_on_from_one_checkpoint(self):
        out = served.folder / "ranks"
        out.mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python", sys.executable, "-c", RANK, served.address, jobs[0].id, out]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=250)
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        ranks = [json.loads((out / f"{rank}").read_text()) for rank in range(2)]
        self.assertEqual([[len(epoch) for epoch in rank] for rank in ranks], [[9, 9]] * 2, "20 samples, 2 ranks, batches of 3")
        for epochs in zip(*ranks):
            self.assertEqual(len(set(sum(epochs, []))), 18)
        alone = [statetap.FeatureStream(jobs[0], server=served.address, batch_size=3, seed=5, rank=rank, world=2) for rank in range(2)]
        self.assertEqual(ranks, [[[id for _, id in features.order(epoch)] for epoch in range(2)] for features in alone])

    def test_an_epoch_goes_on_when_the_server_is_killed_and_started_again(self):
        with Served() as own:
            own.run([{"id": f"{n:02}", "input_ids": [100 + n] * 50} for n in range(24)], name="job")
            for workers in (0, 2):
                features = statetap.FeatureStream("job", server=own.address, batch_size=4, seed=3)
                batches = features.batches(num_workers=workers)
                got = [next(batches)]
                own.kill_and_start_again()
                got += batches
                self.assertEqual(sum(ids(got), []), [id for _, id in features.order(0)])
                for sample in sum(got, []):
                    self.assertEqual(sample.input_ids.tolist(), [100 + int(sample.id)] * 50)

    def test_what_ends_an_epoch_is_named_in_workers_too(self):
        gone = served.run(PROMPTS[:8], name="gone", temperature=0, max_new_tokens=2)
        features = statetap.FeatureStream(gone, server=served.address, batch_size=2)
        served.cli("evict", gone.id)
        for workers in (0, 1):
            with self.assertRaisesRegex(statetap.StatetapError, "evicted"):
                list(features.batches(num_workers=workers))
            features.set_epoch(0)
        served.cli("delete", gone.id, "--yes")
        for workers in (0, 1):
            with self.assertRaisesRegex(statetap.StatetapError, gone.id):
                list(features.batches(num_workers=workers))
            features.set_epoch(0)

    def test_waits_for_a_job_when_told_to(self):
        running = served.client.submit(PROMPTS[:8], name="waited for", temperature=0, max_new_tokens=30)
        self.assertEqual(len(statetap.FeatureStream(running, server=served.address, wait=True)), 8)

    def test_where_taps_and_what_is_refused(self):
        part = stream(where='split == "train"', taps=[4], batch_size=1)
        self.assertEqual(len(part), len(list(served.client.samples(jobs[0], 'split == "train"'))) + len(list(served.client.samples(jobs[1], 'split == "train"'))))
        self.assertEqual(next(iter(part)).boundaries, (4, LAYERS))
        self.assertEqual(pickle.loads(pickle.dumps(part)).order(1), part.order(1))
        for options, text in (({"batch_size": 0}, "batch_size 0"), ({"world": 41, "rank": 0}, "40 samples of .*41 ranks with batches of 4 take 164 at a time"),
                              ({"rank": 3, "world": 3}, "rank 3 of 3"), ({"rank": 1}, "together"), ({"where": "tokens < 0"}, "0 samples of .*'tokens < 0' holds for"),
                              ({"taps": [3]}, r"taps \[3\].*boundaries \[2, 4, 5, 8\]")):
            with self.assertRaisesRegex(ValueError, text):
                stream(**options)
        with Stalled() as stalled, self.assertRaisesRegex(ValueError, r"\(growing\) is running: give wait=True, or take its samples as they come with Client.stream"):
            statetap.FeatureStream("growing", server=stalled.address)


# Under torchrun: two epochs, a checkpoint of rank 0 in the midst of the first, and everything behind it by new objects that loaded it.
RANK = """
import json, pathlib, sys
import statetap, torch.distributed

server, job, out = sys.argv[1:]
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
open_stream = lambda: statetap.FeatureStream(job, server=server, batch_size=3, seed=5)
features = open_stream()
batches = features.batches(num_workers=2)
had = [[sample.id for sample in next(batches)]]
batches.close()
checkpoint = [features.state_dict()]
torch.distributed.broadcast_object_list(checkpoint, src=0)
features = open_stream()
features.load_state_dict(checkpoint[0])
for epoch in range(2):
    had += [[sample.id for sample in batch] for batch in features.batches(num_workers=2)]
    counts = [None, None]
    torch.distributed.all_gather_object(counts, len(had))
    assert counts[0] == counts[1], counts
flat = sum(had, [])
(pathlib.Path(out) / str(rank)).write_text(json.dumps([flat[: len(features)], flat[len(features) :]]))
torch.distributed.destroy_process_group()
"""

# Two epochs in the order stored; a checkpoint after every second batch, then saved(). Killed by its own hand before it writes the one of `fatal`.
TRAINER = """
import json, os, signal, sys
import statetap

server, job, checkpoint, seen, fatal = sys.argv[1:]
features = statetap.FeatureStream(job, server=server, batch_size=4, shuffle=False, retain="checkpoint", group="train", epochs=2)
if os.path.exists(checkpoint):
    with open(checkpoint) as file:
        features.load_state_dict(json.load(file))
steps = (features.epoch * len(features) + features.position) // 4
with open(seen, "a") as log:
    while features.epoch < 2:
        for batch in features.batches():
            print(features.epoch, *(sample.id for sample in batch), file=log, flush=True)
            steps += 1
            if steps == int(fatal):
                os.kill(os.getpid(), signal.SIGKILL)
            if steps % 2 == 0:
                with open(checkpoint + ".new", "w") as file:
                    json.dump(state := features.state_dict(), file)
                os.replace(checkpoint + ".new", checkpoint)
                features.saved(state)
    features.saved(features.state_dict())
"""


class RetainTest(unittest.TestCase):
    """A server with --retain until-acked."""

    @classmethod
    def setUpClass(cls):
        cls.served = Served("--retain", "until-acked").__enter__()
        cls.addClassCleanup(cls.served.__exit__)

    def setUp(self):
        self.job, self.ids = self._testMethodName, [f"{n:02}" for n in range(40)]
        samples = [{"id": id, "input_ids": list(range(10, 90 + n))} for n, id in enumerate(self.ids)]
        job = self.served.run(samples, name=self.job, shard_bytes=1 << 20)
        self.assertGreater(len(list(os.scandir(job.shards_path))), 2)

    def features(self, **options):
        return statetap.FeatureStream(self.job, server=self.served.address, batch_size=4, **options)

    def evicted(self):
        return self.served.client.show(self.job).counts.evicted

    def train(self, fatal, expect=-signal.SIGKILL):
        """(what the trainer had, batch by batch, and the checkpoint it left)"""
        checkpoint, seen = (self.served.folder / f"{self.job}.{name}" for name in ("checkpoint", "seen"))
        done = subprocess.run([sys.executable, "-c", TRAINER, self.served.address, self.job, checkpoint, seen, str(fatal)], capture_output=True, text=True, timeout=200)
        self.assertEqual(done.returncode, expect, done.stderr)
        had = [line.split() for line in seen.read_text().splitlines()]
        seen.unlink()
        return had, json.loads(checkpoint.read_text())

    def test_states_go_behind_the_checkpoint_and_a_kill_loses_nothing(self):
        had, checkpoint = self.train(fatal=9)  # in the first epoch, one batch behind a checkpoint
        self.assertEqual((len(had), checkpoint["position"]), (9, 32))
        self.assertEqual(self.evicted(), 0, "every sample is wanted once more")
        had, checkpoint = self.train(fatal=18)  # the eighth batch of the second: had, and not in the checkpoint
        self.assertEqual(had[0][1:], self.ids[32:36], "behind the checkpoint, not behind what was had")
        self.assertEqual((had[-1], checkpoint["epoch"], checkpoint["position"]), (["1", *self.ids[28:32]], 1, 24))
        self.assertTrue(0 < self.evicted() <= 24, self.evicted())
        had, checkpoint = self.train(fatal=0, expect=0)
        self.assertEqual(sum((batch[1:] for batch in had), []), self.ids[24:])
        self.assertEqual(self.evicted(), 40)

    def test_by_default_nothing_is_acknowledged(self):
        features = self.features(group="train")
        ids(features.batches())
        features.saved(features.state_dict())
        self.assertEqual((self.served.client.describe(self.job, group="train").acknowledged, self.evicted()), (0, 0))

    def test_what_is_left_out_of_the_last_epoch_goes_with_its_end(self):
        ranks = [self.features(rank=rank, world=3, retain="checkpoint", group="ranks", epochs=1) for rank in range(3)]
        for features in reversed(ranks):
            self.assertEqual((len(features), features.left_out), (12, 4))
            ids(features.batches())
            features.saved(features.state_dict())
        self.assertEqual((self.served.client.describe(self.job, group="ranks").acknowledged, self.evicted()), (40, 40))
        with self.assertRaisesRegex(ValueError, r"epoch 1 \(from 0\) of 1"):
            next(ranks[0].batches())

    def test_what_cannot_be_is_refused(self):
        for options, text in (({"retain": "some"}, "give all or checkpoint"), ({"retain": "checkpoint"}, "give epochs")):
            with self.assertRaisesRegex(ValueError, text):
                self.features(**options)
        with self.assertRaisesRegex(statetap.StatetapError, "nobody"):
            self.served.client.acknowledge(self.job, ["nobody"])


class CollateTest(unittest.TestCase):
    def setUp(self):
        self.samples = [served.client.sample(jobs[0], prompt["id"]) for prompt in PROMPTS[:3]]

    def test_padded_rows_keep_every_value_in_its_place(self):
        batch = Pad(multiple=64)(self.samples)
        longest = max(map(len, self.samples))
        self.assertEqual(tuple(batch["hidden_states"].shape), (3, -(-longest // 64) * 64, 3 * HIDDEN))
        for b, sample in enumerate(self.samples):
            n = len(sample)
            self.assertEqual(batch["input_ids"][b, :n].tolist(), sample.input_ids.tolist())
            self.assertEqual(batch["loss_mask"][b].sum(), sample.loss_mask.sum())
            self.assertEqual(batch["attention_mask"][b].tolist(), [1] * n + [0] * (batch["input_ids"].shape[1] - n))
            np.testing.assert_array_equal(batch["hidden_states"][b, :n, HIDDEN : 2 * HIDDEN].float(), stored[sample.id][4])
            np.testing.assert_array_equal(batch["target"][b, :n].float(), stored[sample.id][LAYERS])
            self.assertEqual(batch["target"][b, n:].abs().sum(), 0)
        with self.assertRaisesRegex(ValueError, "rows are 8 long"):
            Pad(length=8)(self.samples)

    def test_shortened_rows_hold_the_next_token_beside_the_taps(self):
        sample = self.samples[0]
        row, n = Pad(shift=Shift.SHORTEN)([sample]), len(sample) - 1
        self.assertEqual(row["input_ids"][0].tolist(), sample.input_ids[1:].tolist())
        self.assertEqual(row["loss_mask"][0].tolist(), sample.loss_mask[1:].tolist())
        self.assertEqual(row["position_ids"][0].tolist(), list(range(1, n + 1)))
        np.testing.assert_array_equal(row["hidden_states"][0, :, :HIDDEN].float(), stored[sample.id][2][:-1])
        np.testing.assert_array_equal(row["target"][0].float(), stored[sample.id][LAYERS][1:])

    def test_tensors_are_the_samples_own_memory(self):
        for sample in self.samples:
            tensors = sample.torch()
            self.assertEqual((tensors.block.data_ptr(), tensors.block.dtype), (sample.block.ctypes.data, torch.bfloat16))
            self.assertEqual(tensors.final_prenorm.data_ptr(), sample.block[-1].ctypes.data)

    def test_packed_samples_lie_one_after_another(self):
        lengths = [len(s) for s in self.samples]
        row = Pack(sum(lengths) + 5)(self.samples)
        self.assertEqual(row["document_ids"][0].tolist(), [d for d, n in enumerate(lengths) for _ in range(n)] + [-1] * 5)
        self.assertEqual(row["input_ids"][0, : lengths[0] + lengths[1]].tolist(), self.samples[0].input_ids.tolist() + self.samples[1].input_ids.tolist())
        self.assertEqual(row["position_ids"][0, lengths[0]], 0)
        with self.assertRaisesRegex(ValueError, "rows, 5 of"):
            Pack(lengths[0] + 5)(self.samples)
        self.assertEqual(Pack(lengths[0] + 5, cut=True)(self.samples[:2])["attention_mask"].sum(), lengths[0] + 5)


if __name__ == "__main__":
    unittest.main()
