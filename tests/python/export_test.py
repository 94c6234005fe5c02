"""Exports as far as they can be held without a trainer's package; trainers_test.py reads them with theirs."""
import contextlib
import http.client
import json
import os
import pickletools
import shutil
import subprocess
import sys
import threading
import time
import tracemalloc
import types
import unittest
import unittest.mock
import zipfile
from pathlib import Path

import numpy as np
import statetap
from served import HIDDEN, LAYERS, MODEL, ROOT, TAPS, Served, Stalled, by_h5py
from statetap.checkpoint import HEAD, Checkpoint, read_header, read_tensor
from statetap.export.__main__ import FORMATS, report
from statetap.export.run import Request
from statetap.export.run import export as export_all
from statetap.export.vocabulary import Counts, choose
from statetap.files import Bf16, write_safetensors
from statetap.source import Source

PROMPTS = [json.loads(line) for line in (ROOT / "examples/prompts_64.jsonl").read_text().splitlines()]
VOCAB, EPS = 2304, json.loads((MODEL / "config.json").read_text())["text_config"]["rms_norm_eps"]


def setUpModule():
    global served, job, stored, model
    served = Served()
    served.__enter__()
    prompts = [{**p, "source": "even" if i % 2 == 0 else "odd"} for i, p in enumerate(PROMPTS[:24])]
    job = served.run(prompts, name="all", temperature=0, max_new_tokens=24, eval_fraction=0.25)
    served.run([{"id": "unsupervised", "input_ids": [5, 6, 7], "loss_mask": [1, 0, 0]}, {"id": "kept", "input_ids": [5, 6, 7], "loss_mask": [0, 1, 0]}], name="tokens")
    stored, model = by_h5py(job.shards_path), Checkpoint(MODEL)


def tearDownModule():
    served.__exit__()


def export(command, *arguments, expect=0):
    result = subprocess.run([sys.executable, "-m", "statetap.export", command, "--server", served.address, *map(str, arguments)], capture_output=True, text=True, timeout=200)
    if result.returncode != expect:
        raise AssertionError(f"{command} {arguments}: exit {result.returncode}, expected {expect}\n{result.stdout}\n{result.stderr}")
    return json.loads(result.stdout) if "--json" in arguments and expect == 0 else result.stderr + result.stdout


def members(path):
    """{name: bytes} of a torch.save file, and where each lies; names as torch's reader looks for them."""
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            assert info.compress_type == zipfile.ZIP_STORED, info
        return {info.filename.split("/", 1)[1]: archive.read(info) for info in archive.infolist()}


def rows_of(folder):
    return [json.loads(line) for line in (folder / "statetap-rows.jsonl").read_text().splitlines()]


def completion(ids):
    """What the trainer posts for a row."""
    return json.dumps({"model": "tiny", "prompt": ids, "max_tokens": 1, "return_token_ids": True})


@contextlib.contextmanager
def serving_endpoint(served, job, states):
    """(its line when ready, a call that asks it)"""
    command = [sys.executable, "-m", "statetap.endpoint", job, "--model", "tiny", "--states", states, "--listen", "127.0.0.1:0", "--server", served.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as endpoint:
        ready = endpoint.stdout.readline()
        address = ready.split()[3].removeprefix("http://").removesuffix("/v1")

        def ask(method, path, body=None):
            with contextlib.closing(http.client.HTTPConnection(address, timeout=60)) as connection:
                connection.request(method, path, body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                return answer.status, json.loads(answer.read())

        try:
            yield ready, ask
        finally:
            endpoint.terminate()


class GrowingJobTest(unittest.TestCase):
    """What docs/trainers.md says of a job that still runs, each on one that is sure not to end."""

    def setUp(self):
        self.served = Stalled().__enter__()
        self.addCleanup(self.served.__exit__)
        self.stored = {sample.id for sample in self.served.client.samples("growing")}
        self.assertTrue(0 < len(self.stored) < len(Stalled.SAMPLES), self.stored)

    def test_export_and_rows_only_say_that_it_runs(self):
        for more in ([], ["--rows-only"]):
            told = export("export", "--to", "speculators", "growing", "--out", self.served.folder / "out", *more, "--server", self.served.address, expect=2)
            self.assertRegex(told, r"job job-\S+ \(growing\) is running: wait until it has ended \(statetap watch")
        self.assertFalse((self.served.folder / "out").exists())

    def test_a_stream_gives_what_is_stored_and_later_the_rest(self):
        stream = self.served.client.stream("growing")
        first = {next(stream).id for _ in self.stored}
        self.assertEqual(first, self.stored)
        self.assertEqual(statetap.state_name(self.served.client.show("growing")), "running")
        self.served.make_room()
        self.assertEqual({sample.id for sample in stream} | first, {sample["id"] for sample in Stalled.SAMPLES})

    def test_a_stream_that_has_waited_for_long_outlives_a_restart(self):
        away, real, got = 0, time.monotonic, []
        with unittest.mock.patch("statetap.patience.time", types.SimpleNamespace(monotonic=lambda: real() + away, sleep=time.sleep)):
            stream = self.served.client.stream("growing")
            got += [next(stream).id for _ in self.stored]
            waiting = threading.Thread(target=lambda: got.extend(sample.id for sample in stream))
            waiting.start()
            away = 3600
            self.served.kill_and_start_again()
            self.served.make_room()
            waiting.join()
        self.assertEqual(sorted(got), [sample["id"] for sample in Stalled.SAMPLES])

    def test_the_endpoint_gives_what_is_stored_and_later_the_rest(self):
        with serving_endpoint(self.served, "growing", self.served.folder / "states") as (ready, ask):
            self.assertIn(f"rows={len(self.stored)}", ready)
            for sample in Stalled.SAMPLES:
                status, answer = ask("POST", "/v1/completions", completion(sample["input_ids"]))
                self.assertEqual(status, 200 if sample["id"] in self.stored else 404)
                if status == 404:
                    self.assertRegex(answer["error"]["message"], rf"job job-\S+ \(growing\) is running, {len(self.stored)} of 10 samples are stored")
            self.served.make_room()
            self.served.client.wait("growing")
            for sample in Stalled.SAMPLES:
                while (found := ask("POST", "/v1/completions", completion(sample["input_ids"])))[0] == 404:  # it looks again after a while
                    time.sleep(0.2)
                self.assertEqual(found[0], 200)
                states, _ = read_tensor(Path(found[1]["kv_transfer_params"]["hidden_states_path"]), "hidden_states")
                truth = self.served.client.sample("growing", sample["id"])
                np.testing.assert_array_equal(states, truth.block.swapaxes(0, 1))


class ExportTest(unittest.TestCase):
    def out(self, name):
        return served.folder / f"{self._testMethodName}-{name}"

    def test_speculators_rows_and_states(self):
        out = self.out("a")
        done = export("export", "--to", "speculators", "all", "--out", out, "--draft-vocab", 128, "--json")
        self.assertEqual((done["rows"], done["written"], done["taps"]), (24, 24, list(TAPS)))
        rows = rows_of(out)
        self.assertEqual(sorted(r["id"] for r in rows), sorted(stored))
        splits = {s.id: s.split for s in served.client.samples(job)}
        self.assertEqual([splits[r["id"]] for r in rows], ["train"] * done["train_rows"] + ["eval"] * (24 - done["train_rows"]))
        self.assertEqual({p.name for p in (out / "hidden_states").iterdir()}, {f"hs_{r}.safetensors" for r in range(24)})
        for row in rows:
            path, truth = out / "hidden_states" / f"hs_{row['row']}.safetensors", stored[row["id"]]
            states, dtype = read_tensor(path, "hidden_states")
            self.assertEqual((states.shape, dtype), ((len(truth["ids"]), 4, HIDDEN), "BF16"))
            for slot, boundary in enumerate((*TAPS, LAYERS)):
                np.testing.assert_array_equal(statetap.float32(np.array(states[:, slot])), truth[boundary])
            ids, dtype = read_tensor(path, "token_ids")
            self.assertEqual((ids.tolist(), dtype), (truth["ids"].tolist(), "I64"))
            header, begin = read_header(path)
            self.assertEqual(path.stat().st_size, begin + max(t["data_offsets"][1] for n, t in header.items() if n != "__metadata__"))
        self.assertEqual(json.loads((out / "state.json").read_text())["_format_type"], "torch")
        import pyarrow

        with pyarrow.ipc.open_stream(out / "data-00000-of-00001.arrow") as stream:
            table = stream.read_all().to_pylist()
        self.assertEqual([t["input_ids"] for t in table], [stored[r["id"]]["ids"].tolist() for r in rows])
        self.assertEqual([t["loss_mask"] for t in table], [stored[r["id"]]["mask"].tolist() for r in rows])
        self.assertEqual([t["seq_len"] for t in table], [r["tokens"] for r in rows])
        self.assertFalse(list(out.rglob("*.partial")) + list(out.rglob("*.lock")))

    def test_a_job_and_its_shards_give_the_same_files(self):
        export("export", "--to", "modelopt", "all", "--out", self.out("job"))
        export("export", "--to", "modelopt", job.shards_path, "--out", self.out("path"), "--server", "127.0.0.1:1")
        names = sorted(p.name for p in self.out("job").glob("*.pt"))
        self.assertEqual(len(names), 24)
        self.assertEqual(names, sorted(p.name for p in self.out("path").glob("*.pt")))
        self.assertEqual(rows_of(self.out("job")), rows_of(self.out("path")))
        for name in names:
            self.assertEqual((self.out("job") / name).read_bytes(), (self.out("path") / name).read_bytes(), name)

    def test_torch_files_hold_unshifted_rows_and_a_final_state_normed_where_the_trainer_wants_it(self):
        export("export", "--to", "speculators", "all", "--out", self.out("speculators"))
        norm = statetap.float32(model.bits("model.norm.weight")).astype(np.float64)
        for format in ("specforge", "torchspec", "angelslim", "modelopt"):
            out, tokens = self.out(format), 0
            export("export", "--to", format, "all", "--out", out, "--model", MODEL)
            self.assertEqual(rows_of(out), rows_of(self.out("speculators")))
            files = sorted((p for p in out.rglob("*") if p.suffix in (".ckpt", ".pt")), key=str)
            for row, path in zip(rows_of(out), files, strict=True):  # names sort as rows do
                held, truth = members(path), stored[row["id"]]
                n = len(truth["ids"])
                final, taps = ("data/2", "data/3") if format == "modelopt" else ("data/3", "data/2")
                sizes = {"data/0": 8 * n, "data/1": 8 * n, taps: n * 3 * HIDDEN * 2, final: n * HIDDEN * 2}
                self.assertEqual({name: len(data) for name, data in held.items() if name.startswith("data/")}, sizes, "a storage is as long as its tensor")
                self.assertEqual(np.frombuffer(held["data/0"], "<i8").tolist(), truth["ids"].tolist())
                self.assertEqual(np.frombuffer(held["data/1"], "<i8").tolist(), truth["mask"].tolist())
                values = statetap.float32(np.frombuffer(held[taps], "<u2")).reshape(n, 3, HIDDEN)
                for i, boundary in enumerate(TAPS):
                    np.testing.assert_array_equal(values[:, i], truth[boundary])
                slots, _ = read_tensor(self.out("speculators") / f"hidden_states/hs_{row['row']}.safetensors", "hidden_states")
                got = statetap.float32(np.frombuffer(held[final], "<u2")).reshape(n, HIDDEN)
                x = statetap.float32(np.array(slots[:, -1]))
                if format == "modelopt":
                    np.testing.assert_array_equal(got, x)
                else:
                    x = x.astype(np.float64)
                    expected = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPS) * norm
                    np.testing.assert_allclose(got, expected, rtol=2**-8, atol=1e-30)  # one rounding to bf16
                tokens += n
            self.assertGreater(tokens, 1000)
            self.assertFalse([p for p in out.rglob("*") if p.name.startswith(".") or p.suffix in (".partial", ".lock")])

    def test_names_sort_as_rows_do(self):
        rows = [*range(0, 4100, 37), 99_999, 100_000, 1_000_000]
        for format in FORMATS.values():
            names = [format().file(row) for row in rows]
            self.assertEqual(len(set(names)), len(rows))
            if format.name != "speculators":  # which asks for the number
                self.assertEqual(names, sorted(names), format.name)

    def test_no_more_than_a_few_samples_are_held(self):
        many = served.run([{"id": f"{n:02}", "input_ids": [10 + n] * 400} for n in range(60)], name="many")
        (shard,) = Path(many.shards_path).glob("*.h5")
        sample = 4 * 400 * HIDDEN * 2
        self.assertGreater(shard.stat().st_size, 60 * sample)
        for format in FORMATS.values():
            for words in (["many"], [many.shards_path]):
                out = self.out(f"{format.name}{len(words[0])}")
                export_all(Source(words, server=served.address), Request(format(), out, rows_only=True), quiet=True)  # imports and tables are there now
                shutil.rmtree(out)
                tracemalloc.start()
                export_all(Source(words, server=served.address), Request(format(), out, checkpoint=model), quiet=True)
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                self.assertLess(peak, 12 * sample, f"{format.name} from {words}")

    def test_progress_is_told_unless_quiet(self):
        told = export("export", "--to", "torchspec", "all", "--model", MODEL, "--out", self.out("a"))
        self.assertIn("tokens 24/24", told)
        self.assertRegex(told, r"files 24/24 · [0-9,]+ MB/s")
        self.assertNotIn("24/24", export("export", "--to", "torchspec", "all", "--model", MODEL, "--out", self.out("b"), "--quiet"))

    def test_the_final_state_predicts_the_greedy_tokens(self):
        head, hits, asked = statetap.float32(model.bits(HEAD)), 0, 0
        for sample in statetap.ShardDataset(job.shards_path):
            told = (statetap.float32(model.final_norm(sample.final_prenorm)) @ head.T).argmax(axis=1)
            where = sample.loss_mask[1:] == 1
            hits, asked = hits + int((told[:-1] == sample.input_ids[1:])[where].sum()), asked + int(where.sum())
        self.assertGreaterEqual(hits, 0.99 * asked)
        self.assertGreater(asked, 300)

    def test_vocabulary_maps(self):
        out = self.out("maps")
        told = export("vocab-map", "all", "--draft-vocab", 100, "--draft-vocab", 300, "--out", out, "--report", "--json")
        count = np.zeros(VOCAB, int)
        for truth in stored.values():
            np.add.at(count, truth["ids"][truth["mask"] == 1], 1)
        self.assertEqual((told["tokens"], told["distinct"]), (count.sum(), (count > 0).sum()))
        for size in (100, 300):
            d2t, t2d = np.load(out / f"d2t-{size}.npy"), np.load(out / f"t2d-{size}.npy")
            self.assertEqual((d2t.dtype, d2t.shape, t2d.dtype, t2d.shape), (np.int64, (size,), np.bool_, (VOCAB,)))
            ids = np.arange(size) + d2t
            self.assertTrue((np.diff(ids) > 0).all() and ids[-1] < VOCAB)
            np.testing.assert_array_equal(np.flatnonzero(t2d), ids)
            self.assertGreaterEqual(count[t2d].min(), count[~t2d].max())
            held = members(out / f"vocab_mapping-{size}.pt")
            self.assertEqual((held["data/0"], held["data/1"]), (d2t.tobytes(), t2d.tobytes()))
        self.assertEqual(told["coverage"], {name: {str(VOCAB): 1.0} for name in ("all", "even", "odd")})  # all sizes that there are exceed this vocabulary
        odd = np.zeros(VOCAB, int)
        for sample in served.client.samples(job, 'source == "odd"'):
            np.add.at(odd, stored[sample.id]["ids"][stored[sample.id]["mask"] == 1], 1)
        local = export("vocab-map", job.shards_path, "--model", MODEL, "--against", out / "t2d-100.npy", "--where", 'source == "odd"', "--json")
        t2d, best = np.load(out / "t2d-100.npy"), np.sort(odd)[-100:].sum() / odd.sum()
        self.assertEqual((local["tokens"], local["against"]["size"]), (odd.sum(), 100))
        self.assertAlmostEqual(local["against"]["coverage"], odd[t2d].sum() / odd.sum())
        self.assertAlmostEqual(local["against"]["new_coverage"], best)
        self.assertLess(local["against"]["coverage"], best)
        self.assertIn("name the one that is meant", export("vocab-map", "all", "--against", out, expect=2))
        np.testing.assert_array_equal(np.flatnonzero(choose(np.array([0, 3, 3, 0, 9]), 4)[1]), [0, 1, 2, 4])  # ties and unused: lowest ids

    def test_the_report_says_what_maps_of_each_size_cover_by_source(self):
        vocab, random = 163_840, np.random.default_rng(0)
        counts, parts = Counts(vocab), [Counts(vocab), Counts(vocab)]
        for n in range(40):  # most ids of the two sources are different ones
            ids = (random.random(20_000) ** 3 * 100_000).astype(int) + 60_000 * (n % 2)
            mask = random.integers(0, 2, 20_000)
            for c in (counts, parts[n % 2]):
                c.add(("code", "chat")[n % 2], ids, mask)
        merged = {**parts[0].by_source, **parts[1].by_source}
        for source, row in counts.by_source.items():
            np.testing.assert_array_equal(row, merged[source], "counts of parts add up")
        table, lines = report(counts)
        sizes = [8192, 16384, 32000, 32768, 65536]
        order = np.lexsort((np.arange(vocab), -counts.total))
        for name, row in (("all", counts.total), *counts.by_source.items()):
            self.assertEqual(table[name], {str(size): row[order[:size]].sum() / row.sum() for size in sizes})
            self.assertIn(name, " ".join(lines))
        self.assertTrue(all(0.3 < table[source]["8192"] < table[source]["65536"] < 1 for source in ("code", "chat")), table)

    def test_an_interrupted_export_goes_on_and_another_one_is_refused(self):
        out, arguments = self.out("a"), ("--to", "speculators", "all", "--model", MODEL, "--json")
        export("export", *arguments, "--out", out)
        whole = {p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()}
        for row in (3, 11):
            os.unlink(out / "hidden_states" / f"hs_{row}.safetensors")
        (out / "hidden_states/.hs_3.safetensors.partial").write_bytes(b"half")
        self.assertEqual(export("export", *arguments, "--out", out)["written"], 2)
        self.assertEqual({p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()}, whole)
        for other, text in ((("--seed", 1), "seed is 0 there and 1 here"), (("--taps", "4"), "taps"), (("--where", 'source == "odd"'), "samples"), (("--rows-only",), "rows_only")):
            self.assertIn(text, export("export", *arguments, *other, "--out", out, expect=2))
        foreign = self.out("b")
        foreign.mkdir()
        (foreign / "mine.txt").write_text("x")
        self.assertIn("not empty", export("export", *arguments, "--out", foreign, expect=2))

    def test_what_cannot_be_exported_is_said(self):
        self.assertIn("--model", export("export", "--to", "angelslim", "all", "--out", self.out("a"), expect=2))
        self.assertIn("boundary k", export("export", "--to", "speculators", "all", "--taps", "3", "--out", self.out("b"), expect=2))
        self.assertIn("nobody", export("export", "--to", "speculators", "nobody", "--out", self.out("c"), expect=1))
        self.assertIn("at character 1", export("export", "--to", "speculators", "all", "--where", "sauce == 1", "--out", self.out("d"), expect=2))
        self.assertIn("not both", export("export", "--to", "speculators", "all", job.shards_path, "--out", self.out("e"), expect=2))
        self.assertIn("more than once", export("export", "--to", "speculators", "all", "all", "--out", self.out("f"), expect=2))
        self.assertIn("--out must be given", export("export", "--to", "speculators", "all", expect=2))
        without = served.run(PROMPTS[:2], name="without final", temperature=0, max_new_tokens=2, no_final=True)
        self.assertIn("--no-final", export("export", "--to", "speculators", without.id, "--out", self.out("g"), expect=2))

    def test_samples_without_a_target_are_named_and_no_rows(self):
        done = export("export", "--to", "speculators", "tokens", "--out", self.out("a"), "--json")
        self.assertEqual((done["rows"], done["left_out"]), (1, ["unsupervised"]))
        self.assertEqual(json.loads((self.out("a") / "statetap-export.json").read_text())["left_out"], ["unsupervised"])

    def test_rows_only(self):
        export("export", "--to", "speculators", "all", "--rows-only", "--out", self.out("a"))
        self.assertFalse((self.out("a") / "hidden_states").exists())
        self.assertTrue((self.out("a") / "token_freq.pt").exists())
        self.assertIn("--rows-only", export("export", "--to", "modelopt", "all", "--rows-only", "--out", self.out("b"), expect=2))

    def test_the_command_line_runs_the_package(self):
        os.environ["STATETAP_PYTHON"] = sys.executable
        told = served.cli("--json", "export", "--to", "speculators", "all", "--out", self.out("a"), "--draft-vocab", 64, "--taps", "2,5", "--where", 'source == "odd"')
        self.assertEqual((json.loads(told.stdout)["rows"], json.loads(told.stdout)["taps"]), (12, [2, 5]))
        self.assertTrue((self.out("a") / "d2t-64.npy").exists())
        served.cli("vocab-map", "all", "--draft-vocab", 10, "--draft-vocab", 20, "--report", "--out", self.out("b"))
        self.assertTrue((self.out("b") / "d2t-20.npy").exists() and (self.out("b") / "d2t-10.npy").exists())
        told = served.cli("--json", "stats", "--as", "speculators", self.out("a"), "--model", MODEL)
        self.assertEqual((json.loads(told.stdout)["files"], json.loads(told.stdout)["faults"]), (12, []))
        self.assertIn("goes with shards", served.cli("stats", "all", "--model", MODEL, expect=2).stderr)
        served.cli("export", "--to", "speculators", "nobody", "--out", self.out("c"), expect=1)
        self.assertIn("--where", served.cli("export", "--to", "speculators", "all", "--were", "x", expect=2).stderr)
        os.environ["STATETAP_PYTHON"] = "/nowhere/python3"
        self.assertIn("STATETAP_PYTHON", served.cli("export", "--to", "head", "--model", MODEL, "--out", self.out("d"), expect=1).stderr)
        del os.environ["STATETAP_PYTHON"]

    def test_the_endpoint_answers_as_speculators_file_backend_asks(self):
        with serving_endpoint(served, "all", self.out("states")) as (ready, ask):
            self.assertIn("rows=24", ready)
            self.assertEqual(ask("GET", "/v1/models")[1]["data"][0]["id"], "tiny")
            for truth in list(stored.values())[:4]:
                ids = truth["ids"].tolist()
                status, answer = ask("POST", "/v1/completions", completion(ids))
                self.assertEqual((status, answer["choices"][0]["prompt_token_ids"]), (200, ids))
                path = Path(answer["kv_transfer_params"]["hidden_states_path"])
                states, _ = read_tensor(path, "hidden_states")
                np.testing.assert_array_equal(statetap.float32(np.array(states[:, -1])), truth[LAYERS])
                self.assertEqual(read_tensor(path, "token_ids")[0].tolist(), ids)
                path.unlink()  # as the trainer does
            self.assertEqual([ask("POST", "/v1/completions", body)[0] for body in ('{"prompt": [1, 2]}', '{"prompt": "text"}', "{")], [404, 400, 400])
            self.assertEqual(ask("GET", "/v2")[0], 404)

    def foreign(self, folder, format="speculators"):
        result = subprocess.run([sys.executable, "-m", "statetap.foreign", folder, "--as", format, "--model", MODEL, "--json"], capture_output=True, text=True)
        return result.returncode, json.loads(result.stdout) if result.stdout else result.stderr

    def test_features_of_another_tool_are_told_apart(self):
        good = self.out("good")
        export("export", "--to", "speculators", "all", "--out", good)
        code, told = self.foreign(good)
        self.assertEqual((code, told["files"], told["post_norm"], told["faults"]), (0, 24, False, []))
        exact = np.concatenate([s.block for s in statetap.ShardDataset(job.shards_path)], 1)
        np.testing.assert_allclose(told["rms"], [np.sqrt((statetap.float32(b).astype(np.float64) ** 2).mean()) for b in exact], rtol=1e-6)
        self.assertEqual(self.foreign(good / "hidden_states", "vllm")[0], 0)

        def spoilt(name, change):
            folder = self.out(name)
            folder.mkdir()
            for path in sorted((good / "hidden_states").iterdir()):
                states, ids = np.array(read_tensor(path, "hidden_states")[0]), np.array(read_tensor(path, "token_ids")[0])
                states = change(states)
                write_safetensors(folder / path.name, {"hidden_states": Bf16(states), "token_ids": ids})
            code, told = self.foreign(folder)
            self.assertEqual(code, 1, name)
            return " ".join(told["faults"])

        def at(slot, values):
            def change(states):
                states[:, slot] = values(states)
                return states

            return change

        self.assertIn("behind the final norm", spoilt("normed", at(-1, lambda s: model.final_norm(s[:, -1]))))
        self.assertIn("tap 2 is zero at", spoilt("dead", at(1, lambda s: 0)))
        self.assertIn("tap 1 and tap 3 are equal in 24", spoilt("equal", at(2, lambda s: s[:, 0])))
        self.assertIn("the final state is not finite", spoilt("nan", at(-1, lambda s: 0x7FC0)))
        self.assertIn("rows for", spoilt("short", lambda s: s[:-1]))
        self.assertEqual(self.foreign(self.out("nothing"))[0], 2)

    def test_head(self):
        for flat, prefix in ((False, "language_model."), (True, "")):
            out = self.out(f"head{flat}")
            export("export", "--to", "head", "--model", MODEL, "--out", out, *(["--flat"] if flat else []))
            head = Checkpoint(out)
            for suffix in ("embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
                np.testing.assert_array_equal(head.bits(suffix), model.bits(suffix))
            self.assertEqual(head.name_of("lm_head.weight"), prefix + "lm_head.weight")
            self.assertNotIn("quantization_config", json.dumps(head.config))
            self.assertEqual(head.config["model_type"], "deepseek_v3" if flat else "kimi_k25")
            self.assertEqual(head.text["hidden_size"], HIDDEN)

    def test_torch_files_hold_what_unpicklers_are_allowed_to_run(self):
        export("export", "--to", "modelopt", "all", "--out", self.out("a"))
        held = members(self.out("a") / "00000000.pt")
        names = {argument for opcode, argument, _ in pickletools.genops(held["data.pkl"]) if opcode.name == "GLOBAL"}
        self.assertEqual(names, {"torch._utils _rebuild_tensor_v2", "torch LongStorage", "torch BFloat16Storage", "collections OrderedDict"})


if __name__ == "__main__":
    unittest.main()
