"""Stock h5py and h5dump read a shard: names, types, values and attributes of docs/shard-format.md.

Run by ctest with SHARD_EXAMPLE (the program that writes the shard) and H5DUMP in the environment.
"""

import json
import os
import subprocess
import sys
import tempfile
import unittest

try:
    import h5py
    import numpy as np
except ImportError as error:
    sys.exit(f"{sys.executable}: {error}; scripts/setup.sh makes .venv with numpy and h5py")

TOKENS = [3, 1, 300, 77]
ROWS = sum(TOKENS)
HIDDEN = 128
BOUNDARIES = [0, 2, 8]


def expected_bits(index):
    row = np.arange(ROWS)[:, None]
    channel = np.arange(HIDDEN)[None, :]
    return (0x3C00 + (row * 31 + channel * 7 + index * 111) % 0x400).astype(np.uint16)


def as_float32(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def read_bits(dataset):
    """The fast way of docs/shard-format.md: 16-bit words, no conversion."""
    bits = np.empty(dataset.shape, np.uint16)
    dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, bits, dataset.id.get_type())
    return bits


class ShardTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.path = os.path.join(cls.folder.name, "example.h5")
        subprocess.run([os.environ["SHARD_EXAMPLE"], cls.path], check=True)
        cls.file = h5py.File(cls.path, "r")

    @classmethod
    def tearDownClass(cls):
        cls.file.close()
        cls.folder.cleanup()

    def test_groups_and_datasets_are_the_promised_ones(self):
        names = []
        self.file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        stats = ("count mean m2 min max abs_max row_rms_histogram zero_rows nonfinite class_count class_row_rms_histogram "
                 "class_compared class_cosine class_squared_cosine").split()
        samples = ("row_offset id source meta split digest prompt_tokens finish_reason truncated "
                   "source_index checksum").split()
        self.assertCountEqual(
            names,
            [f"states/{b}" for b in BOUNDARIES]
            + [f"tokens/{name}" for name in ("ids", "loss_mask", "logprob", "entropy")]
            + [f"samples/{name}" for name in samples]
            + [f"stats/{b}/{name}" for b in BOUNDARIES for name in stats])

    def test_states_read_as_float32_and_as_words(self):
        for index, boundary in enumerate(BOUNDARIES):
            dataset = self.file[f"states/{boundary}"]
            self.assertEqual(dataset.shape, (ROWS, HIDDEN))
            self.assertEqual(dataset.dtype, np.float32)
            np.testing.assert_array_equal(read_bits(dataset), expected_bits(index))
            np.testing.assert_array_equal(dataset[:], as_float32(expected_bits(index)))
            np.testing.assert_array_equal(dataset[100:103], as_float32(expected_bits(index)[100:103]))

    def test_the_type_is_bfloat16(self):
        kind = self.file["states/2"].id.get_type()
        self.assertEqual(kind.get_size(), 2)
        self.assertEqual(kind.get_fields(), (15, 7, 8, 0, 7))
        self.assertEqual(kind.get_ebias(), 127)
        self.assertEqual(kind.get_order(), h5py.h5t.ORDER_LE)

    def test_chunks_are_whole_pages_at_whole_pages(self):
        for path in ["states/0", "states/8", "tokens/ids", "tokens/loss_mask"]:
            dataset = self.file[path]
            self.assertIsNone(dataset.compression)
            for i in range(dataset.id.get_num_chunks()):
                chunk = dataset.id.get_chunk_info(i)
                self.assertEqual((chunk.byte_offset % 4096, chunk.size % 4096), (0, 0), path)

    def test_tokens(self):
        tokens = self.file["tokens"]
        rows = np.arange(ROWS, dtype=np.float32)
        bare = np.repeat(np.arange(len(TOKENS)), TOKENS) == 1  # the sample without logprobs
        for name, dtype in dict(ids="<i4", loss_mask="u1", logprob="<f4", entropy="<f4").items():
            self.assertEqual(tokens[name].dtype, np.dtype(dtype))
            self.assertEqual(tokens[name].shape, (ROWS,))
        np.testing.assert_array_equal(tokens["ids"][:], 7 * np.arange(ROWS))
        np.testing.assert_array_equal(tokens["logprob"][:], np.where(bare, np.nan, -0.25 * rows))
        np.testing.assert_array_equal(tokens["entropy"][:], np.where(bare, np.nan, 0.5 * rows))
        within = np.concatenate([np.arange(n) for n in TOKENS])
        np.testing.assert_array_equal(tokens["loss_mask"][:], within >= np.repeat(TOKENS, TOKENS) // 2)

    def test_samples(self):
        samples = self.file["samples"]
        np.testing.assert_array_equal(samples["row_offset"][:], np.cumsum([0] + TOKENS))
        self.assertEqual(list(samples["id"].asstr()[:]), [f"样本-{i}" for i in range(4)])
        self.assertEqual(list(samples["split"].asstr()[:]), ["train", "eval"] * 2)
        self.assertEqual(list(samples["source"].asstr()[:]), ["toolbench"] * 4)
        self.assertEqual(list(samples["finish_reason"].asstr()[:]), ["stop"] * 4)
        self.assertEqual(json.loads(samples["meta"].asstr()[0]), {"topic": "maths", "level": 3})
        self.assertEqual(samples["meta"].asstr()[1], "")
        for name, dtype, values in [
                ("prompt_tokens", "<i4", [n // 2 for n in TOKENS]), ("truncated", "u1", [0, 0, 1, 0]),
                ("source_index", "<i8", [0, 10, 20, 30])]:
            self.assertEqual(samples[name].dtype, np.dtype(dtype))
            self.assertEqual(list(samples[name]), values)
        self.assertEqual(samples["checksum"].dtype, np.dtype("<u8"))
        self.assertEqual(samples["row_offset"].dtype, np.dtype("<i8"))

    def test_statistics_are_those_of_the_rows(self):
        for index, boundary in enumerate(BOUNDARIES):
            stats = self.file[f"stats/{boundary}"]
            values = as_float32(expected_bits(index)).astype(np.float64)
            self.assertEqual(stats["count"][()], ROWS)
            self.assertEqual(stats["zero_rows"][()], 0)
            self.assertEqual(stats["nonfinite"][()], 0)
            np.testing.assert_allclose(stats["mean"][:], values.mean(0), rtol=1e-12)
            np.testing.assert_allclose(stats["m2"][:], values.var(0) * ROWS, rtol=1e-9)
            np.testing.assert_array_equal(stats["min"][:], values.min(0))
            np.testing.assert_array_equal(stats["max"][:], values.max(0))
            np.testing.assert_array_equal(stats["abs_max"][:], abs(values).max(0))
            bins = np.floor(8 * (np.log2(np.sqrt((values**2).mean(1))) + 16)).astype(int)
            np.testing.assert_array_equal(stats["row_rms_histogram"][:], np.bincount(bins, minlength=256))

    def test_statistics_by_class_are_those_of_the_rows(self):
        ids, mask, offsets = self.file["tokens/ids"][:], self.file["tokens/loss_mask"][:], self.file["samples/row_offset"][:]
        classes = np.where(ids >= self.file.attrs["first_special_token"], 1, np.where(mask == 1, 2, 3))
        classes[offsets[:-1]] = 0
        before = None
        for index, boundary in enumerate(BOUNDARIES):
            stats = self.file[f"stats/{boundary}"]
            values = as_float32(expected_bits(index)).astype(np.float64)
            bins = np.floor(8 * (np.log2(np.sqrt((values**2).mean(1))) + 16)).astype(int)
            histograms = stats["class_row_rms_histogram"][:].reshape(4, 256)
            for c in range(4):
                np.testing.assert_array_equal(histograms[c], np.bincount(bins[classes == c], minlength=256))
            self.assertEqual(stats["class_count"][:].tolist(), np.bincount(classes, minlength=4).tolist())
            cosines = np.zeros(ROWS)
            if before is not None:
                cosines = (values * before).sum(1) / np.linalg.norm(values, axis=1) / np.linalg.norm(before, axis=1)
            self.assertEqual(stats["class_compared"][:].tolist(), [0] * 4 if before is None else stats["class_count"][:].tolist())
            np.testing.assert_allclose(stats["class_cosine"][:], [cosines[classes == c].sum() for c in range(4)], rtol=1e-12)
            np.testing.assert_allclose(stats["class_squared_cosine"][:], [(cosines[classes == c] ** 2).sum() for c in range(4)], rtol=1e-12)
            before = values

    def test_attributes(self):
        attributes = self.file.attrs
        self.assertIn("T", attributes["created"])
        found = {name: attributes[name].tolist() if hasattr(attributes[name], "tolist") else attributes[name]
                 for name in attributes if name not in ("created", "rope", "options")}
        self.assertEqual(found, {
            "format": "statetap-shard", "version": 1, "complete": 1, "job": "job-1",
            "producer": "statetap 0.1.0", "model_name": "tiny-kimi", "model_digest": "0123456789abcdef",
            "quantization": "int4-g32", "hidden": 128, "layers": 8,
            "boundaries": [0, 2, 8], "layer_outputs": [-1, 1, 7],
            "taps": [0, 2], "tap_layer_outputs": [-1, 1], "final_norm": "pre",
            "rms_norm_eps": 1e-5, "inner_eps": 1e-6, "tokenizer_digest": "feed",
            "template_name": "kimi-k2.5", "template_digest": "beef", "template_mode": "instant",
            "first_special_token": 2000, "think_token": 150001, "think_end_token": 150002, "dtype": "bfloat16"})
        self.assertEqual(json.loads(attributes["rope"])["type"], "yarn")
        self.assertEqual(json.loads(attributes["options"]), {"mode": "generate"})

    def test_h5dump_prints_the_numbers(self):
        command = [os.environ["H5DUMP"], "-d", "/states/2[5,0;;1,4;]", self.path]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        printed = text.split("(5,0):")[1].split("\n")[0].split(",")
        np.testing.assert_allclose([float(p) for p in printed], as_float32(expected_bits(1)[5:6, :4])[0], rtol=1e-4)
        whole = subprocess.run([os.environ["H5DUMP"], "-H", self.path], check=True, capture_output=True, text=True)
        self.assertIn('GROUP "stats"', whole.stdout)


class Fp8ShardTest(unittest.TestCase):
    """The same values in 8 bits: stock h5py decodes them, and so does whoever knows e4m3."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        path = os.path.join(cls.folder.name, "example.h5")
        subprocess.run([os.environ["SHARD_EXAMPLE"], path, "fp8"], check=True)
        cls.file = h5py.File(path, "r")

    @classmethod
    def tearDownClass(cls):
        cls.file.close()
        cls.folder.cleanup()

    def test_codes_times_scales_are_the_states_within_half_a_step(self):
        self.assertEqual(self.file.attrs["dtype"], "float8_e4m3")
        for index, boundary in enumerate(BOUNDARIES):
            dataset, scales = self.file[f"states/{boundary}"], self.file[f"scales/{boundary}"]
            self.assertEqual(dataset.shape, (ROWS, HIDDEN))
            self.assertEqual(scales.shape, (ROWS,))
            self.assertEqual(scales.dtype, np.float32)
            self.assertTrue((np.log2(scales[:]) % 1 == 0).all())
            decoded = dataset[:].astype(np.float32) * scales[:][:, None]
            expected = as_float32(expected_bits(index))
            np.testing.assert_array_less(abs(decoded - expected), expected / 16 + 1e-30)

            codes = np.empty(dataset.shape, np.uint8)
            dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, codes, dataset.id.get_type())
            sign, exponent, mantissa = codes >> 7, (codes >> 3 & 15).astype(int), codes & 7
            magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
            np.testing.assert_array_equal(np.where(sign == 1, -magnitude, magnitude) * scales[:][:, None], decoded)

            stats = self.file[f"stats/{boundary}"]
            error = (decoded.astype(np.float64) - expected) ** 2
            np.testing.assert_allclose(stats["squared_error"][()], error.sum(), rtol=1e-9)


if __name__ == "__main__":
    unittest.main()
