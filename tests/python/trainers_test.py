"""The trainers' own packages on what Statetap gives them: needs .venv-trainers (scripts/setup.sh --trainers). Run by ctest as package_test.py is."""
import contextlib
import importlib.util
import json
import pickle
import subprocess
import sys
import threading
import types
import unittest
import unittest.mock
import urllib.request
import warnings
from pathlib import Path

try:
    import speculators  # noqa: F401
    import torch
except ImportError:
    print(f"{sys.executable} has no speculators (scripts/setup.sh --trainers makes .venv-trainers with it): not tested")
    sys.exit(77)
import numpy as np
import statetap
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from served import HIDDEN, LAYERS, MODEL, ROOT, TAPS, Served, by_h5py, losses_of
from statetap import accept, drafter
from statetap.checkpoint import Checkpoint
from statetap.endpoint import Endpoint
from statetap.speculators import StatetapTransfer

PROMPTS = [json.loads(line) for line in (ROOT / "examples/prompts_64.jsonl").read_text().splitlines()]
HERE = Path(__file__).parent


def setUpModule():
    global served, job, stored, reference
    served = Served()
    served.__enter__()
    prompts = [{**prompt, "source": ("code", "chat")[n % 2]} for n, prompt in enumerate(PROMPTS[:16])]
    job = served.run(prompts, name="all", temperature=0, max_new_tokens=16)
    stored = by_h5py(job.shards_path)
    reference = ROOT / "tests/data/reference/tiny-kimi.safetensors"
    # 2 to 65 tokens of the sequences that transformers was run on, whole
    with safe_open(reference, framework="pt") as file:
        served.run([{"id": str(n), "input_ids": file.get_tensor(f"{n}.ids").tolist()} for n in (1, 2, 3, 4, 5)], name="reference")


def tearDownModule():
    served.__exit__()


def run(*command, expect=0):
    result = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=1200)
    if result.returncode != expect:
        raise AssertionError(f"{command}: exit {result.returncode}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}")
    return result.stdout + result.stderr


def export(to, source, out, *more):
    run("-m", "statetap.export", "export", "--server", served.address, "--to", to, source, "--out", out, "--model", MODEL, *more)
    return out


class SpeculatorsTest(unittest.TestCase):
    def check(self, out, taps="2,4,5"):
        """The outside check: the trainer's own reading code, and transformers' values."""
        return subprocess.run([sys.executable, ROOT / "tests/reference/speculators_check.py", out, MODEL, "--taps", taps, "--reference", reference],
                              capture_output=True, text=True)  # fmt: skip

    @contextlib.contextmanager
    def endpoint(self, job):
        """(a row's states as the trainer gets them from the endpoint, by its ids; the endpoint's address)"""
        endpoint = Endpoint(("127.0.0.1", 0), served.client, [job], str(MODEL), served.folder / "handed out")
        threading.Thread(target=endpoint.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{endpoint.server_address[1]}/v1"

        def ask(ids):
            body = json.dumps({"model": str(MODEL), "prompt": ids.tolist(), "max_tokens": 1, "return_token_ids": True}).encode()
            with urllib.request.urlopen(f"{address}/completions", body) as answer:
                path = Path(json.load(answer)["kv_transfer_params"]["hidden_states_path"])
            tensors = load_file(path)
            path.unlink()
            return tensors

        yield ask, address
        endpoint.shutdown()
        endpoint.server_close()
        self.assertEqual(list((served.folder / "handed out").iterdir()), [])

    def test_rows_pass_the_outside_check_whichever_way_they_come(self):
        files = export("speculators", "reference", served.folder / "reference", "--draft-vocab", 20)
        ids = [load_file(files / f"hidden_states/hs_{row}.safetensors")["token_ids"] for row in range(5)]
        transfer = StatetapTransfer(files, served.address, None)
        with self.endpoint("reference") as (ask, _):
            ways = {"backend": transfer.get_cached, "endpoint": lambda row: ask(ids[row])}
            for name, get in ways.items():
                out = export("speculators", "reference", served.folder / f"reference-{name}", "--draft-vocab", 20, "--rows-only")
                (out / "hidden_states").mkdir()
                for row in range(5):
                    save_file(get(row), out / f"hidden_states/hs_{row}.safetensors")
        for out in (files, served.folder / "reference-backend", served.folder / "reference-endpoint"):
            told = self.check(out)
            self.assertEqual(told.returncode, 0, told.stdout)
            self.assertIn("passed: 0 rules broken, 5 rows", told.stdout)
            self.assertIn("PASS  each slot lies nearest to its own boundary", told.stdout)
        wrong = export("speculators", "reference", served.folder / "wrong", "--taps", "2,4")
        for path in (wrong / "hidden_states").iterdir():  # each state one place late
            tensors = load_file(path)
            save_file({**tensors, "hidden_states": tensors["hidden_states"].roll(1, 0).contiguous()}, path)
        self.assertEqual(self.check(wrong, "2,4").returncode, 1, "the check can fail")

    def test_the_backend_gives_the_same_rows_as_files(self):
        files = export("speculators", "all", served.folder / "files")
        rows = export("speculators", "all", served.folder / "rows", "--rows-only")
        self.assertEqual((files / "statetap-rows.jsonl").read_text(), (rows / "statetap-rows.jsonl").read_text())
        transfer = pickle.loads(pickle.dumps(StatetapTransfer(rows, served.address, served.folder / "cache")))
        for again in range(2):  # the second time from the cache
            for row in range(16):
                there, here = transfer.get_cached(np.int64(row)), load_file(files / f"hidden_states/hs_{row}.safetensors")
                self.assertEqual(set(there), set(here))
                for name in here:
                    self.assertEqual(there[name].dtype, here[name].dtype)
                    self.assertTrue(torch.equal(there[name], here[name]), f"row {row} {name}")
            transfer._server = "127.0.0.1:1"
            transfer._client = None
        fewer = export("speculators", "all", served.folder / "fewer-taps", "--rows-only", "--taps", "2,4")
        self.assertEqual(StatetapTransfer(fewer, served.address, served.folder / "cache").get_cached(0)["hidden_states"].shape[1], 3, "not the cached row of other taps")

    def train(self, data, *more):
        """(losses_of, folder of the last checkpoint)"""
        out = data.with_name(data.name + "-trained")
        told = run(HERE / "speculators_on_cpu.py", "train", "--verifier-name-or-path", MODEL, "--data-path", data, "--speculator-type", "eagle3", "--save-path", out,
                   "--target-layer-ids", 2, 4, 5, "--mask-token-id", 0, "--total-seq-len", 128, "--num-workers", 0,
                   "--optimizer", "adamw", "--lr", "3e-3", "--epochs", 2, "--ttt-steps", 1, "--draft-vocab-size", 128, *more)
        return losses_of(told, epochs=2), out / "1"

    def test_trains_from_files_and_from_the_server_alike_and_its_drafter_is_read(self):
        rows = export("speculators", "all", served.folder / "train-rows", "--rows-only")
        files = export("speculators", "all", served.folder / "train-files")
        losses, trained = self.train(files, "--on-missing", "raise")
        self.assertLess(losses[2], losses[1], "the last epoch, the first")
        over_grpc = self.train(rows, "--hidden-states-backend", "statetap", "--statetap-server", served.address, "--on-missing", "raise")[0]
        self.assertEqual(over_grpc, losses, "the same rows in the same order")
        with self.endpoint("all") as (_, address):
            generated = self.train(export("speculators", "all", served.folder / "train-endpoint", "--rows-only"), "--on-missing", "generate", "--vllm-endpoint", address)[0]
        self.assertEqual(generated, losses, "and by the endpoint")
        self.check_drafter(trained)

    def check_drafter(self, folder):
        """statetap.drafter computes what speculators' own model does."""
        from speculators.models.eagle3 import Eagle3DraftModel

        theirs = Eagle3DraftModel.from_pretrained(folder).float().eval()
        ours = drafter.load(folder, Checkpoint(MODEL))
        sample = served.client.sample(job, PROMPTS[0]["id"]).torch()
        with torch.no_grad():
            hidden = sample.taps[:-1].float().flatten(1)
            state = theirs.fc(theirs.input_norm(hidden))[None]
            embeds = theirs.embed_tokens(sample.input_ids[1:])[None]
            positions = torch.arange(1, len(sample))[None]
            n = len(sample) - 1
            mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
            both = torch.cat([embeds, state], -1)
            layer = theirs.layers[0]
            layer.self_attn.config._attn_implementation = "eager"
            out = layer(both, attention_mask=mask, position_embeddings=theirs.rotary_emb(state, positions), position_ids=positions)
            out = out[0] if isinstance(out, tuple) else out
            expected = theirs.lm_head(theirs.norm(out))[0]
            got = ours(sample.taps, sample.input_ids, 1)[0]
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
        told = json.loads(run("-m", "statetap.accept", folder, "--data", job.shards_path, "--model", MODEL, "--json", "--by", "source"))
        self.assertEqual(told["all"]["drafts"][0], sum(int(x["mask"][2:].sum()) for x in stored.values()))
        self.assertGreater(told["all"]["length"], 1.0)
        sources = [row for name, row in told.items() if name != "all"]
        self.assertEqual(len(sources), len({sample.source for sample in served.client.samples(job)}))
        self.assertEqual([sum(row["drafts"][step] for row in sources) for step in range(3)], told["all"]["drafts"])


class TorchFilesTest(unittest.TestCase):
    def test_torch_reads_every_format(self):
        names = {"specforge": ("aux_hidden_state", "hidden_state"), "torchspec": ("aux_hidden_states", "hidden_states"), "angelslim": ("hidden_states", "target_hiddens"),
                 "modelopt": ("aux_hidden_states", "hidden_states")}  # fmt: skip
        model = Checkpoint(MODEL)
        for format, (taps_name, final_name) in names.items():
            out = export(format, "all", served.folder / f"torch-{format}")
            rows = [json.loads(line) for line in (out / "statetap-rows.jsonl").read_text().splitlines()]
            files = sorted(p for p in out.rglob("*") if p.suffix in (".ckpt", ".pt") and p.stem[-1].isdigit())
            for row, path in zip(rows, files, strict=True):
                held, truth = torch.load(path, mmap=True, weights_only=True), stored[row["id"]]
                n = len(truth["ids"])
                batch = () if format == "modelopt" else (1,)
                self.assertEqual((held[taps_name].shape, held[final_name].shape), ((*batch, n, 3 * HIDDEN), (*batch, n, HIDDEN)))
                self.assertEqual({held[k].dtype for k in (taps_name, final_name)}, {torch.bfloat16})
                self.assertEqual((held["input_ids"].dtype, held["input_ids"].flatten().tolist()), (torch.int64, truth["ids"].tolist()))
                self.assertEqual(held["loss_mask"].flatten().tolist(), truth["mask"].tolist())
                np.testing.assert_array_equal(held[taps_name].float().view(n, 3, HIDDEN)[:, 1].numpy(), truth[TAPS[1]])
                for tensor in (t for t in held.values() if isinstance(t, torch.Tensor)):
                    self.assertEqual(tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size())
                    self.assertEqual(tensor.data_ptr() % 64, 0)
                final = torch.from_numpy(truth[LAYERS])
                if format == "modelopt":
                    self.assertIs(held["hidden_states_prenorm"], True)
                    self.assertEqual(held["conversation_id"], row["id"])
                    torch.testing.assert_close(held[final_name].float(), final, rtol=0, atol=0)
                else:
                    normed = final * torch.rsqrt(final.pow(2).mean(-1, keepdim=True) + model.eps) * torch.from_numpy(statetap.float32(model.bits("model.norm.weight")))
                    torch.testing.assert_close(held[final_name].view(n, HIDDEN), normed.bfloat16(), rtol=2**-7, atol=1e-6)

    def test_maps_and_counts_are_those_of_speculators(self):
        from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

        out = export("speculators", "all", served.folder / "maps", "--draft-vocab", 40)
        counts = torch.load(out / "token_freq.pt", weights_only=True)
        d2t, t2d = build_vocab_mappings_from_distribution(counts, 40, 2304)
        np.testing.assert_array_equal(np.load(out / "d2t-40.npy"), d2t)
        np.testing.assert_array_equal(np.load(out / "t2d-40.npy"), t2d)
        both = torch.load(out / "vocab_mapping-40.pt", weights_only=True)
        self.assertTrue(torch.equal(both["d2t"], d2t) and torch.equal(both["t2d"], t2d))

        for old in (out / "vocab_mapping-40.pt", out / "t2d-40.npy"):
            told = json.loads(run("-m", "statetap.export", "vocab-map", "all", "--server", served.address, "--against", old, "--json", "--quiet"))
            self.assertEqual((told["against"]["size"], told["against"]["kept"]), (40, 40))

    def test_stats_by_the_command_line_reads_torch_files(self):
        with unittest.mock.patch.dict("os.environ", {"STATETAP_PYTHON": sys.executable}):
            for format in ("specforge", "modelopt"):
                out = export(format, "all", served.folder / f"stats-{format}")
                told = json.loads(served.cli("--json", "stats", "--as", format, out, "--model", MODEL).stdout)
                self.assertEqual((told["files"], told["post_norm"], told["faults"]), (16, format == "specforge", []))
                for path in out.rglob("*.ckpt" if format == "specforge" else "*.pt"):  # as if it had been written for the other kind of trainer
                    held = torch.load(path, weights_only=True)
                    name = "hidden_state" if format == "specforge" else "hidden_states"
                    bits = held[name].reshape(-1, HIDDEN).view(torch.int16).numpy().view(np.uint16)
                    other = torch.from_numpy((Checkpoint(MODEL).final_norm(bits)).view(np.int16)).view(torch.bfloat16)
                    if format == "specforge":
                        norm = torch.from_numpy(statetap.float32(Checkpoint(MODEL).bits("model.norm.weight")))
                        other = (held[name].float() / norm * 7).bfloat16()  # not normed: another size at each token
                    torch.save({**held, name: other.reshape(held[name].shape)}, path)
                faults = served.cli("--json", "stats", "--as", format, out, "--model", MODEL, expect=1)
                self.assertIn("the final norm", json.loads(faults.stdout)["faults"][-1])


class HeadTest(unittest.TestCase):
    """The head's folder by each trainer's own code: the values of the checkpoint, and the base model's next tokens."""

    def out(self, flat):
        out = served.folder / f"{self._testMethodName}-{flat}"
        run("-m", "statetap.export", "export", "--to", "head", "--model", MODEL, "--out", out, *(["--flat"] if flat else []))
        return out

    def test_its_config_opens(self):
        from transformers import AutoConfig

        for flat in (False, True):
            config = AutoConfig.from_pretrained(self.out(flat))
            self.assertEqual((getattr(config, "text_config", config).hidden_size, config.model_type), (HIDDEN, "deepseek_v3" if flat else "kimi_k25"))

    def test_specforge_loads_it(self):
        try:
            from specforge.modeling.target.target_head import TargetHead
        except ImportError as error:
            self.skipTest(f"specforge is not there: {error}")
        head = TargetHead.from_pretrained(str(self.out(True)), lm_head_key="lm_head.weight")
        np.testing.assert_array_equal(head.fc.weight.detach().float().numpy(), statetap.float32(Checkpoint(MODEL).bits("lm_head.weight")))

    def test_model_optimizer_loads_it(self):
        try:
            from modelopt.torch.speculative.plugins.modeling_fakebase import FakeBaseModel
        except ImportError as error:
            self.skipTest(f"nvidia-modelopt is not there: {error}")
        base, model = FakeBaseModel.from_source(str(self.out(False))), Checkpoint(MODEL)
        for tensor, name in ((base.lm_head.weight, "lm_head.weight"), (base.embed_tokens.weight, "embed_tokens.weight"), (base.norm.weight, "model.norm.weight")):
            np.testing.assert_array_equal(tensor.detach().float().numpy(), statetap.float32(model.bits(name)))


class SpecForgeTest(unittest.TestCase):
    def test_its_reader_store_and_loader_give_the_files_values(self):
        try:
            from specforge.algorithms.eagle3.data import build_offline_collator, build_offline_normalizer, build_offline_reader
            from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
            from specforge.runtime.data_plane.feature_store import LocalFeatureStore
        except ImportError as error:
            self.skipTest(f"specforge is not there: {error}")
        out = export("specforge", "all", served.folder / "specforge-reader")
        refs = build_offline_reader(str(out), run_id="test", ttt_length=3, max_len=4096).read()
        loader = FeatureDataLoader(LocalFeatureStore(), refs=refs, batch_size=1, collate_fn=build_offline_collator(), per_sample_transform=build_offline_normalizer(4096))
        self.assertIn('"faults": []', run("-m", "statetap.foreign", out, "--as", "specforge", "--model", MODEL, "--json"))
        rows, model = [json.loads(line) for line in (out / "statetap-rows.jsonl").read_text().splitlines()], Checkpoint(MODEL)
        for row, batch in zip(rows, loader, strict=True):
            truth, tensors = stored[row["id"]], batch.tensors
            self.assertEqual(tensors["input_ids"][0].tolist(), truth["ids"].tolist())
            self.assertEqual(tensors["loss_mask"][0].tolist(), [*truth["mask"][:-1].tolist(), 0])
            np.testing.assert_array_equal(tensors["hidden_state"][0].float().numpy()[:, :HIDDEN], truth[TAPS[0]])
            bits = torch.from_numpy(truth[LAYERS]).bfloat16().view(torch.int16).numpy().view(np.uint16)
            np.testing.assert_array_equal(tensors["target"][0].float().numpy(), statetap.float32(model.final_norm(bits)))


class ModelOptimizerTest(unittest.TestCase):
    def test_its_data_set_reads_the_files(self):
        try:
            from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset
        except ImportError as error:
            self.skipTest(f"nvidia-modelopt is not there: {error}")
        out = export("modelopt", "all", served.folder / "modelopt-reader")
        files = [str(p) for p in sorted(out.glob("*.pt"))]
        self.assertIn('"faults": []', run("-m", "statetap.foreign", out, "--as", "modelopt", "--model", MODEL, "--json"))
        data = OfflineSupervisedDataset(files, answer_only_loss=True, tokenizer=None)
        rows = [json.loads(line) for line in (out / "statetap-rows.jsonl").read_text().splitlines()]
        batch = EagleOfflineDataCollator(train_len=256)([data[0], data[1]])
        outputs = batch["base_model_outputs"]
        self.assertTrue(outputs["base_hidden_prenorm"])
        for b in range(2):
            truth = stored[rows[b]["id"]]
            n = len(truth["ids"])
            np.testing.assert_array_equal(outputs["base_model_hidden_states"][b, :n].float().numpy(), truth[LAYERS])
            np.testing.assert_array_equal(outputs["aux_hidden_states"][b, :n, HIDDEN : 2 * HIDDEN].float().numpy(), truth[TAPS[1]])


class AngelSlimTest(unittest.TestCase):
    def test_its_data_set_reads_the_files(self):
        found = importlib.util.find_spec("angelslim")
        if found is None:
            self.skipTest("angelslim is not there")
        # The wheel of 0.5.0 lacks compressor/qat, which the packages above its reader import: they are left out.
        parts = ["angelslim", *"compressor speculative train data dataset_builder".split()]
        for name in (".".join(parts[: n + 1]) for n in range(len(parts))):
            package = types.ModuleType(name)
            package.__path__ = [str(Path(found.origin).parent.joinpath(*name.split(".")[1:]))]
            sys.modules[name] = package
        from angelslim.compressor.speculative.train.data.data_utils import DataCollatorWithPadding
        from angelslim.compressor.speculative.train.data.dataset_builder.offline_dataset_builder import OfflineEagle3Dataset

        out, model = export("angelslim", "all", served.folder / "angelslim-reader"), Checkpoint(MODEL)
        rows = [json.loads(line) for line in (out / "statetap-rows.jsonl").read_text().splitlines()]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it warns of a file that it cannot read, and takes the next
            data = OfflineEagle3Dataset(str(out))
            batch = DataCollatorWithPadding()([data[row] for row in range(len(rows))])
        for b, row in enumerate(rows):
            truth = stored[row["id"]]
            n = len(truth["ids"])
            self.assertEqual(batch["input_ids"][b, :n].tolist(), truth["ids"].tolist())
            self.assertEqual(batch["loss_mask"][b, :n].tolist(), truth["mask"].tolist())
            np.testing.assert_array_equal(batch["hidden_states"][b, :n, HIDDEN : 2 * HIDDEN].float().numpy(), truth[TAPS[1]])
            bits = torch.from_numpy(truth[LAYERS]).bfloat16().view(torch.int16).numpy().view(np.uint16)
            np.testing.assert_array_equal(batch["target_hiddens"][b, :n].float().numpy(), statetap.float32(model.final_norm(bits)))


class AcceptTest(unittest.TestCase):
    def test_every_published_naming_is_read_alike(self):
        config = drafter.DrafterConfig(hidden=HIDDEN, intermediate=64, num_heads=4, num_kv_heads=2, head_dim=32, vocab=2304, draft_vocab=100, num_taps=3, eps=1e-5,
                                       rope={"rope_theta": 10000.0})  # fmt: skip
        torch.manual_seed(0)
        model, published = Checkpoint(MODEL), served.folder / "published"
        t2d = torch.zeros(2304, dtype=torch.bool)
        t2d[100:200] = True
        made = drafter.Drafter(config, torch.from_numpy(statetap.float32(model.bits("embed_tokens.weight"))))
        made.d2t += 100
        drafter.save(made, published, list(TAPS), t2d)
        named = load_file(published / "model.safetensors")
        self.assertTrue(any(name.startswith("midlayer.") for name in named))
        sample = served.client.sample(job, PROMPTS[0]["id"]).torch()
        renames = {"SafeAILab": lambda name: name, "vLLM": lambda name: "model." * (not name.startswith(("lm_head", "d2t", "t2d"))) + name.replace("midlayer", "layers.0"),
                   "speculators": lambda name: name.replace("midlayer", "layers.0")}  # fmt: skip
        expected = drafter.load(published, model)(sample.taps, sample.input_ids, 2)
        self.assertEqual(drafter.load(published, model).target_ids(torch.arange(100)).tolist(), list(range(100, 200)))
        for style, rename in renames.items():
            for form in ("safetensors", "bin"):
                folder = served.folder / f"{style}-{form}"
                folder.mkdir()
                (folder / "config.json").write_text((published / "config.json").read_text())
                tensors = {rename(name): tensor for name, tensor in named.items()}
                save_file(tensors, folder / "model.safetensors") if form == "safetensors" else torch.save(tensors, folder / "pytorch_model.bin")
                for got, logits in zip(drafter.load(folder, model)(sample.taps, sample.input_ids, 2), expected, strict=True):
                    self.assertTrue(torch.equal(got, logits), f"{style} {form}")

    def test_what_cannot_be_measured_is_said(self):
        folder = served.folder / "no-drafter"
        folder.mkdir()
        (folder / "config.json").write_text((MODEL / "config.json").read_text())
        self.assertIn("neither a safetensors nor a .bin file", run("-m", "statetap.accept", folder, "--data", job.shards_path, expect=2))
        for name, text in (("midlayer.self_attn.kv_a_proj_with_mqa.weight", "MLA attention"), ("fc_norm.0.weight", "norms each tap on its own")):
            save_file({"fc.weight": torch.zeros(1), "lm_head.weight": torch.zeros(1), name: torch.zeros(1)}, folder / "model.safetensors")
            self.assertIn(text, run("-m", "statetap.accept", folder, "--data", job.shards_path, expect=2))
        self.assertIn("no fc.weight: it is no EAGLE-3 drafter", run("-m", "statetap.accept", MODEL, "--data", job.shards_path, expect=2))

    def test_samples_that_lie_one_after_another_are_drafted_as_each_alone(self):
        config = drafter.DrafterConfig(hidden=HIDDEN, intermediate=64, num_heads=4, num_kv_heads=2, head_dim=32, vocab=2304, draft_vocab=100, num_taps=3, eps=1e-5,
                                       rope={"rope_theta": 10000.0})  # fmt: skip
        torch.manual_seed(0)
        made = drafter.Drafter(config, torch.randn(2304, HIDDEN)).eval()
        samples = [sample.torch() for sample in list(statetap.ShardDataset(job.shards_path))[:3]]
        documents = torch.repeat_interleave(torch.tensor([len(sample) for sample in samples]))
        with torch.no_grad():
            together = made(torch.cat([s.taps for s in samples]), torch.cat([s.input_ids for s in samples]), 3, documents)
            begin = 0
            for sample in samples:
                for step, alone in enumerate(made(sample.taps, sample.input_ids, 3), 1):
                    rows = len(sample) - step  # the last one's next token is known
                    torch.testing.assert_close(together[step - 1][begin : begin + rows], alone[:rows], rtol=1e-4, atol=1e-4)
                begin += len(sample)

    def test_search_names_the_taps_that_a_drafter_depends_on(self):
        """A drafter whose prediction is read off tap 5 alone: any choice without it in the third place is worse."""
        data = list(statetap.ShardDataset(job.shards_path))
        model = Checkpoint(MODEL)
        config = drafter.DrafterConfig(hidden=HIDDEN, intermediate=64, num_heads=4, num_kv_heads=4, head_dim=32, vocab=2304, draft_vocab=2304, num_taps=1, eps=1e-5,
                                       rope={"rope_theta": 10000.0})  # fmt: skip
        torch.manual_seed(1)
        made = drafter.Drafter(config, torch.from_numpy(statetap.float32(model.bits("embed_tokens.weight"))))
        optimizer = torch.optim.AdamW(made.parameters(), lr=3e-3)
        for update in range(60):
            sample = data[update % len(data)].torch()
            logits = made(sample.states[5][:, None], sample.input_ids, 1)[0]
            loss = torch.nn.functional.cross_entropy(logits[:-1], sample.input_ids[2:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ranked = accept.search(made.eval(), data, 1, model)
        self.assertEqual(ranked[0][0], accept.Features((5,)))
        self.assertEqual(len(ranked), 5)  # four boundaries, the last before and behind the norm
        drafter.save(made, served.folder / "saved", [5], torch.ones(2304, dtype=torch.bool))
        told = json.loads(run("-m", "statetap.accept", served.folder / "saved", "--data", job.shards_path, "--model", MODEL, "--search", "--steps", 1, "--json"))
        self.assertEqual((told["named"], told["search"][0]["taps"]), ([5], [5]))


if __name__ == "__main__":
    unittest.main()
