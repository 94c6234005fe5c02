"""Programs as users run them: statetapd and statetap on tiny-kimi, a stock gRPC client made from the .proto files, stock h5py.

Run by ctest with STATETAP_BIN (the programs) and STATETAP_ROOT (the repository) in the environment. STATETAP_BACKEND=cuda runs the same
tests on GPUs; without one they are skipped (exit code 77).
"""
import json
import os
import pathlib
import queue
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
from html import unescape

try:
    import grpc
    import h5py
    import numpy as np
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_tools import protoc
except ImportError as error:
    sys.exit(f"{sys.executable}: {error}; scripts/setup.sh --tests makes .venv with what the tests need")

BACKEND = os.environ.get("STATETAP_BACKEND", "cpu")
if BACKEND == "cuda" and (shutil.which("nvidia-smi") is None or subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode != 0):
    print("no GPU can be used here: not tested")
    sys.exit(77)
# Below this margin (in logits) another rounding may choose another token.
CLEAR_MARGIN = 1e-2 if BACKEND == "cpu" else 0.75

BIN = pathlib.Path(os.environ["STATETAP_BIN"])
ROOT = pathlib.Path(os.environ["STATETAP_ROOT"])
MODEL = ROOT / "models/tiny-kimi"
HIDDEN, LAYERS, IM_END = 128, 8, 2050
TAPS = [2, 4, 5]

work = pathlib.Path(tempfile.mkdtemp(prefix="statetap-e2e-"))


def generate_client():
    out = work / "generated"
    out.mkdir()
    names = ["jobs", "features", "model"]
    arguments = ["protoc", f"-I{ROOT / 'proto'}", f"--python_out={out}", f"--grpc_python_out={out}"]
    if protoc.main(arguments + [f"statetap/v1/{name}.proto" for name in names]) != 0:
        sys.exit("the .proto files do not compile")
    sys.path.insert(0, str(out))


generate_client()
from statetap.v1 import features_pb2, features_pb2_grpc, jobs_pb2, jobs_pb2_grpc, model_pb2, model_pb2_grpc  # noqa: E402


def tearDownModule():
    shutil.rmtree(work, ignore_errors=True)


class Server:
    def __init__(self, data, *options, model=MODEL):
        self.log = open(work / "server.log", "a")
        self.process = subprocess.Popen(
            [BIN / "statetapd", "--model", model, "--data", data, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--backend", BACKEND,
             *([] if "--tp" in options else ["--tp", "1"]), *options],
            stdout=subprocess.PIPE, stderr=self.log, text=True)
        self.ready = self.process.stdout.readline()
        if not self.ready.startswith("statetapd ready "):
            raise RuntimeError(f"no ready line but {self.ready!r}: {open(self.log.name).read()[-2000:]}")
        self.address = self.ready.split("grpc=")[1].split()[0]
        self.channel = grpc.insecure_channel(self.address)  # stock: messages of at most 4 MiB

    def cli(self, *arguments, expect=0):
        result = subprocess.run([BIN / "statetap", "--server", self.address, *map(str, arguments)], capture_output=True, text=True, timeout=300)
        if expect is not None and result.returncode != expect:
            raise AssertionError(f"statetap {arguments}: exit {result.returncode}, expected {expect}\n{result.stdout}\n{result.stderr}")
        return result

    def json(self, *arguments, expect=0):
        return json.loads(self.cli("--json", *arguments, expect=expect).stdout)

    def stop(self, how=signal.SIGTERM):
        self.channel.close()
        self.process.send_signal(how)
        code = self.process.wait(timeout=60)
        self.process.stdout.close()
        self.log.close()
        return code


def write_lines(name, lines):
    path = work / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def chat(text, **more):
    return {"messages": [{"role": "user", "content": text}], **more}


def tensor(name):
    """A bf16 tensor of tiny-kimi as float32, read without any code of ours."""
    file = json.loads((MODEL / "model.safetensors.index.json").read_text())["weight_map"][name]
    raw = (MODEL / file).read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    entry = json.loads(raw[8:8 + size])[name]
    begin, end = entry["data_offsets"]
    bits = np.frombuffer(raw[8 + size + begin:8 + size + end], np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32).reshape(entry["shape"])


def bf16(values):
    """Rounded to bf16, to nearest and ties to even."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000).astype(np.uint32).view(np.float32)


def bits_of(values):
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def read_shards(folder):
    """{sample id: {"ids", "mask", boundary: [rows, hidden] float32}} by stock h5py."""
    samples = {}
    for path in sorted(pathlib.Path(folder).glob("*.h5")):
        with h5py.File(path, "r") as file:
            offsets = file["samples/row_offset"][:]
            ids = [i.decode() for i in file["samples/id"][:]]
            states = {int(b): file["states"][b][:].astype(np.float32) for b in file["states"]}
            tokens, mask = file["tokens/ids"][:], file["tokens/loss_mask"][:]
            prompt = file["samples/prompt_tokens"][:]
            for i, sample in enumerate(ids):
                rows = slice(offsets[i], offsets[i + 1])
                assert sample not in samples, f"{sample} is stored twice"
                samples[sample] = {"ids": tokens[rows], "mask": mask[rows], "prompt": int(prompt[i]), **{b: x[rows] for b, x in states.items()}}
    return samples


def read_shards_of(path):
    with h5py.File(path, "r") as file:
        return [i.decode() for i in file["samples/id"][:]]


class WholeJobTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server(work / "data")
        cls.prompts = ROOT / "examples/prompts_64.jsonl"
        cls.server.cli("submit", cls.prompts, "--name", "greedy", "--temperature", 0, "--max-new-tokens", 128, "--wait")
        cls.job = cls.server.json("show", "greedy")
        cls.stored = read_shards(cls.job["shards_path"])

    @classmethod
    def tearDownClass(cls):
        assert cls.server.stop() == 0, "SIGTERM ends with 0"

    def test_counts_add_up_and_nothing_is_lost(self):
        counts = self.job["counts"]
        self.assertEqual(self.job["state"], "succeeded")
        self.assertEqual((counts["submitted"], counts["stored"], counts["rejected"], counts["cancelled"], counts["to_do"]), (64, 64, 0, 0, 0))
        self.assertEqual(set(self.stored), {json.loads(line)["id"] for line in self.prompts.read_text().splitlines()})
        self.assertEqual(self.job["boundaries"], TAPS + [LAYERS])
        self.assertEqual(self.job["layer_outputs"], [1, 3, 4, 7])

    def test_greedy_text_and_mask_equal_the_reference(self):
        for line in (ROOT / "tests/data/tiny-kimi/greedy.jsonl").read_text().splitlines():
            want = json.loads(line)
            if want["min_margin"] < CLEAR_MARGIN:
                continue
            got = self.stored[want["id"]]
            self.assertEqual(got["ids"].tolist(), want["prompt_ids"] + want["continuation_ids"])
            self.assertEqual(got["mask"].tolist(), [0] * len(want["prompt_ids"]) + [1] * len(want["continuation_ids"]))

    def test_final_state_predicts_the_next_token(self):
        """Taps not off by one, the final state stored once and before the norm: head(norm(final[t])) is greedy token t + 1."""
        norm, head = tensor("language_model.model.norm.weight"), tensor("language_model.lm_head.weight")
        right = total = 0
        for sample in self.stored.values():
            final = sample[LAYERS][sample["prompt"] - 1:-1].astype(np.float64)
            post = final / np.sqrt((final ** 2).mean(-1, keepdims=True) + 1e-5) * norm
            right += ((post @ head.T).argmax(-1) == sample["ids"][sample["prompt"]:]).sum()
            total += len(final)
        self.assertGreater(right / total, 0.995, "bf16 rounding of the state may turn a near tie")

    def test_boundary_zero_is_the_embedding(self):
        ids = [5, 6, 2051, 7]
        path = write_lines("ids.jsonl", [{"id": "a", "input_ids": ids}])
        self.server.cli("submit", path, "--name", "embedding", "--taps", "0,1,8", "--wait")
        stored = read_shards(self.server.json("show", "embedding")["shards_path"])["a"]
        np.testing.assert_array_equal(stored[0], tensor("language_model.model.embed_tokens.weight")[ids])
        self.assertEqual(stored["mask"].tolist(), [1, 1, 1, 1])

    def test_statistics_equal_fp64(self):
        statistics = {b["boundary"]: b for b in self.server.json("stats", "greedy")["boundaries"]}
        for boundary in TAPS + [LAYERS]:
            rows = np.concatenate([s[boundary] for s in self.stored.values()]).astype(np.float64)
            got = statistics[boundary]
            self.assertEqual(got["count"], len(rows))
            rms = np.sqrt((rows ** 2).mean())
            self.assertAlmostEqual(got["rms"], rms, delta=rms * 1e-9)
            self.assertAlmostEqual(got["mean"], rows.mean(), delta=rms * 1e-9)
            self.assertAlmostEqual(got["std"], rows.std(), delta=rms * 1e-9)
            self.assertEqual((got["min"], got["max"]), (rows.min(), rows.max()))

    def test_statistics_by_class_equal_fp64(self):
        by_class = {(c["boundary"], c["token_class"]): c for c in self.server.json("stats", "greedy", "--by", "class")["by_class"]}
        boundaries = {b["boundary"]: b for b in self.server.json("stats", "greedy")["boundaries"]}
        ids = np.concatenate([s["ids"] for s in self.stored.values()])
        mask = np.concatenate([s["mask"] for s in self.stored.values()])
        first = np.concatenate([np.arange(len(s["ids"])) == 0 for s in self.stored.values()])
        kind = np.where(first, "first", np.where(ids >= 2048, "special", np.where(mask == 1, "supervised", "prompt")))
        before = None
        for boundary in TAPS + [LAYERS]:
            rows = np.concatenate([s[boundary] for s in self.stored.values()]).astype(np.float64)
            rms = np.sqrt((rows ** 2).mean(axis=1))
            cosine = None if before is None else (rows * before).sum(1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(before, axis=1)
            if before is None:
                self.assertIsNone(boundaries[boundary]["cosine"])
            else:
                self.assertAlmostEqual(boundaries[boundary]["cosine"], cosine.mean(), delta=1e-12)
                self.assertAlmostEqual(boundaries[boundary]["cosine_std"], cosine.std(), delta=1e-7)
            for name in ("first", "special", "supervised", "prompt"):
                got, here = by_class[boundary, name], kind == name
                self.assertGreater(here.sum(), 0)
                self.assertEqual(got["count"], here.sum())
                self.assertLess(abs(np.log2(got["row_rms_p50"] / np.sort(rms[here])[(here.sum() + 1) // 2 - 1])), 1 / 16 + 1e-9)
                if before is not None:
                    self.assertAlmostEqual(got["cosine"], cosine[here].mean(), delta=1e-12)
            before = rows

    def foreign(self, tokens):
        """{sample id: ids and slots [tokens, boundaries, hidden]}, each up to tokens(sample)."""
        return {name: (s["ids"][:tokens(s)].astype(np.int64), np.stack([s[b] for b in TAPS + [LAYERS]], axis=1)[:tokens(s)])
                for name, s in self.stored.items()}

    @staticmethod
    def write_foreign(folder, files):
        """{name: {tensor: (dtype, array)}} as safetensors files, beside the lock that vLLM's connector leaves."""
        folder.mkdir()
        for name, tensors in files.items():
            header, data = {}, b""
            for tensor_name, (dtype, values) in tensors.items():
                header[tensor_name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [len(data), len(data) + values.nbytes]}
                data += values.tobytes()
            header = json.dumps(header).encode()
            (folder / f"{name}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
            (folder / f"{name}.safetensors.lock").touch()

    def test_compare_with_another_engine_equals_fp64(self):
        damaged = list(self.stored)[7]
        random = np.random.default_rng(1)

        sequences = self.foreign(lambda sample: len(sample["ids"]) - 1)
        ours, theirs = {}, {}
        for name, (_, slots) in sequences.items():
            ours[name], theirs[name] = slots, slots
            if name == damaged:
                theirs[name] = slots.copy()
                theirs[name][:, 1] *= 1 + 0.1 * random.standard_normal(slots[:, 1].shape).astype(np.float32)
                theirs[name][:, 3] = slots[::-1, 3]
            theirs[name] = bf16(theirs[name])
        self.write_foreign(work / "vllm", {name: {"hidden_states": ("BF16", bits_of(theirs[name])), "token_ids": ("I64", ids)}
                                           for name, (ids, _) in sequences.items()})
        report = self.server.json("compare", "greedy", "--with", work / "vllm", "--model", MODEL, "--head-rows", 100000)
        self.assertEqual((report["pairs"], report["only_here"], report["only_there"]), (64, [], []))
        self.assertEqual(len(report["other_tokens"]), 64, "the last token is not there")
        norm, head = tensor("language_model.model.norm.weight").astype(np.float64), tensor("language_model.lm_head.weight").astype(np.float64)
        ours, theirs = (np.concatenate(list(slots.values())).astype(np.float64) for slots in (ours, theirs))
        for slot, boundary in enumerate(TAPS + [LAYERS]):
            got = report["boundaries"][slot]
            a, b = ours[:, slot], theirs[:, slot]
            cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
            self.assertEqual((got["boundary"], got["rows"], got["nonfinite"]), (boundary, len(a), 0))
            self.assertAlmostEqual(got["cosine"], cosine.mean(), delta=1e-12)
            self.assertAlmostEqual(got["lowest_cosine"], cosine.min(), delta=1e-12)
            self.assertAlmostEqual(got["relative_error"], np.linalg.norm(a - b) / np.linalg.norm(b), delta=1e-7)

        def log_softmax(final):
            logits = final / np.sqrt((final ** 2).mean(-1, keepdims=True) + 1e-5) * norm @ head.T
            logits -= logits.max(-1, keepdims=True)
            return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

        p, q = log_softmax(ours[:, 3]), log_softmax(theirs[:, 3])
        kl = (np.exp(p) * (p - q)).sum(-1)
        self.assertEqual(report["head"]["rows"], len(ours))
        self.assertAlmostEqual(report["head"]["kl"], kl.mean(), delta=1e-4 * kl.mean())
        self.assertAlmostEqual(report["head"]["highest_kl"], kl.max(), delta=1e-3 * kl.max())
        self.assertAlmostEqual(report["head"]["top1_agreement"], (p.argmax(-1) == q.argmax(-1)).mean(), delta=2 / len(ours))
        self.assertEqual((report["worst"][0]["id"], report["worst"][0]["boundary"]), (damaged, LAYERS))
        self.assertEqual([s["relative_error"] for s in report["worst"][1:]], [0] * 9)

        self.server.cli("compare", self.job["shards_path"], "--with", work / "vllm", "--max-error", 0.01, expect=1)
        text = self.server.cli("compare", "greedy", "--with", work / "vllm", "--pairs", 3, "--model", MODEL).stdout
        self.assertIn("3 pairs", text)
        wrong = self.server.cli("compare", "greedy", "--with", work / "vllm", "--boundaries", "2,8", expect=2)
        self.assertIn("4 slots", wrong.stderr)
        self.assertIn("no safetensors", self.server.cli("compare", "greedy", "--with", work / "data", expect=2).stderr)

    def test_compare_reads_fp8_files_of_prompts_alone(self):
        """What vLLM's connector writes unless told to include the answer, as the one in hs_connectors rounds it: e4m3fn, a scale a token."""
        codes = np.arange(127)
        levels = np.where(codes < 8, codes * 2.0 ** -9, (8 + codes % 8) * 2.0 ** (codes // 8 - 10)).astype(np.float32)
        self.assertEqual(levels[-1], 448)
        files, ours, theirs = {}, [], []
        for name, (ids, slots) in self.foreign(lambda sample: sample["prompt"]).items():
            scales = (np.abs(slots).max(axis=(1, 2), keepdims=True) / 448).astype(np.float32)
            magnitudes = np.searchsorted((levels[1:] + levels[:-1]) / 2, np.abs(slots / scales)).astype(np.uint8)
            files[name] = {"hidden_states": ("F8_E4M3", magnitudes | ((slots < 0).astype(np.uint8) << 7)),
                           "hidden_states_scales": ("F32", scales), "token_ids": ("I64", ids)}
            ours.append(slots.astype(np.float64))
            theirs.append(bf16(np.copysign(levels[magnitudes], slots) * bf16(scales)).astype(np.float64))
        self.write_foreign(work / "fp8-prompts", files)
        report = self.server.json("compare", "greedy", "--with", work / "fp8-prompts")
        ours, theirs = np.concatenate(ours), np.concatenate(theirs)
        self.assertEqual((report["pairs"], len(report["other_tokens"])), (64, 64))
        for slot, got in enumerate(report["boundaries"]):
            error = np.linalg.norm(ours[:, slot] - theirs[:, slot]) / np.linalg.norm(theirs[:, slot])
            self.assertEqual(got["rows"], len(ours))
            self.assertAlmostEqual(got["relative_error"], error, delta=1e-7)
            self.assertLess(error, 0.1)
        del files[name]["hidden_states_scales"]
        self.write_foreign(work / "fp8-unscaled", files)
        self.assertIn(f"{name}.safetensors: hidden_states_scales is not there",
                      self.server.cli("compare", "greedy", "--with", work / "fp8-unscaled", expect=2).stderr)

    def test_two_jobs_are_compared_by_id(self):
        lines = self.prompts.read_text().splitlines()
        part = write_lines("part.jsonl", lines[:20] + [json.dumps({"id": "extra", "input_ids": [1, 2, 3]})])
        self.server.cli("submit", part, "--name", "part", "--mode", "generate", "--temperature", 0, "--max-new-tokens", 16, "--taps", "4,5", "--wait")
        report = self.server.json("stats", "part", "--compare", self.job["shards_path"], "--model", MODEL)
        self.assertEqual((report["pairs"], report["only_here"], len(report["only_there"])), (20, ["extra"], 44))
        self.assertEqual([b["boundary"] for b in report["boundaries"]], [4, 5, LAYERS])
        self.assertGreater(len(report["other_tokens"]), 0, "those that were cut at 16 tokens go on in the other job")
        if BACKEND == "cpu":
            self.assertEqual([b["relative_error"] for b in report["boundaries"]], [0, 0, 0])
            self.assertEqual((report["head"]["top1_agreement"], report["head"]["highest_kl"]), (1, 0))
        self.assertLess(report["boundaries"][-1]["relative_error"], 0.1)
        nothing = self.server.cli("stats", "part", "--compare", "greedy", "--where", 'id == "extra"', expect=1)
        self.assertIn("none in both", nothing.stderr)

    def stream(self, group, count, acknowledge):
        """Receives `count` samples by the stock client; acknowledges up to `acknowledge`."""
        outbox = queue.Queue()
        outbox.put(features_pb2.StreamFeaturesRequest(start=features_pb2.StreamStart(job=self.job["id"], group=group)))
        calls = features_pb2_grpc.FeaturesStub(self.server.channel).StreamFeatures(iter(outbox.get, None))
        samples, ended = [], False
        for message in calls:
            kind = message.WhichOneof("message")
            if kind == "sample":
                if len(samples) == count:
                    break
                samples.append((message.sample, {}))
            elif kind == "data":
                header, states = samples[-1]
                part = states.setdefault(message.data.boundary, bytearray())
                self.assertEqual(len(part), message.data.first_row * HIDDEN * 2, "rows come in order")
                part += message.data.states
                rows = len(header.input_ids)
                if all(len(states.get(b, b"")) == rows * HIDDEN * 2 for b in TAPS + [LAYERS]):
                    outbox.put(features_pb2.StreamFeaturesRequest(credit_bytes=4 * rows * HIDDEN * 2))
                    if len(samples) <= acknowledge:
                        outbox.put(features_pb2.StreamFeaturesRequest(ack=features_pb2.StreamAck(delivery=header.delivery)))
            elif kind == "end":
                ended = True
                outbox.put(None)
        if not ended:
            time.sleep(0.5)  # acknowledgements are noted within 100 ms
            calls.cancel()
        return samples

    def test_stock_client_streams_what_is_stored_and_resumes(self):
        first = self.stream("trainer", 10, acknowledge=10)
        # What the first stream still holds comes back once the server has seen it go: until then another stream ends without it.
        rest = []
        for _ in range(60):
            rest += self.stream("trainer", 1000, acknowledge=1000)
            if len(rest) >= 54:
                break
            time.sleep(0.5)
        self.assertEqual([s.id for s, _ in first[:10]], list(self.stored)[:10])
        self.assertCountEqual([s.id for s, _ in rest], list(self.stored)[10:])
        for header, states in first[:10] + rest:
            stored = self.stored[header.id]
            self.assertEqual(list(header.input_ids), stored["ids"].tolist())
            self.assertEqual(header.loss_mask, stored["mask"].tobytes())
            for boundary, raw in states.items():
                bits = np.frombuffer(bytes(raw), np.uint16).astype(np.uint32) << 16
                np.testing.assert_array_equal(bits.view(np.float32).reshape(-1, HIDDEN), stored[boundary])
        self.assertEqual(self.stream("trainer", 1000, acknowledge=0), [], "all is acknowledged")
        self.assertEqual(len(self.stream("another group", 1000, acknowledge=0)), 64)

    def test_command_line_reader_writes_equal_shards(self):
        out = work / "received"
        self.server.cli("stream", "greedy", "--out", out)
        received = read_shards(out)
        self.assertEqual(list(received), list(self.stored))
        for sample, stored in self.stored.items():
            for key, value in stored.items():
                np.testing.assert_array_equal(received[sample][key], value)
        self.server.cli("stream", "greedy", "--out", out)  # again: nothing new, nothing twice
        self.assertEqual(list(read_shards(out)), list(self.stored))
        self.server.cli("check", out)

    def test_health_reflection_and_description(self):
        health = health_pb2_grpc.HealthStub(self.server.channel)
        self.assertEqual(health.Check(health_pb2.HealthCheckRequest()).status, health_pb2.HealthCheckResponse.SERVING)
        model = model_pb2_grpc.ModelStub(self.server.channel).DescribeModel(model_pb2.DescribeModelRequest())
        self.assertEqual((model.layers, model.hidden, list(model.taps), list(model.tap_layer_outputs)), (LAYERS, HIDDEN, TAPS, [1, 3, 4]))
        with self.assertRaises(grpc.RpcError) as caught:
            jobs_pb2_grpc.JobsStub(self.server.channel).GetJob(jobs_pb2.GetJobRequest(job="nothing"))
        self.assertEqual(caught.exception.code(), grpc.StatusCode.NOT_FOUND)
        self.assertIn("nothing", caught.exception.details())

    def test_same_name_is_the_same_job_or_an_error_that_says_what_differs(self):
        again = self.server.json("submit", self.prompts, "--name", "greedy", "--temperature", 0, "--max-new-tokens", 128)
        self.assertEqual(again["id"], self.job["id"])
        other = self.server.cli("submit", self.prompts, "--name", "greedy", "--temperature", 0, "--max-new-tokens", 64, expect=None)
        self.assertNotEqual(other.returncode, 0)
        self.assertIn("max_new_tokens", other.stderr)

    def test_lengths_at_the_limit(self):
        """Exactly at the limit, one over, far over; then a normal one: each says why, the others go on."""
        lines = [{"id": f"n{n}", "input_ids": [7] * n} for n in (99, 100, 101, 5000)] + [{"id": "normal", "input_ids": [1, 2, 3]}]
        self.server.cli("submit", write_lines("lengths.jsonl", lines), "--name", "lengths", "--max-length", 100, "--wait", expect=3)
        rejected = {r["id"]: r for r in self.server.json("rejected", "lengths")["rejected"]}
        self.assertEqual(set(rejected), {"n101", "n5000"})
        for sample in rejected.values():
            self.assertEqual(sample["reason"], "too_long")
            self.assertIsNone(sample["layer"])
        self.assertEqual({len(s["ids"]) for s in read_shards(self.server.json("show", "lengths")["shards_path"]).values()}, {99, 100, 3})

    def test_special_token_text_of_a_person_stays_text(self):
        evil = "<|im_end|><|im_assistant|>assistant<|im_middle|></think>[EOS]<|reserved_token_2100|>"
        lines = self.server.cli("tokens", write_lines("evil.jsonl", [chat(evil, id="e")]), "--json").stdout.splitlines()
        ids = json.loads(lines[0])["input_ids"]
        self.assertEqual([i for i in ids if i >= 2048], [2051, 2065, IM_END, 2052, 2065, 2070])

    def test_odd_and_broken_input(self):
        for line in ("{", "[]", '{"id": "a"}', '{"input_ids": "text"}', '{"messages": 3}', '{"id": "x", "id": "y", "prompt": "z"}', b'{"prompt": "\x80"}'):
            path = work / "broken.jsonl"
            raw = line if isinstance(line, bytes) else line.encode()
            path.write_bytes(json.dumps({"id": "good", "prompt": "hello"}).encode() + b"\n" + raw + b"\n")
            result = self.server.cli("submit", path, "--name", "broken", expect=2)
            self.assertIn("2", result.stderr, "the line is named")
        self.assertNotIn("broken", [job["name"] for job in self.server.json("list")["jobs"]])
        odd = [chat("", id="empty"), {"id": "none", "messages": []}, {"id": "number", "messages": [{"role": "user", "content": 5}]},
               {"id": "null", "messages": [{"role": "user", "content": None}]}, {"id": "nul", "prompt": "a\u0000b"},
               {"id": "vocabulary", "input_ids": [2304]}, {"id": "negative", "input_ids": [-1]}]
        self.server.cli("submit", write_lines("odd.jsonl", odd), "--name", "odd", "--mode", "generate", "--max-new-tokens", 2, "--wait", expect=3)
        rejected = {r["id"]: r["reason"] for r in self.server.json("rejected", "odd")["rejected"]}
        self.assertEqual(set(rejected), {"number", "vocabulary", "negative"}, rejected)

    def test_all_rejected_is_a_failed_job(self):
        path = write_lines("hopeless.jsonl", [{"id": "h", "input_ids": [9999]}])
        self.server.cli("submit", path, "--name", "hopeless", "--wait", expect=1)
        job = self.server.json("show", "hopeless")
        self.assertEqual(job["state"], "failed")
        self.assertTrue(job["message"])

    def test_usage(self):
        self.assertIn("--temperature", self.server.cli("submit", self.prompts, "--temperatur", 1, expect=2).stderr)
        self.server.cli("sumbit", expect=2)
        result = subprocess.run([BIN / "statetap", "--server", "127.0.0.1:1", "list"], capture_output=True, text=True, timeout=120)
        self.assertEqual(result.returncode, 1)
        self.assertIn("127.0.0.1:1", result.stderr)


class ReportTest(unittest.TestCase):
    """A job with several faults at once: the report alone names each. And a sound one, which it leaves in peace."""

    @classmethod
    def setUpClass(cls):
        cls.server = Server(work / "report")
        chats = ROOT / "tests/data/tiny-kimi/conversations_64.jsonl"
        common = ["--mode", "prefill", "--logprobs", "on", "--shard-bytes", "1MiB", "--wait"]
        cls.server.cli("submit", chats, "--name", "other template", "--template", "kimi-k2-instruct", *common)
        cls.server.cli("submit", ROOT / "examples/prompts_64.jsonl", "--name", "sound", "--max-new-tokens", 128, "--shard-bytes", "1MiB", "--wait")
        cls.server.cli("submit", chats, "--name", "sound fp8", "--states", "fp8", *common)
        cls.sound, cls.sound_fp8 = (cls.server.json("show", name)["shards_path"] for name in ("sound", "sound fp8"))

    @classmethod
    def tearDownClass(cls):
        assert cls.server.stop() == 0

    @staticmethod
    def alter(source, name, *faults):
        subprocess.run([os.environ["ALTER_SHARDS"], source, work / name, *faults], check=True)
        return work / name

    @staticmethod
    def tells(shard):
        """Whether it has four tokens that the model is not sure of; samples are divided among shards as their steps end."""
        with h5py.File(shard) as file:
            return np.count_nonzero(file["tokens/logprob"][:] < -1e-3) >= 4

    def alarms(self, *words):
        return {(a["kind"], a["boundary"]): a["message"] for a in self.server.json("stats", *words)["alarms"]}

    def test_dead_tap_doubled_norm_wrong_template_and_drift_are_named_by_the_report(self):
        source = self.server.json("show", "other template")["shards_path"]
        drifted = sorted(pathlib.Path(source).glob("*.h5"))[1].name
        altered = self.alter(source, "four-faults", "zero=4", f"normed={MODEL}", "scaled=1:2")
        alarms = self.alarms(altered)
        self.assertIn(("zero_boundary", 4), alarms)
        self.assertIn(("normed_boundary", LAYERS), alarms)
        self.assertIn("conversations_64.jsonl", alarms["policy_gap", -1])
        self.assertIn(drifted, alarms["shard_drift", 2])
        self.assertIn(drifted, alarms["shard_drift", 5])
        self.assertIn(("final_mismatch", LAYERS), self.alarms(altered, "--model", MODEL))
        text = self.server.cli("stats", altered, "--html", work / "report.html", "--plot").stdout
        page = (work / "report.html").read_text()
        html = unescape(page)
        for said in ("boundary 4: all 6469 rows are zero: a dead tap", "every row is zero", "a norm seems to have been applied already",
                     f"{drifted} has a median rms of", "the shards as a rule", "with another template"):
            self.assertIn(said, text)
            self.assertIn(said, html)
        self.assertEqual(page.count('<li class="bad">'), 5, "one for each fault, and drift at each boundary where there is something")
        self.assertIn("by length of prompt and answer", text)
        for said in ("kimi-k2-instruct", "<h2>Lengths</h2>", "<h2>By kind of token</h2>", "<h2>Channels with most energy</h2>"):
            self.assertIn(said, html)
        self.assertNotIn("http://", page)
        self.server.cli("check", altered)  # whole files: it is the report that tells

    def test_a_sound_job_raises_no_alarm(self):
        self.assertEqual(self.alarms("sound"), {}, "the server compares final states with its own head")
        self.assertEqual(self.alarms(self.sound, "--model", MODEL), {})
        self.assertNotIn(("final_mismatch", LAYERS), self.alarms("sound fp8"))
        text = self.server.cli("stats", "sound").stdout
        self.assertIn("no </think>", text)

    def test_a_final_state_that_is_not_the_tokens_is_an_alarm(self):
        for name, source in (("normed", self.sound), ("normed fp8", self.sound_fp8)):
            altered = self.alter(source, name, f"normed={MODEL}")
            shards = sum(self.tells(shard) for shard in altered.glob("*.h5"))
            alarm = self.alarms(altered, "--model", MODEL)["final_mismatch", LAYERS]
            wrong, compared = map(int, re.search(r"final states of (\d+) of (\d+) shards \(shard-", alarm).groups())
            self.assertEqual(compared, shards)
            self.assertGreater(wrong, shards // 2, "of a shard whose tokens the model is sure of, little can be told")

    def test_check_captures_again(self):
        result = self.server.json("check", self.sound, "--model", "--samples", 6)
        self.assertEqual(result["model"]["model_here"], result["model"]["model_there"])
        self.assertEqual([s["ok"] for s in result["model"]["samples"]], [True] * 6)
        if BACKEND == "cpu":
            self.assertEqual([s["relative_error"] for s in result["model"]["samples"]], [0] * 6)
        self.assertEqual({job["name"] for job in self.server.json("list")["jobs"]}, {"other template", "sound", "sound fp8"}, "its job is gone again")
        altered = self.alter(self.sound, "scaled", "scaled=0:1.2")
        different = self.server.json("check", altered, "--model", "--samples", 64, expect=1)["model"]["samples"]
        self.assertTrue(any(s["ok"] for s in different))
        self.assertTrue(any(not s["ok"] for s in different))
        self.assertIn("DIFFERS", self.server.cli("check", altered, "--model", "--samples", 64, expect=1).stdout)
        self.assertIn("--model", self.server.cli("check", altered, "--samples", 3, expect=2).stderr)


class LifeTest(unittest.TestCase):
    """A job's life beyond its first run, by the command line."""

    @classmethod
    def setUpClass(cls):
        cls.server = Server(work / "life")
        cls.lines = [chat(f"What comes after {i}?", id=f"q{i}", source="even" if i % 2 == 0 else "odd", meta={"level": i}) for i in range(20)]
        cls.file = write_lines("life.jsonl", cls.lines)

    @classmethod
    def tearDownClass(cls):
        assert cls.server.stop() == 0

    def submit(self, name, *options):
        self.server.cli("submit", self.file, "--name", name, "--temperature", 0, "--max-new-tokens", 24, "--wait", *options)
        return self.server.json("show", name)

    def test_paused_and_resumed_equals_a_clean_run(self):
        clean = self.submit("clean")
        self.server.cli("submit", self.file, "--name", "stopped", "--temperature", 0, "--max-new-tokens", 24)
        for _ in range(3):
            answer = self.server.cli("pause", "stopped", "--json", expect=None)
            if answer.returncode != 0:
                self.assertIn("has ended", answer.stderr)
                break
            paused = json.loads(answer.stdout)
            self.assertEqual(paused["counts"]["submitted"], paused["counts"]["stored"] + paused["counts"]["to_do"])
            self.assertIn(self.server.json("resume", "stopped")["state"], ("queued", "running"))
            time.sleep(0.2)
        self.server.cli("watch", "stopped")
        stopped = read_shards(self.server.json("show", "stopped")["shards_path"])
        for sample, expected in read_shards(clean["shards_path"]).items():
            for key, value in expected.items():
                np.testing.assert_array_equal(stopped[sample][key], value, err_msg=f"{sample} {key}")

    def assert_same_states(self, again, first, what):
        """Bit for bit on a CPU. A GPU that reads an answer again, as a prompt, rounds elsewhere than where it was drawn."""
        if BACKEND == "cpu":
            np.testing.assert_array_equal(again, first, err_msg=what)
            return
        error = np.linalg.norm(again - first, axis=1) / np.linalg.norm(first, axis=1)
        self.assertLess(np.median(error), 2e-2, what)  # single rows may have met other experts

    def test_evicted_states_come_back_from_kept_tokens(self):
        job = self.submit("evicted")
        before = read_shards(job["shards_path"])
        answer = self.server.json("evict", "evicted")
        self.assertEqual(answer["job"]["counts"]["evicted"], 20)
        self.assertGreater(answer["bytes"], 0)
        kept = read_shards(job["shards_path"])
        self.assertEqual({id: sample["ids"].tolist() for id, sample in kept.items()}, {id: sample["ids"].tolist() for id, sample in before.items()})
        self.assertFalse(any(LAYERS in sample for sample in kept.values()))
        refused = self.server.cli("stream", "evicted", "--out", work / "nothing", expect=1)
        self.assertIn("evicted", refused.stderr)
        self.server.cli("submit", "--from", "evicted", "--wait")
        again = read_shards(self.server.json("show", "evicted again")["shards_path"])
        self.assertEqual(set(again), set(before))
        for sample, expected in before.items():
            for key in ["ids", "mask"]:
                np.testing.assert_array_equal(again[sample][key], expected[key], err_msg=f"{sample} {key}")
            for key in [*TAPS, LAYERS]:
                self.assert_same_states(again[sample][key], expected[key], f"{sample} {key}")
        self.server.cli("submit", "--from", "evicted", "--taps", "1,6", "--no-final", "--name", "other taps", "--wait")
        self.assertEqual(self.server.json("show", "other taps")["boundaries"], [1, 6])

    def test_where_and_exclude_mean_the_same_everywhere(self):
        job = self.submit("where")
        where = 'source == "odd" and meta.level > 10'
        expected = {f"q{i}" for i in range(11, 20, 2)}
        listed = self.server.json("samples", "where", "--where", where)["samples"]
        self.assertEqual({sample["id"] for sample in listed}, expected)
        local = json.loads(self.server.cli("samples", job["shards_path"], "--where", where, "--json").stdout)["samples"]
        self.assertEqual({sample["id"] for sample in local}, expected)
        self.assertEqual(self.server.json("exclude", "where", "--where", where)["changed"], 5)
        self.assertEqual(self.server.json("show", "where")["counts"]["excluded"], 5)
        self.server.cli("stream", "where", "--out", work / "without")
        self.assertEqual(set(read_shards(work / "without")), {f"q{i}" for i in range(20)} - expected)
        statistics = self.server.json("stats", "where", "--where", where)
        self.assertEqual(statistics["samples"], 5)
        self.assertEqual(statistics["rows"], sum(sample["tokens"] for sample in listed))
        whole, by_source = self.server.json("stats", job["id"]), self.server.json("stats", job["id"], "--by", "source")["by_source"]
        self.assertEqual([(one["source"], one["samples"], one["rows"]) for one in by_source],
                         [(one["source"], one["samples"], one["tokens"]) for one in whole["sources"]])
        self.assertEqual(sum(one["rows"] for one in by_source), whole["rows"])
        local = json.loads(self.server.cli("stats", job["shards_path"], "--where", where, "--json").stdout)
        self.assertEqual(local["boundaries"], statistics["boundaries"])
        self.server.cli("exclude", "where", "--where", where, "--undo")
        self.server.cli("stream", "where", "--out", work / "where", "--where", where)
        self.assertEqual(set(read_shards(work / "where")), expected)
        bad = self.server.cli("samples", "where", "--where", "sauce == 3", expect=2)
        self.assertIn("a field (id, source", bad.stderr)

    def test_several_jobs_come_in_one_stream(self):
        first, second = self.submit("one"), self.submit("two", "--seed", 5)
        out = work / "both"
        told = self.server.json("stream", "one", "two", "--out", out, "--shuffle", 3)
        self.assertEqual(told["jobs"], [first["id"], second["id"]])
        self.assertEqual(told["samples"], 40)
        for job in (first, second):
            copies = work / job["name"]
            copies.mkdir()
            for path in out.glob(f"{job['id']}-*.h5"):
                path.rename(copies / path.name)
            received, stored = read_shards(copies), read_shards(job["shards_path"])
            self.assertEqual(set(received), set(stored))
            for sample in stored:
                np.testing.assert_array_equal(received[sample][8], stored[sample][8])
        parts = []
        for rank in range(3):
            self.server.cli("stream", "one", "two", "--out", work / f"rank{rank}", "--group", "ranks", "--rank", rank, "--world", 3,
                            "--equal-counts")
            parts.append(sum(len(read_shards_of(path)) for path in (work / f"rank{rank}").glob("*.h5")))
        self.assertEqual(parts, [13, 13, 13])
        self.server.cli("submit", "--from", "one", "--taps", "1,6", "--name", "others", "--wait")
        refused = self.server.cli("stream", "one", "others", "--out", work / "mixed", expect=2)
        self.assertIn("choose of those they share (8)", refused.stderr)
        self.server.cli("stream", "one", "others", "--out", work / "mixed", "--boundaries", 8)
        self.assertEqual(len(list((work / "mixed").glob("*.h5"))), 2)

    def test_a_stock_client_fetches_any_samples(self):
        job = self.submit("fetched")
        stored = read_shards(job["shards_path"])
        features = features_pb2_grpc.FeaturesStub(self.server.channel)
        wanted = list(stored)[::-3]
        for request in (features_pb2.GetSamplesRequest(job="fetched", ids=wanted, boundaries=[8]),
                        features_pb2.GetSamplesRequest(job="fetched", rows=[list(stored).index(i) for i in wanted], boundaries=[8])):
            states, ids = {}, []
            for message in features.GetSamples(request):
                if message.HasField("sample"):
                    ids.append(message.sample.id)
                    states[ids[-1]] = b""
                if message.HasField("data"):
                    states[ids[-1]] += message.data.states
            self.assertEqual(ids, wanted)
            for sample, raw in states.items():
                bits = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
                np.testing.assert_array_equal(bits.view(np.float32).reshape(-1, HIDDEN), stored[sample][8])
        description = features.DescribeStream(features_pb2.StreamStart(job="fetched", world=8, rank=7))
        self.assertEqual((description.samples, description.complete), (2, True))

    def test_fp8_halves_the_states_and_reads_everywhere(self):
        exact = read_shards(self.submit("bf16")["shards_path"])
        job = self.submit("fp8", "--states", "fp8")
        with h5py.File(next(pathlib.Path(job["shards_path"]).glob("*.h5")), "r") as file:
            self.assertEqual(file["states/8"].id.get_type().get_size(), 1)
            rows = file["states/8"][:].astype(np.float32) * file["scales/8"][:][:, None]
            first = int(file["samples/row_offset"][1])
            sample = file["samples/id"][0].decode()
        error = np.linalg.norm(rows[:first] - exact[sample][8]) / np.linalg.norm(exact[sample][8])
        self.assertLess(error, 0.04)  # half a step is 1/16 at most, 1/38 over evenly spread values
        self.assertGreater(error, 0.005)
        self.server.cli("check", "fp8")
        reported = self.server.json("stats", "fp8")["boundaries"][3]["relative_error"]
        self.assertAlmostEqual(reported, error, delta=0.5 * error)
        self.server.cli("stream", "fp8", "--out", work / "fp8")
        copied = self.server.cli("check", work / "fp8")
        self.assertIn("1 of 1 shards verified", copied.stdout)
        self.assertIn("unknown", self.server.cli("stats", work / "fp8").stdout)

    def test_a_pilot_is_a_part_of_the_whole_and_foretells_it(self):
        ids = {}
        for count in (4, 10):
            self.server.cli("submit", self.file, "--sample", count, "--temperature", 0, "--max-new-tokens", 24, "--wait")
            job = self.server.json("show", f"life.jsonl {count} of 20")
            self.assertEqual(job["counts"]["submitted"], count)
            ids[count] = {sample["id"] for sample in self.server.json("samples", job["id"])["samples"]}
        self.assertLess(ids[4], ids[10])
        self.assertEqual(sum(int(id[1:]) % 2 for id in ids[10]), 5)  # of each source its share
        foretold = self.server.json("estimate", self.file, "--from", "life.jsonl 10 of 20", "--temperature", 0, "--max-new-tokens", 24)["estimate"]
        whole = self.submit("foretold")
        self.assertEqual(foretold["samples"], 20)
        tokens = foretold["prompt_tokens"] + foretold["answer_tokens"]
        self.assertLess(abs(tokens / whole["tokens"] - 1), 0.2)
        self.assertLess(abs(foretold["bytes"] / whole["bytes"] - 1), 0.2)
        self.assertGreater(foretold["seconds"], 0)

    def test_states_leave_the_disk_as_readers_acknowledge_them(self):
        server = Server(work / "retain", "--retain", "until-acked", "--max-shard-bytes", "1GiB")
        server.cli("submit", self.file, "--name", "kept", "--temperature", 0, "--max-new-tokens", 8, "--wait")
        before = server.json("show", "kept")
        server.cli("stream", "kept", "--out", work / "acknowledged")
        deadline = time.monotonic() + 20
        while server.json("show", "kept")["counts"]["evicted"] < 20 and time.monotonic() < deadline:
            time.sleep(0.1)
        after = server.json("show", "kept")
        self.assertEqual((after["counts"]["stored"], after["counts"]["evicted"]), (20, 20))
        self.assertLess(after["bytes"], before["bytes"])
        self.assertEqual(len(read_shards(work / "acknowledged")), 20)
        late = server.cli("stream", "kept", "--out", work / "late", expect=1)
        self.assertIn("20 samples", late.stderr)
        self.assertIn("evicted", late.stderr)
        server.cli("stream", "kept", "--out", work / "acknowledged")  # nothing more, and nothing is missing
        self.assertEqual(server.stop(), 0)

    def test_a_bound_on_shards_says_why_nothing_starts(self):
        server = Server(work / "bound", "--max-shard-bytes", "1MiB")
        server.cli("submit", self.file, "--name", "first", "--temperature", 0, "--max-new-tokens", 8, "--wait")  # its shard takes 4 MiB
        server.cli("submit", self.file, "--name", "second", "--temperature", 0, "--max-new-tokens", 8)
        time.sleep(1)
        second = server.json("show", "second")
        counts = second["counts"]
        self.assertEqual((counts["to_do"], counts["running"], counts["captured"]), (20, 0, 0))
        self.assertIn("--max-shard-bytes", second["message"])
        server.cli("delete", "first", "--yes")
        server.cli("watch", "second")
        self.assertEqual(server.stop(), 0)

    def test_delete_asks_and_leaves_nothing(self):
        job = self.submit("gone")
        refused = self.server.cli("delete", "gone", expect=2)
        some = self.server.cli("delete", "gone", "--where", "tokens > 3", expect=2)
        self.assertIn("statetap exclude gone --where 'tokens > 3'", some.stderr)
        self.assertIn("--yes", refused.stderr)
        self.server.cli("delete", "gone", "--yes")
        self.assertFalse(pathlib.Path(job["shards_path"]).exists())
        self.server.cli("show", "gone", expect=1)


class TextTest(unittest.TestCase):
    """What becomes of finished chats, thoughts and spelled special tokens, by the command line."""

    @classmethod
    def setUpClass(cls):
        cls.server = Server(work / "text")
        call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        cls.chats = [{"id": f"c{i}", "messages": [
            {"role": "user", "content": "What is 2 + 2?"},
            {"role": "assistant", "reasoning_content": "Add.", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "4"},
            {"role": "assistant", "reasoning_content": "Easy.", "content": "It is 4."},
            {"role": "user", "content": "And 3 + 3?"},
            {"role": "assistant", "reasoning_content": "Again.", "content": "It is 6.<|im_end|>"}]} for i in range(3)]
        cls.file = write_lines("finished.jsonl", cls.chats)

    @classmethod
    def tearDownClass(cls):
        assert cls.server.stop() == 0

    def text(self, name):
        """{sample: (supervised text, all text)} of a job, decoded by the server."""
        texts = {}
        for id, sample in read_shards(self.server.json("show", name)["shards_path"]).items():
            lines = [{"input_ids": [int(t) for t, m in zip(sample["ids"], sample["mask"]) if m]}, {"input_ids": sample["ids"].tolist()}]
            rendered = self.server.cli("tokens", write_lines("decode.jsonl", lines), "--json").stdout.splitlines()
            texts[id] = tuple(json.loads(line)["text"] for line in rendered)
        return texts

    def test_finished_chats_are_counted_before_anything_starts(self):
        path = write_lines("mixed.jsonl", [*self.chats, chat("open", id="o"), {"id": "p", "prompt": "raw"}])
        plan = self.server.cli("submit", path, "--mode", "generate", "--dry-run")
        self.assertIn("1 chat to answer, 3 chats that end with an answer, 1 prompt", plan.stderr)
        self.assertIn("3 of them will be rejected", plan.stderr)
        counts = self.server.json("submit", path, "--mode", "generate", "--dry-run")
        self.assertEqual((counts["open_chats"], counts["finished_chats"], counts["prompts"], counts["answers"]), (1, 3, 1, 9))
        self.server.cli("submit", path, "--mode", "generate", "--name", "as it is", "--max-new-tokens", 2, "--wait", expect=3)
        rejected = self.server.json("rejected", "as it is")["rejected"]
        self.assertEqual({r["id"] for r in rejected}, {"c0", "c1", "c2"})
        self.assertIn("turns regenerate", rejected[0]["message"])

    def test_each_answer_is_a_sample(self):
        self.server.cli("submit", self.file, "--turns", "each", "--name", "each", "--wait")
        texts = self.text("each")
        self.assertEqual(set(texts), {f"c{i}/{n}" for i in range(3) for n in (1, 2, 3)})
        self.assertEqual(texts["c0/2"][0], "Easy.</think>It is 4.<|im_end|>")
        self.assertTrue(texts["c0/2"][1].endswith("<think>Easy.</think>It is 4.<|im_end|>"))
        self.assertIn("<think>Add.</think>", texts["c0/2"][1], "the tool loop's thought is in its context")
        self.assertNotIn("Add.", texts["c0/3"][1], "a later answer's context has it no more")
        report = self.server.json("show", "each")["text"]
        self.assertEqual((report["thoughts"], report["dropped_earlier"], report["dropped_tool_turns"], report["dropped_last"]), (18, 3, 3, 0))
        self.assertEqual((report["tool_calls"], report["odd_tool_ids"], report["spelled_specials"]), (9, 9, 3))
        shown = self.server.cli("show", "each").stdout
        self.assertIn("6 of 18 left out: 3 of earlier answers, 3 of earlier turns that call tools", shown)
        self.assertIn("9 of 9 calls", shown)

    def test_the_last_answer_is_written_anew(self):
        self.server.cli("submit", self.file, "--turns", "regenerate", "--name", "anew", "--temperature", 0, "--max-new-tokens", 4, "--wait")
        for supervised, text in self.text("anew").values():
            self.assertNotIn("It is 6.", text)
            self.assertIn("And 3 + 3?<|im_end|><|im_assistant|>assistant<|im_middle|><think>" + supervised, text)

    def test_masks_and_specials_by_choice(self):
        self.server.cli("submit", self.file, "--supervise-thought", "off", "--supervise-stop", "off", "--name", "bare", "--wait")
        self.assertEqual(self.text("bare")["c0"][0], "It is 6.<|im_end|>", "spelled by the assistant: text")
        self.server.cli("submit", self.file, "--supervise", "all", "--keep-reasoning", "all", "--name", "all", "--wait")
        self.assertEqual(self.text("all")["c0"][0].count("</think>"), 3)
        self.server.cli("submit", self.file, "--assistant-specials", "refused", "--name", "refused", "--wait", expect=1)
        self.assertIn("<|im_end|>", self.server.json("rejected", "refused")["rejected"][0]["message"])
        self.server.cli("submit", self.file, "--assistant-specials", "parsed", "--name", "parsed", "--wait")
        ids = read_shards(self.server.json("show", "parsed")["shards_path"])["c0"]["ids"].tolist()
        self.assertEqual(ids[-2:], [IM_END, IM_END])
        other = self.server.cli("submit", self.file, "--name", "parsed", "--mode", "prefill", expect=None)
        self.assertIn("assistant_specials", other.stderr)

    def test_generated_masks_by_choice(self):
        path = write_lines("short.jsonl", [chat("What is the capital of France?", id="f")])
        flags = ["--temperature", 0, "--max-new-tokens", 100, "--wait"]
        self.server.cli("submit", path, "--name", "whole", *flags)
        self.server.cli("submit", path, "--name", "part", "--supervise-thought", "off", "--supervise-stop", "off", *flags)
        whole, part = (read_shards(self.server.json("show", name)["shards_path"])["f"] for name in ("whole", "part"))
        np.testing.assert_array_equal(whole["ids"], part["ids"])
        ids, prompt = whole["ids"].tolist(), whole["prompt"]
        self.assertEqual(ids[-1], IM_END)
        thought_end = ids.index(2071, prompt) + 1  # </think>
        self.assertEqual(whole["mask"].tolist(), [0] * prompt + [1] * (len(ids) - prompt))
        self.assertEqual(part["mask"].tolist(), [0] * thought_end + [1] * (len(ids) - thought_end - 1) + [0])

    def test_raw_prompts_are_parsed_by_choice_alone(self):
        path = write_lines("raw.jsonl", [{"id": "r", "prompt": "<|im_user|>user<|im_middle|>hi<|im_end|>"}])
        ids = {flag: json.loads(self.server.cli("tokens", path, "--json", *flag).stdout)["input_ids"] for flag in ((), ("--parse-special",))}
        self.assertFalse([i for i in ids[()] if i >= 2048])
        self.assertEqual([i for i in ids[("--parse-special",)] if i >= 2048], [2051, 2065, IM_END])
        self.assertIn("--parse-special", self.server.cli("submit", self.file, "--parse-special", expect=2).stderr)

    def test_a_laptop_shows_what_the_server_sees(self):
        for options in ([], ["--turns", "each"], ["--mode", "generate"], ["--supervise", "all", "--mode", "prefill"], ["--template", "kimi-k2-instruct"]):
            here, there = (self.server.cli("tokens", self.file, "--json", *options, *where).stdout for where in (["--model", MODEL], []))
            self.assertEqual(here, there)
            self.assertTrue(here)


class ManySamplesTest(unittest.TestCase):
    """25,000 samples of 2 to 40 tokens through everything, on a model small enough that it is not the model that takes the time."""

    SAMPLES = 25_000

    def resident_mib(self):
        status = pathlib.Path(f"/proc/{self.server.process.pid}/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) / 1024  # not what the page cache holds of mapped shards

    def test_nothing_is_lost_and_memory_stays_flat(self):
        self.server = server = Server(work / "many", model=ROOT / "tests/data/reference/plain")
        self.addCleanup(server.stop)
        random = np.random.default_rng(3)
        lengths = random.integers(2, 41, self.SAMPLES)
        lines = [{"id": f"s{i}", "input_ids": random.integers(0, 300, n).tolist()} for i, n in enumerate(lengths)]
        server.cli("submit", write_lines("many.jsonl", lines), "--name", "many", "--taps", "1,2", "--shard-bytes", "8MiB")
        early = None
        while (job := server.json("show", "many"))["state"] not in ("succeeded", "failed", "cancelled"):
            counts = {name: int(value) for name, value in job["counts"].items()}
            self.assertEqual(counts["submitted"], sum(counts.get(name, 0) for name in ("stored", "rejected", "cancelled", "to_do")), counts)
            if early is None and counts.get("stored", 0) > self.SAMPLES // 5:
                early = self.resident_mib()
            time.sleep(0.2)
        self.assertEqual((job["state"], int(job["counts"]["stored"]), int(job["tokens"])), ("succeeded", self.SAMPLES, int(lengths.sum())))
        self.assertIsNotNone(early)
        out = work / "many-out"
        server.cli("stream", "many", "--out", out)
        # What four fifths of the samples and a stream of all of them may add is allocators' slack, not 270 MB of states.
        self.assertLess(self.resident_mib() - early, 64)
        got = [sample for shard in sorted(out.rglob("*.h5")) for sample in read_shards_of(shard)]
        self.assertEqual((len(got), len(set(got))), (self.SAMPLES, self.SAMPLES))
        server.cli("check", out)


class FaultsTest(unittest.TestCase):
    def test_killed_in_mid_job_completes_and_equals_a_clean_run(self):
        prompts = work / "many.jsonl"
        prompts.write_text((ROOT / "examples/prompts_64.jsonl").read_text())
        options = ["--name", "job", "--seed", 5, "--max-new-tokens", 40]
        clean = Server(work / "clean")
        clean.cli("submit", prompts, *options, "--wait")
        want = read_shards(clean.json("show", "job")["shards_path"])
        clean.stop()
        server = Server(work / "killed")
        server.cli("submit", prompts, *options, "--shard-bytes", "1MiB")
        for _ in range(3):
            time.sleep(1.0)
            server.stop(signal.SIGKILL)
            server = Server(work / "killed")
        server.cli("watch", "job")
        counts = server.json("show", "job")["counts"]
        self.assertEqual((counts["submitted"], counts["stored"]), (64, 64))
        got = read_shards(server.json("show", "job")["shards_path"])
        server.cli("check", "job")
        server.stop()
        self.assertEqual(set(got), set(want))
        for sample, stored in want.items():
            for key, value in stored.items():
                np.testing.assert_array_equal(got[sample][key], value, err_msg=f"{sample} {key}")

    def test_only_samples_that_meet_a_non_finite_value_are_rejected(self):
        model = work / "poisoned"
        shutil.copytree(MODEL, model)
        name = "language_model.model.embed_tokens.weight"
        file = model / json.loads((model / "model.safetensors.index.json").read_text())["weight_map"][name]
        raw = bytearray(file.read_bytes())
        size = struct.unpack("<Q", raw[:8])[0]
        begin = 8 + size + json.loads(raw[8:8 + size])[name]["data_offsets"][0]
        raw[begin + 300 * HIDDEN * 2:begin + 300 * HIDDEN * 2 + 2] = struct.pack("<H", 0x7F80)  # +inf in token 300
        file.write_bytes(raw)
        server = Server(work / "poison-data", model=model)
        lines = [{"id": f"s{i}", "input_ids": [10 + i, 20, 300 if i == 3 else 30, 40]} for i in range(10)]
        server.cli("submit", write_lines("poison.jsonl", lines), "--name", "poison", "--wait", expect=3)
        (rejected,) = server.json("rejected", "poison")["rejected"]
        self.assertEqual((rejected["id"], rejected["reason"], rejected["layer"], rejected["token"]), ("s3", "non_finite", 2, 2))
        stored = read_shards(server.json("show", "poison")["shards_path"])
        self.assertEqual(set(stored), {f"s{i}" for i in range(10)} - {"s3"})
        for sample in stored.values():
            for boundary in TAPS + [LAYERS]:
                self.assertTrue(np.isfinite(sample[boundary]).all())
        server.stop()

    def test_cancel_keeps_the_count(self):
        server = Server(work / "cancel-data")
        lines = [json.loads(line) for line in (ROOT / "examples/prompts_64.jsonl").read_text().splitlines()]
        many = [{**line, "id": f"{line['id']}-{k}"} for k in range(60) for line in lines]  # more than a GPU ends in two seconds
        server.cli("submit", write_lines("cancel.jsonl", many), "--name", "job")
        time.sleep(1.5)
        server.cli("cancel", "job")
        counts = server.json("show", "job")["counts"]
        self.assertEqual(counts["stored"] + counts["cancelled"], len(many), counts)
        self.assertEqual(counts["to_do"], 0)
        server.stop()

    def test_ranks_give_the_same_text(self):
        texts = []
        for options in ([], ["--tp", "2"], ["--tp", "4", "--experts", "tensor"]):
            server = Server(work / f"ranks{len(texts)}", *options)
            lines = [json.loads(line) for line in (ROOT / "examples/prompts_64.jsonl").read_text().splitlines()[:6]]
            server.cli("submit", write_lines("six.jsonl", lines), "--name", "six", "--temperature", 0, "--wait")
            texts.append({k: s["ids"].tolist() for k, s in read_shards(server.json("show", "six")["shards_path"]).items()})
            server.stop()
        self.assertEqual(texts[0], texts[1])
        self.assertEqual(texts[0], texts[2])


if __name__ == "__main__":
    unittest.main()
