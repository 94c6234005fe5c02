"""`where` of the Python package against the cases that the C++ filter is held to."""
import json
import os
import pathlib
import unittest

from statetap import where

CASES = json.loads((pathlib.Path(os.environ["STATETAP_ROOT"]) / "tests/data/sample_filter_cases.json").read_text())


class WhereTest(unittest.TestCase):
    def test_cases(self):
        for case in CASES["cases"]:
            with self.subTest(where=case["where"][:60]):
                if "error" in case:
                    with self.assertRaises(ValueError) as refused:
                        where.parse(case["where"])
                    for part in case["error"]:
                        self.assertIn(part, str(refused.exception))
                else:
                    self.assertIs(where.parse(case["where"])(CASES["facts"][case["facts"]]), case["holds"])

    def test_fields_are_those_that_are_read(self):
        self.assertEqual(where.fields_of('split == "train" or not (meta.x > 1 and tokens in (1, 2))'), {"split", "meta_json", "tokens"})
        self.assertEqual(where.fields_of(" "), set())


if __name__ == "__main__":
    unittest.main()
