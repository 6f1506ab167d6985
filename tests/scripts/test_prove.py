"""Tests of scripts/prove: its records, readings and rules, and how it runs commands and goes on.

    python3 -m unittest discover tests/scripts
"""

import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from proof import pages, readings, rules, run  # noqa: E402
from proof.claim import NOT_HERE, NOT_REPRODUCED, REPRODUCED, Chart, Claim, Figure, Group  # noqa: E402
from proof.claims import GROUPS  # noqa: E402
from proof.commands import CommandError, NotHere, Program, Tests, Tools, simulator, tests  # noqa: E402

CLAIMS = [claim for group in GROUPS for claim in group.claims]

ROW = {
    "bench": "b", "case": "a token, masked", "unit": "ms", "better": "lower", "ours": 12.0, "peer": 10.0, "ratio": 0.833,
    "peer_name": "unmasked", "runs": 3, "ours_range": [11.0, 14.0], "peer_range": [9.0, 10.5],
}  # fmt: skip


def printed(*lines):
    return "\n".join(["a line for people", *map(json.dumps, lines)])


class Records(unittest.TestCase):
    def test_every_claim_has_an_id_of_its_own_that_can_name_a_file(self):
        ids = [claim.id for claim in CLAIMS]
        self.assertEqual(sorted(set(ids)), sorted(ids))
        self.assertEqual([id for id in ids if not re.fullmatch(r"[A-Za-z0-9-]+", id)], [])

    def test_every_claim_that_runs_says_how_it_is_read_and_judged(self):
        for claim in CLAIMS:
            if not isinstance(claim.command, NotHere):
                self.assertTrue(claim.read and claim.rule and claim.unit, claim.id)

    def test_every_test_that_a_claim_names_is_in_the_tree(self):
        listed = subprocess.run(["git", "grep", "-ohE", r"fn [a-z0-9_]+\(", "--", "*.rs"], cwd=ROOT, capture_output=True, text=True, check=True)
        functions = set(re.findall(r"fn (\w+)\(", listed.stdout))
        named = {name for claim in CLAIMS if isinstance(claim.command, Tests) for name in claim.command.names}
        self.assertEqual(sorted(named - functions), [])

    def test_the_papers_items_are_all_there(self):
        wanted = ["C-20", "C-23", "E-22", "E-23", "E-28", "L-20", "L-24", "S-14", "S-19", "S-20", *(f"masking-T{n}" for n in range(5))]
        ids = [claim.id for claim in CLAIMS]
        self.assertEqual([item for item in wanted if not any(id == item or id.startswith(f"{item}-") for id in ids)], [])

    def test_every_chart_has_claims_with_labels(self):
        for group in GROUPS:
            for chart in group.charts:
                labels = [claim.label for claim in group.claims if claim.id.startswith(chart.prefix) and claim.label]
                self.assertTrue(len(labels) > 1 and len(set(labels)) == len(labels), chart.prefix)


class Readings(unittest.TestCase):
    def test_a_ratio_is_within_what_both_ranges_allow(self):
        figure = readings.row("masked$")(printed(ROW))
        self.assertEqual((figure.value, figure.runs), (0.833, 3))
        self.assertAlmostEqual(figure.low, 9 / 14)
        self.assertAlmostEqual(figure.high, 10.5 / 11)
        faster = ROW | {"better": "higher", "ratio": 1.2}
        self.assertAlmostEqual(readings.row("masked$")(printed(faster)).high, 14 / 9)

    def test_a_share_is_ours_over_the_peers(self):
        figure = readings.row("masked$", "^unmasked$", readings.share)(printed(ROW))
        self.assertEqual((figure.value, figure.low, figure.high), (1.2, 11 / 10.5, 14 / 9))

    def test_a_row_that_is_missing_or_there_twice_is_an_error(self):
        for lines in ([], [ROW, ROW]):
            with self.assertRaises(CommandError):
                readings.row("masked$")(printed(*lines))

    def test_a_variant_has_the_interval_of_its_seeds(self):
        ratios = {"ttft_ms": {"mean": 1.5, "low": 1.4, "high": 1.6}}
        wom = {"variant": "wom", "ratios": ratios, "invalid_share": {"mean": 0.2, "half_interval": 0.05}}
        output = printed({"settings": {}, "seeds": 20}, {"variant": "elora"}, wom)
        self.assertEqual(readings.variant("wom", "ttft_ms")(output), Figure(1.5, 1.4, 1.6, 20))
        self.assertEqual(readings.variant("wom", "invalid_share", beside=False)(output), Figure(0.2, 0.2 - 0.05, 0.25, 20))

    def test_a_gain_is_in_percent_of_the_others_time(self):
        idle = {"policy": "most-idle", "kernel": "true-rank", "tpot_ratio": {"mean": 1.25, "low": 1.0, "high": 2.0}}
        output = printed({"seeds": 4}, idle, idle | {"kernel": "padded"})
        self.assertEqual(readings.gain("most-idle")(output), Figure(20.0, 0.0, 50.0, 4))

    def test_tests_that_failed_count_and_no_test_is_an_error(self):
        summary = "     Summary [   2.1s] 5 tests run: 4 passed (1 slow), 1 failed, 3262 skipped"
        self.assertEqual(readings.passed(summary), Figure(80.0, 80.0, 80.0, 5))
        with self.assertRaises(CommandError):
            readings.passed("     Summary [   0.0s] 0 tests run: 0 passed, 3267 skipped")

    def test_printed_numbers_are_read_wherever_they_stand(self):
        figure = readings.printed(r"T4, \w+: error ([\d.e-]+)")("T4, off: error 2e-5\nT4, paper: error 4.1e-4\n")
        self.assertEqual((figure.low, figure.high, figure.runs), (2e-5, 4.1e-4, 2))
        with self.assertRaises(CommandError):
            readings.printed(r"T4 (\d)")("nothing")


class Rules(unittest.TestCase):
    def test_an_effect_needs_its_sign_for_certain_and_half_its_size(self):
        rule = rules.half_of_the_effect(1.5)
        for figure, holds in [((1.3, 1.1, 1.5), True), ((1.2, 1.1, 1.3), False), ((1.3, 0.9, 1.7), False)]:
            self.assertEqual(rule.holds(Figure(*figure, 20)), holds, figure)
        self.assertTrue(rules.half_of_the_effect(0.6).holds(Figure(0.75, 0.7, 0.9, 20)))

    def test_bounds_hold_at_their_ends(self):
        half = Figure(0.5, 0.4, 0.6, 3)
        self.assertTrue(rules.at_least(0.5).holds(half) and rules.at_most(0.5).holds(half) and rules.within(0.5, 0.0).holds(half))
        self.assertFalse(rules.exactly(0.5).holds(half) or rules.above(0.4).holds(half))


class Runs(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.enterContext(contextlib.redirect_stderr(io.StringIO()))
        self.records = self.folder / "docs"
        self.enterContext(mock.patch.object(run, "RECORDS", self.records))

    def program(self, line, status=0):
        """A program that prints a line and notes that it ran."""
        path = self.folder / "prints"
        path.write_text(f"#!/bin/sh\necho ran >>{self.folder}/runs\necho '{json.dumps(line)}'\nexit {status}\n")
        path.chmod(0o755)
        return Program("prints", (), "no model", "1")

    def claim(self, id, command, rule=rules.at_least(1)):
        return Claim(id, "A claim.", "a paper", command, readings.single("figure"), "times", rule, paper=2)

    def session(self, **changes):
        given = {"out": self.folder, "commit": "abc", "tools": Tools(self.folder), "is_quick": False, "again": False}
        return run.Session(**given | changes)

    def runs(self):
        path = self.folder / "runs"
        return len(path.read_text().split()) if path.exists() else 0

    def test_claims_with_one_command_share_a_run_and_have_a_file_each(self):
        command = self.program({"figure": 1.5})
        claims = [self.claim("low", command), self.claim("high", command, rules.at_least(2))]
        self.assertEqual(self.session().run(claims), [])
        self.assertEqual(self.runs(), 1)
        records = {claim.id: run.recorded(claim, self.folder) for claim in claims}
        self.assertEqual((records["low"]["verdict"], records["high"]["verdict"]), (REPRODUCED, NOT_REPRODUCED))
        self.assertEqual((records["low"]["figure"], records["low"]["paper"], records["low"]["setup"]["commit"]), (1.5, 2, "abc"))

    def test_what_is_done_is_not_run_again_unless_asked_or_changed(self):
        claim = self.claim("one", self.program({"figure": 1}))
        for session, runs in [({}, 1), ({}, 1), ({"again": True}, 2), ({"commit": "def"}, 3), ({"commit": "def-dirty"}, 4)]:
            self.session(**session).run([claim])
            self.assertEqual(self.runs(), runs, session)
        self.session(commit="def-dirty").run([claim])
        self.assertEqual(self.runs(), 5, "a changed tree is another one each time")

    def test_a_command_without_figures_is_a_failure_and_leaves_no_verdict(self):
        claim = self.claim("one", self.program({"other": 1}, status=1))
        [failure] = self.session().run([claim])
        self.assertIn("one: ", failure)
        self.assertIsNone(run.recorded(claim, self.folder))

    def test_what_is_missing_is_said_in_the_file_and_tried_again(self):
        claim = self.claim("one", Program("absent", (), "no model", "1"))
        self.assertEqual(self.session().run([claim]), [])
        record = run.recorded(claim, self.folder)
        self.assertEqual((record["verdict"], record["reason"]), (NOT_HERE, "absent is not built: scripts/build"))
        self.assertFalse(self.session().is_done(claim))

    def test_a_claim_that_held_and_does_not_any_more_is_a_failure(self):
        claim = self.claim("one", self.program({"figure": 0.5}))
        self.assertEqual(self.session().run([claim]), [], "a claim that never held is none")
        self.records.mkdir()
        (self.records / "one.json").write_text(json.dumps({"verdict": REPRODUCED}))
        [failure] = self.session(again=True).run([claim])
        self.assertIn("not reproduced any more", failure)

    def test_a_quick_run_has_fewer_seeds_and_says_so(self):
        command = simulator("compare", "--scenario", "chat", seeds=20)
        self.assertEqual(command.shortened().shown(), "holobiont-simulator compare --scenario chat --seeds 4")
        self.assertEqual(command.shortened().seed, "1 to 4")
        self.assertEqual(tests("a_test").shortened(), tests("a_test"))


class Pages(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.page = self.folder / "README.md"
        self.page.write_text("Before.\n<!-- written by scripts/prove --page: claims -->\n<!-- end of what is written -->\nAfter.\n")
        for name, path in [("PAGE", self.page), ("HTML", self.folder / "claims.html"), ("PICTURES", self.folder / "pictures")]:
            self.enterContext(mock.patch.object(pages, name, path))
        self.enterContext(mock.patch.object(run, "RECORDS", self.folder))

    def group(self, record):
        claim = Claim("one", "A <claim>.", "a paper", Program("x", (), "", "1"), None, "times", rules.at_least(1), 2, "label")
        setup = {"command": "x", "machine": {"processor": "a processor"}, "date": "2026-11-30"}
        (self.folder / "one.json").write_text(json.dumps({"id": "one", "setup": setup, "rule": "at least 1", "runs": 3, **record}))
        return Group("Group", "About.", (claim,), (Chart("one", "A chart"),))

    def test_a_page_has_figure_interval_and_verdict_and_is_checked(self):
        group = self.group({"figure": 1.5, "unit": "times", "interval": [1.25, 2.0], "verdict": REPRODUCED})
        pages.write([group], check=False)
        text = self.page.read_text()
        self.assertIn("| [one](claims/one.json) | A <claim>. (a paper) | 2 | 1.5 [1.25, 2] times | at least 1 | reproduced |", text)
        self.assertTrue(text.startswith("Before.") and text.endswith("After.\n"))
        self.assertIn("A &lt;claim&gt;.", (self.folder / "claims.html").read_text())
        self.assertIn("<svg", (self.folder / "pictures/one.svg").read_text())
        pages.write([group], check=True)
        self.page.write_text(text.replace("1.5", "1.6"))
        with self.assertRaises(SystemExit):
            pages.write([group], check=True)

    def test_a_verdict_that_its_figure_does_not_bear_out_is_named(self):
        true = self.group({"figure": 1.5, "interval": [1.5, 1.5], "verdict": REPRODUCED})
        self.assertEqual(list(pages.contradictions([true])), [])
        false = self.group({"figure": 0.5, "interval": [0.5, 0.5], "verdict": REPRODUCED})
        self.assertEqual(list(pages.contradictions([false])), ["one"])

    def test_numbers_keep_three_digits(self):
        values = {0: "0", 0.00004: "4.0e-05", 0.0345: "0.0345", 1.2345: "1.23", 99.5: "99.5", 12345.6: "12,346"}
        self.assertEqual({value: pages.number(value) for value in values}, values)


if __name__ == "__main__":
    unittest.main()
