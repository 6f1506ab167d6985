"""Tests of scripts/verify-models: what counts as agreement, and the table.

    python3 -m unittest discover tests/scripts
"""

import json
import sys
import tempfile
import unittest
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from verified import comparison, models, table  # noqa: E402


@dataclass(frozen=True)
class Step:
    token: int
    margin: float
    top: dict[int, float]


STEPS = [Step(7, 0.5, {7: -0.1, 8: -0.6}), Step(8, 0.01, {8: -1.0, 7: -1.01}), Step(9, 2.0, {9: -0.2, 1: -9.0})]


class Comparison(unittest.TestCase):
    def test_equal_answers_have_the_largest_error_of_all_listed_tokens(self):
        answers = [([7, 8, 9], [{7: -0.1, 8: -0.7}, {8: -1.0, 7: -1.01}, {9: -0.2, 5: -3.0}])]
        agreement = comparison.compare([STEPS], answers)
        self.assertAlmostEqual(agreement.largest_error, 0.1)
        self.assertEqual((agreement.equal_answers, agreement.answers, agreement.widest_margin), (1, 1, 0.0))
        self.assertTrue(agreement.holds(0.11))
        self.assertFalse(agreement.holds(0.09))

    def test_what_follows_the_first_other_token_does_not_count(self):
        answers = [([7, 7, 3], [{7: -0.1}, {7: -1.0, 8: -1.005}, {3: 0.0, 9: -50.0}])]
        agreement = comparison.compare([STEPS], answers)
        self.assertEqual((agreement.equal_answers, agreement.widest_margin), (0, 0.01))
        self.assertAlmostEqual(agreement.largest_error, 0.01)
        self.assertTrue(agreement.holds(0.02))

    def test_an_answer_that_parts_where_the_margin_is_wide_does_not_hold(self):
        answers = [([8, 8, 9], [{7: -0.1, 8: -0.6}, {}, {}])]
        self.assertFalse(comparison.compare([STEPS], answers).holds(0.2))

    def test_an_answer_that_is_too_short_is_an_error(self):
        with self.assertRaises(ValueError):
            comparison.compare([STEPS], [([7], [{7: -0.1}])])


class Table(unittest.TestCase):
    def setUp(self):
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.enterContext(mock.patch.object(table, "RECORDS", folder))
        self.record = folder / f"{models.MODELS[0].name}.json"

    def test_a_record_has_a_row_for_base_and_adapter_and_names_what_is_missed_or_not_measured(self):
        good = {"largest_error": 0.00002, "equal_answers": 4, "answers": 4, "tolerance": 1e-3, "holds": True}
        bad = {"largest_error": 1.75, "equal_answers": 3, "answers": 4, "tolerance": 1.5, "holds": False}
        record = {
            "exact": {"base": good, "lora": good},
            "served": {"numbers": "activations mixed", "base": bad | {"holds": True, "largest_error": 0.5}, "lora": bad},
            "perplexity": {"transformers": 37.0849, "exact": 37.0851, "served": 37.1, "llama.cpp": None},
            "machine": {"processor": "a processor"}, "date": "2026-11-30", "commit": "abc",
        }  # fmt: skip
        self.record.write_text(json.dumps(record))
        text = table.tables()
        self.assertIn("| base | 2.0e-05 | 4 of 4 | 0.50 | 3 of 4 |", text)
        self.assertIn("| LoRA by PEFT | 2.0e-05 | 4 of 4 | 1.75 **missed** | 3 of 4 |", text)
        self.assertIn("| 37.0849 | 37.0851 | 37.1000 | not measured |", text)
        self.assertIn("activations mixed", text)

    def test_without_records_the_table_says_so(self):
        self.assertEqual(table.tables(), "No model has been verified yet.")

    def test_every_model_is_one_that_is_fetched(self):
        fetched = (ROOT / "scripts/fetch-model").read_text()
        for model in models.MODELS:
            self.assertIn(f"file={model.file}", fetched)
            self.assertIn(f"    {model.name})", fetched)


if __name__ == "__main__":
    unittest.main()
