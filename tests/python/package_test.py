"""The Python package on a running server and its shards. Run by ctest with STATETAP_BIN, STATETAP_ROOT and PYTHONPATH in the environment."""
import gzip
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import struct
import tempfile
import threading
import time
import types
import unittest
import unittest.mock
from pathlib import Path

import grpc
import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import statetap
from google.protobuf.message import DecodeError
from served import HIDDEN, LAYERS, ROOT, TAPS, Proxy, Served, by_h5py
from statetap.inputs import sample_of, samples_of
from statetap.stream import Assembler
from statetap.v1 import features_pb2
from statetap.wire import Data, bits, parse

PROMPTS = [json.loads(line) for line in (ROOT / "examples/prompts_64.jsonl").read_text().splitlines()]


def setUpModule():
    global served, job, stored
    served = Served()
    served.__enter__()
    prompts = [{**p, "source": "even" if i % 2 == 0 else "odd", "meta": {"level": i}} for i, p in enumerate(PROMPTS)]
    job = served.run(prompts, name="all", temperature=0, max_new_tokens=24, eval_fraction=0.25, shard_bytes=1 << 20)
    stored = by_h5py(job.shards_path)


def tearDownModule():
    served.__exit__()


def digests(dataset):
    return [(s.id, s.block.tobytes(), s.input_ids.tobytes()) for s in dataset]


def send_digests(dataset, pipe):
    pipe.send(digests(dataset))


class SamplesTest(unittest.TestCase):
    def check(self, sample, boundaries=(*TAPS, LAYERS)):
        truth = stored[sample.id]
        self.assertEqual(sample.boundaries, tuple(boundaries))
        np.testing.assert_array_equal(sample.input_ids, truth["ids"])
        np.testing.assert_array_equal(sample.loss_mask, truth["mask"])
        self.assertEqual((sample.input_ids.dtype, sample.loss_mask.dtype, sample.logprobs.dtype), (np.int64, np.uint8, np.float32))
        for boundary in boundaries:
            np.testing.assert_array_equal(statetap.float32(sample.states[boundary]), truth[boundary])

    def test_shards_give_what_h5py_reads(self):
        dataset = statetap.ShardDataset(job.shards_path)
        self.assertGreater(len(dataset.shards), 3)
        self.assertEqual(sorted(dataset.ids()), sorted(stored))
        for sample, length in zip(dataset, dataset.lengths):
            self.check(sample)
            self.assertEqual(len(sample), length)
            self.assertEqual(sample.taps.shape, (length, 3, HIDDEN))
            np.testing.assert_array_equal(sample.taps[:, 1], sample.states[4])
            np.testing.assert_array_equal(sample.final_prenorm, sample.states[LAYERS])
        self.assertEqual(dataset.attributes()["final_norm"], "pre")

    def test_a_stream_gives_the_same(self):
        kept = list(served.client.stream(job, group="same"))
        self.assertEqual(sorted(s.id for s in kept), sorted(stored))
        for sample in kept:  # all of them after the last came: a later message changes no earlier sample
            self.check(sample)

    def test_one_sample_by_id_and_a_part_of_its_boundaries(self):
        self.check(served.client.sample(job, PROMPTS[7]["id"]))
        part = served.client.sample("all", PROMPTS[7]["id"], taps=[4])
        self.check(part, [4])
        with self.assertRaisesRegex(KeyError, "not the final one"):
            part.final_prenorm
        self.assertEqual(served.client.sample(job, PROMPTS[7]["id"], taps=[]).block.shape[0], 0)
        with self.assertRaises(statetap.StatetapError) as missing:
            served.client.sample(job, "nobody")
        self.assertEqual(missing.exception.code, grpc.StatusCode.NOT_FOUND)

    def test_values_are_those_of_transformers(self):
        raw = (ROOT / "tests/data/reference/tiny-kimi.safetensors").read_bytes()
        size = struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8 : 8 + size])

        def tensor(name):
            begin, end = header[name]["data_offsets"]
            return np.frombuffer(raw[8 + size + begin : 8 + size + end], {"I32": "<i4", "F32": "<f4"}[header[name]["dtype"]]).reshape(header[name]["shape"])

        numbers = [0, 2, 5, 6]  # 1 to 200 tokens
        reference = served.run([{"id": str(n), "input_ids": tensor(f"{n}.ids")} for n in numbers], name="reference", taps=list(range(LAYERS)))
        for sample in served.client.stream(reference):
            rows, expected = tensor(f"{sample.id}.rows"), tensor(f"{sample.id}.H")
            clear = (tensor(f"{sample.id}.clear") > 1e-5).all(axis=0)[rows]  # the others may have gone to other experts
            for boundary in range(LAYERS + 1):
                got = statetap.float32(sample.states[boundary])[rows]
                error = np.linalg.norm(got - expected[boundary], axis=1) / np.linalg.norm(expected[boundary], axis=1)
                self.assertLess(error[clear].max(), 2**-8, f"sample {sample.id}, boundary {boundary}")  # one rounding to bf16

    def test_where_means_the_same_on_server_and_shards(self):
        for where in ('split == "eval"', 'source == "odd" and meta.level > 10', "tokens > 80 or supervised_tokens < 9", 'finish == "stop" and logprob > -0.05',
                      "not truncated and index < 30 and generated_tokens > 5", 'id in ("prompt-64-000003", "prompt-64-000009")'):
            here = statetap.ShardDataset(job.shards_path, where=where).ids()
            self.assertEqual(sorted(here), sorted(s.id for s in served.client.samples(job, where)), where)
            self.assertTrue(0 < len(here) < 64, where)
        with self.assertRaisesRegex(ValueError, "holds for none of 64 samples"):
            statetap.ShardDataset(job.shards_path, where="tokens < 0")

    def test_fp8_states_decode_to_what_the_server_sends(self):
        fp8 = served.run(PROMPTS[:6], name="fp8", temperature=0, max_new_tokens=4, states="fp8")
        here = {s.id: s for s in statetap.ShardDataset(fp8.shards_path)}
        for sample in served.client.stream(fp8):
            np.testing.assert_array_equal(here[sample.id].block, sample.block)


class DatasetTest(unittest.TestCase):
    def test_a_part_of_the_taps_leaves_the_others_untouched(self):
        folder = Path(tempfile.mkdtemp(dir=served.folder))
        for path in Path(job.shards_path).glob("*.h5"):
            raw = bytearray(path.read_bytes())
            for name, table in statetap.dataset.Shard(path)._tables.items():
                if name in ("/states/2", "/states/5"):
                    for offset in table.offsets:
                        raw[int(offset) : int(offset) + table.rows_per_chunk * table.row_bytes] = b"\xff" * (table.rows_per_chunk * table.row_bytes)
            (folder / path.name).write_bytes(raw)
        part = statetap.ShardDataset(folder, taps=[4])
        self.assertEqual(part.boundaries, (4, LAYERS))
        for sample in part:
            np.testing.assert_array_equal(statetap.float32(sample.states[4]), stored[sample.id][4])
        self.assertEqual(statetap.ShardDataset(folder, taps=[4], final=False)[0].block.shape[0], 1)
        with self.assertRaisesRegex(ValueError, r"taps \[3\].*boundaries \[2, 4, 5, 8\]"):
            statetap.ShardDataset(folder, taps=[3])
        with self.assertRaisesRegex(ValueError, "ascending"):
            statetap.ShardDataset(folder, taps=[5, 4])

    def test_processes_forked_or_spawned_and_threads_read_the_same(self):
        dataset = statetap.ShardDataset(job.shards_path)
        before = digests(dataset)  # its files are open now
        for method in ("fork", "spawn"):
            context = multiprocessing.get_context(method)
            ends = [context.Pipe() for _ in range(8)]  # as many as a loader has workers
            children = [context.Process(target=send_digests, args=(dataset, child)) for _, child in ends]
            for child in children:
                child.start()
            for parent, _ in ends:
                self.assertEqual(parent.recv(), before, method)
            self.assertEqual(digests(dataset), before)
            for child in children:
                child.join()
                self.assertEqual(child.exitcode, 0)
        got = []
        threads = [threading.Thread(target=lambda: got.append(digests(dataset))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(got, [before] * 4)

    def test_more_shards_than_file_handles(self):
        folder = Path(tempfile.mkdtemp(dir=served.folder))
        source = sorted(Path(job.shards_path).glob("*.h5"))[0]
        for i in range(500):
            os.link(source, folder / f"{i:03}.h5")

        def read(pipe):
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
            dataset = statetap.ShardDataset(folder)
            one = len(dataset.shards[0])
            pipe.send((len(dataset), one, {dataset[i].block.tobytes() for i in range(0, len(dataset), one)}))

        context = multiprocessing.get_context("fork")
        parent, end = context.Pipe()
        child = context.Process(target=read, args=(end,))
        child.start()
        length, one, blocks = parent.recv()
        child.join()
        self.assertEqual((length, len(blocks)), (500 * one, 1))

    def test_a_cut_grown_or_foreign_file_is_refused_by_name(self):
        path = served.folder / "broken.h5"
        raw = sorted(Path(job.shards_path).glob("*.h5"))[0].read_bytes()
        for bad in (raw[:-1], raw[:4096], raw + b"\0", b"", b"x" * 100, raw[:-100] + raw[-56:]):
            path.write_bytes(bad)
            with self.assertRaisesRegex(statetap.DataLossError, "broken.h5"):
                statetap.ShardDataset(path)
        path.unlink()
        with self.assertRaisesRegex(FileNotFoundError, "broken.h5"):
            statetap.ShardDataset(path)

    def test_evicted_states_are_said_to_be(self):
        gone = served.run(PROMPTS[:3], name="gone", temperature=0, max_new_tokens=2)
        served.cli("evict", "gone")
        with self.assertRaisesRegex(ValueError, "evicted"):
            statetap.ShardDataset(gone.shards_path)
        tokens = statetap.ShardDataset(gone.shards_path, taps=[], final=False)
        self.assertEqual((len(tokens), tokens[0].block.shape[0]), (3, 0))

    def test_a_dataset_survives_pickling(self):
        dataset = pickle.loads(pickle.dumps(statetap.ShardDataset(job.shards_path, where='split == "eval"')))
        self.assertEqual(digests(dataset), digests(statetap.ShardDataset(job.shards_path, where='split == "eval"')))


class WireTest(unittest.TestCase):
    def messages(self):
        states = np.arange(6 * HIDDEN, dtype="<u2")
        header = features_pb2.StreamHeader(job_index=1, job="job-1", hidden=HIDDEN, layers=LAYERS, boundaries=[4, LAYERS])
        sample = features_pb2.SampleHeader(job_index=1, delivery=3, id="a", input_ids=[7, 8, 9], loss_mask=b"\0\1\1")
        pieces = [(4, 0, states[: 2 * HIDDEN]), (LAYERS, 0, states[3 * HIDDEN :]), (4, 2, states[2 * HIDDEN : 3 * HIDDEN])]
        responses = [features_pb2.StreamFeaturesResponse(header=header), features_pb2.StreamFeaturesResponse(sample=sample)]
        responses += [features_pb2.StreamFeaturesResponse(data=features_pb2.SampleData(delivery=3, boundary=b, first_row=row, states=s.tobytes())) for b, row, s in pieces]
        return states.reshape(2, 3, HIDDEN), [response.SerializeToString() for response in responses]

    def test_states_are_copied_once_from_the_message_into_the_samples_own_memory(self):
        states, messages = self.messages()
        assembler, done = Assembler(), None
        for message in messages:
            parsed = parse(message)
            if isinstance(parsed, Data):
                self.assertIs(parsed.states.obj, message, "a view")
                self.assertTrue(np.shares_memory(bits(parsed.states), np.frombuffer(message, np.uint8)))
            done = assembler.add(parsed) or done
        delivery, sample = done
        self.assertEqual(delivery, 3)
        np.testing.assert_array_equal(sample.block, states)
        self.assertTrue(sample.block.flags.owndata and sample.block.flags.writeable)
        for view in (sample.taps, sample.final_prenorm, *sample.states.values()):
            self.assertTrue(np.shares_memory(view, sample.block))

    def test_a_message_that_was_cut_is_refused_never_read_short(self):
        for message in self.messages()[1]:
            whole = parse(message)
            for end in range(len(message)):
                try:
                    part = parse(message[:end])
                except (statetap.DataLossError, DecodeError):
                    continue
                self.assertNotEqual(part, whole)
                self.assertFalse(isinstance(part, Data) and part.states, end)

    def test_messages_that_do_not_fit_together_are_refused(self):
        _, (header, sample, *data) = self.messages()
        for wrong in ([sample], [header, data[0]], [header, sample, data[2]], [header, sample, data[0], data[0]], [header, sample, sample]):
            assembler = Assembler()
            with self.assertRaises(statetap.DataLossError):
                for message in wrong:
                    assembler.add(parse(message))


class RestartTest(unittest.TestCase):
    def test_samples_come_once_and_whole_when_the_server_is_killed_and_started_again(self):
        with Served() as served:
            job = served.run([{"id": f"{n:02}", "input_ids": [100 + n] * 200} for n in range(30)], name="job", shard_bytes=1 << 20)
            truth = {sample.id: sample.block.tobytes() for sample in statetap.ShardDataset(job.shards_path)}
            ids = sorted(truth)
            away, real = 0, time.monotonic
            with unittest.mock.patch("statetap.patience.time", types.SimpleNamespace(monotonic=lambda: real() + away, sleep=time.sleep)):
                for samples, expected in ((served.client.fetch(job, ids=ids * 10), ids * 10),  # 61 MB: more than lies in buffers
                                          (served.client.stream(job, credit_bytes=1 << 20), ids)):  # five samples at a time
                    got = [next(samples) for _ in range(3)]
                    served.kill_and_start_again()
                    away += 3600  # the trainer was busy for an hour
                    got += samples
                    self.assertEqual([s.id for s in got], expected)
                    self.assertEqual({s.block.tobytes() == truth[s.id] for s in got}, {True})

    def test_a_job_that_was_deleted_is_named(self):
        gone = served.run(PROMPTS[:6], name="deleted", temperature=0, max_new_tokens=2)
        ids = [sample.id for sample in served.client.samples(gone)]
        served.cli("delete", gone.id, "--yes")
        with self.assertRaisesRegex(statetap.StatetapError, gone.id) as refused:
            list(served.client.fetch(gone, ids=ids))
        self.assertEqual(refused.exception.code, grpc.StatusCode.NOT_FOUND)


class ClientTest(unittest.TestCase):
    def test_a_group_goes_on_behind_what_it_acknowledged(self):
        first = served.client.stream(job, group="resumed", ack=False)
        seen = [next(first).id for _ in range(10)]
        first.ack()
        rest_of_first = [next(first).id for _ in range(5)]
        first.__exit__()
        second = [s.id for s in served.client.stream(job, group="resumed")]
        self.assertEqual(set(second), set(stored) - set(seen))
        self.assertLessEqual(set(rest_of_first), set(second))
        self.assertEqual(list(served.client.stream(job, group="resumed")), [])

    def test_a_stream_follows_a_job_that_runs(self):
        running = served.client.submit(PROMPTS[:16], name="running", temperature=0, max_new_tokens=16, shard_bytes=1 << 20)
        ids = {s.id for s in served.client.stream(running)}
        self.assertEqual(ids, {p["id"] for p in PROMPTS[:16]})

    def test_jobs_are_listed_shown_and_watched(self):
        self.assertIn("all", [j.name for j in served.client.list()])
        self.assertEqual(served.client.show("all").id, job.id)
        self.assertEqual([statetap.state_name(j) for j in served.client.watch(job)], ["succeeded"])
        self.assertEqual(served.client.model().layers, LAYERS)
        again = served.client.submit(PROMPTS[:16], name="running again", temperature=0)
        self.assertEqual(served.client.submit(PROMPTS[:16], name="running again", temperature=0).id, again.id)
        served.client.wait(again)

    def test_a_server_that_vanishes_without_a_word_is_noticed(self):
        quiet = served.client.submit([{"id": str(n), "prompt": "Tell me something."} for n in range(1000)], name="quiet")
        served.cli("pause", quiet.id)
        ended = []

        def watch(client):
            try:
                for _ in client.watch(quiet):
                    heard.set()
            except statetap.StatetapError as error:
                ended.append(error.code)

        heard = threading.Event()
        with unittest.mock.patch.multiple("statetap.client", _KEEPALIVE_MS=1000, _KEEPALIVE_TIMEOUT_MS=5000), \
                unittest.mock.patch("statetap.patience._SECONDS", 0), Proxy(served.address) as proxy:
            client = statetap.connect(proxy.address)
            watching = threading.Thread(target=watch, args=[client])
            watching.start()
            self.assertTrue(heard.wait(60))
            watching.join(6)  # several pings: more than the library sends by default while a client has nothing to say
            self.assertEqual(ended, [])
            proxy.freeze()
            watching.join(40)
            self.assertEqual(ended, [grpc.StatusCode.UNAVAILABLE])
        client.close()
        watching.join()
        served.cli("delete", quiet.id, "--yes")

    def test_rejected_samples_are_listed_and_a_job_of_them_fails(self):
        bad = served.client.submit([{"id": "vocabulary", "input_ids": [99999, 1]}], name="bad")
        with self.assertRaisesRegex(statetap.StatetapError, "failed"):
            served.client.wait(bad)
        self.assertEqual([(r.id, r.reason) for r in served.client.rejected(bad)], [("vocabulary", "token_id")])

    def test_files_of_prompts(self):
        lines = list(samples_of(ROOT / "examples/prompts_64.jsonl"))
        self.assertEqual((len(lines), lines[3].source, lines[3].source_line), (64, "prompts_64.jsonl", 4))
        packed, table = served.folder / "some.jsonl.gz", served.folder / "some.parquet"
        packed.write_bytes(gzip.compress((ROOT / "examples/prompts_64.jsonl").read_bytes()))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(PROMPTS), table)
        whole = pyarrow.Table.from_pylist(PROMPTS)
        stream, file = served.folder / "stream.arrow", served.folder / "file.arrow"
        for path, writer in ((stream, pyarrow.ipc.new_stream), (file, pyarrow.ipc.new_file)):
            with writer(str(path), whole.schema) as sink:
                sink.write_table(whole)
        saved = served.folder / "saved"  # as datasets' save_to_disk leaves it
        saved.mkdir()
        names = [f"data-{i:05}-of-00002.arrow" for i in range(2)]
        for name, part in zip(names, (whole.slice(0, 20), whole.slice(20))):
            with pyarrow.ipc.new_stream(str(saved / name), whole.schema) as sink:
                sink.write_table(part)
        (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
        for path in (packed, table, stream, file, saved):
            self.assertEqual([(s.id, json.loads(s.chat.messages_json)) for s in samples_of(path)], [(p["id"], p["messages"]) for p in PROMPTS], path)
        with self.assertRaisesRegex(ValueError, "no state.json"):
            list(samples_of(served.folder))
        (served.folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
        with self.assertRaisesRegex(ValueError, "train, test; give one of them"):
            list(samples_of(served.folder))
        with self.assertRaisesRegex(ValueError, "zstd -d"):
            list(samples_of(served.folder / "some.jsonl.zst"))
        (served.folder / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
        with self.assertRaisesRegex(ValueError, "latin.jsonl 1: .*UTF-8"):
            list(samples_of(served.folder / "latin.jsonl"))
        path = served.folder / "broken.jsonl"
        path.write_text('{"prompt": "a"}\n{"prompt": \n')
        with self.assertRaisesRegex(ValueError, "broken.jsonl 2"):
            served.client.submit(path)
        self.assertNotIn("broken.jsonl", [j.name for j in served.client.list()])

    def test_prompts_of_a_wrong_shape_name_field_and_remedy(self):
        for prompt, text in (({}, "exactly one"), ({"conversations": []}, "statetap submit"), ({"messages": 3}, "messages is 3; give a list"), ({"prompt": ["a"]}, "give a text"),
                             ({"input_ids": [1, 2], "loss_mask": [1]}, "1 values for 2"), ({"input_ids": [2**31]}, "below 2"),
                             ({"prompt_token_ids": [1]}, "token_ids is missing"), ({"prompt": "a", "meta": []}, "meta is"),
                             ({"prompt": "a", "max_new_tokens": "x"}, "max_new_tokens is 'x'")):
            with self.assertRaisesRegex(ValueError, text):
                sample_of(prompt)
        with self.assertRaisesRegex(ValueError, "temperatur.*temperature"):
            served.client.submit(["hello"], temperatur=1)
        with self.assertRaisesRegex(statetap.StatetapError, "taps"):
            served.client.submit(["hello"], name="taps", taps=[5, 2])

    def test_a_server_that_is_not_there_is_named(self):
        with self.assertRaisesRegex(ValueError, "HOST:PORT"):
            statetap.connect("http://here:7070")
        with self.assertRaisesRegex(statetap.StatetapError, "cannot reach a server at 127.0.0.1:1"):
            statetap.connect("127.0.0.1:1").show("x")


if __name__ == "__main__":
    unittest.main()
