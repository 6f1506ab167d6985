"""Tests of scripts/gpu-forecast: what the model counts, and that the page says where it is wrong.

    python3 -m unittest discover tests/scripts
"""

import copy
import re
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from gpu_model import groups, page, rows, verdict  # noqa: E402
from gpu_model.work import LLAMA_2_7B, LLAMA_3_70B  # noqa: E402

# Cases, units and, where they count, baselines as holobiont-bench names them (benches/src/gpu), and the row that each is.
CASES = (
    ("cuda-decode", "1 stream, 64 tokens behind 128", "tokens/s", "", "decode 1"),
    ("cuda-decode", "8 base streams, 64 tokens behind 128", "tokens/s", "", "decode 8 base"),
    ("cuda-decode", "8 streams on 8 adapters of rank 16, 64 tokens behind 128", "tokens/s", "", "decode 8 adapters"),
    ("cuda-decode", "1 stream, steps recorded as graphs, 64 tokens behind 128", "tokens/s", "holobiont, launch by launch", "decode 1 launches"),
    ("cuda-prefill", "2048 tokens in one pass", "TFLOP/s", "", "prefill 2048"),
    ("cuda-prefill", "2048 tokens in one pass", "tokens/s", "", "prefill 2048 tokens"),
    ("cuda-prefill", "2048 tokens in chunks of 512", "tokens/s", "", "prefill chunks tokens"),
    ("cuda-lora", "a step of 32 streams on 32 adapters of rank 16", "ms", "", "step 32 rank 16"),
    ("cuda-lora", "a step of 32 streams on 32 adapters of rank 16", "ms", "holobiont, 32 base streams", "step 32 base"),
    ("cuda-lora", "deltas of 32 adapters of rank 128, q k v of 8 layers", "GB/s of factors", "", "deltas rank 128"),
    ("cuda-fused", "first token of 512, rank 16, none of it on the device, workers: 8", "ms", "", "fused 512"),
    ("cuda-fused", "first token of 512, rank 16, none of it on the device, workers: 8", "ms", "holobiont, the base model", "prompt 512"),
    ("cuda-cold", "first token of a lone prompt of 128, rank 64, cpu-assist", "ms", "", "lone cpu-assist"),
    ("cuda-cold", "first token of a lone prompt of 128, rank 64, cpu-assist", "ms", "holobiont, cached", "lone cached"),
    ("cuda-link", "64 KiB from pinned memory", "GB/s", "", "link 64 KiB"),
    ("cuda-link", "an adapter of rank 64, 134.2 MB in blocks of 16 ranks, registered", "GB/s", "", "link rank 64"),
)


class Counts(unittest.TestCase):
    def test_the_seven_billion_shape_is_counted_as_the_benchmark_counts_it(self):
        # benches/src/gpu/work.rs has the same numbers.
        self.assertEqual((LLAMA_2_7B.block_weights, LLAMA_2_7B.head_weights), (6_476_005_376, 131_072_000))
        self.assertAlmostEqual((LLAMA_2_7B.weight_bytes + LLAMA_2_7B.kv_bytes(1, 164)) / 1e9, 13.30, 2)
        self.assertAlmostEqual((LLAMA_2_7B.linear_flops(2048) + LLAMA_2_7B.attention_flops(2048)) / 1e12, 27.63, 2)
        self.assertEqual(sum(LLAMA_2_7B.factor_bytes(16, "qkvo")) * LLAMA_2_7B.layers, 33_554_432)

    def test_the_seventy_billion_shape_gathers_four_outputs_and_reduces_two(self):
        self.assertAlmostEqual(LLAMA_3_70B.weight_bytes / 1e9, 139.0, 1)
        self.assertEqual(LLAMA_3_70B.gathered_bytes(), 2 * (8192 + 8192 + 28672 + 8192))
        self.assertEqual(LLAMA_3_70B.reduced_bytes(), 2 * 2 * 8192)
        gather, reduce = groups.exchanges(8)
        self.assertEqual((gather.bytes, reduce.bytes), (106_496 * 7 / 8, 2 * 32_768 * 7 / 8))

    def test_two_devices_read_half_each_and_need_more_than_half_the_time(self):
        one, two = rows.Model(LLAMA_3_70B), rows.Model(LLAMA_3_70B, devices=2)
        self.assertGreater(two.step_us(1), one.step_us(1) / 2)
        self.assertLess(two.step_us(1), one.step_us(1))


class Model(unittest.TestCase):
    def test_a_step_is_its_bytes_and_its_launches(self):
        model = rows.Model(constants=rows.Constants(copy_gbps=1000, product_us=0, short_us=0))
        self.assertAlmostEqual(model.step_us(1, 0), LLAMA_2_7B.weight_bytes / 1e6)
        slower = rows.Model(constants=rows.Constants(copy_gbps=1000, product_us=2, short_us=1))
        self.assertAlmostEqual(slower.step_us(1, 0) - model.step_us(1, 0), 32 * (7 + 4 * 2) + 2)

    def test_many_streams_are_bound_by_the_second_cache(self):
        model = rows.Model(constants=rows.Constants(l2_gbps=1000))
        self.assertGreater(model.step_us(32, 0), LLAMA_2_7B.weight_bytes * 2 / 1e6)
        self.assertLess(model.step_us(16, 0), LLAMA_2_7B.weight_bytes * 2 / 1e6)

    def test_more_ranks_and_more_adapters_take_longer(self):
        model = rows.Model()
        times = [model.adapters_us(32, rank) for rank in (8, 16, 32, 64, 128)]
        self.assertEqual(times, sorted(times))
        self.assertLess(model.adapters_us(8, 16), model.adapters_us(32, 16))

    def test_an_adapter_travels_by_the_link_or_by_the_host(self):
        self.assertEqual(rows.Model().pieces(64)[0], 768)
        slow_link = rows.Model(constants=rows.Constants(link_gbps=1, piece_us=1))
        self.assertAlmostEqual(slow_link.upload_us(64), slow_link.pieces(64)[1] / 1e3)
        slow_host = rows.Model(constants=rows.Constants(piece_us=100))
        self.assertAlmostEqual(slow_host.upload_us(64), 768 * 100)

    def test_every_constant_says_where_it_comes_from_and_names_rows_that_exist(self):
        known = {row.id for row in rows.rows()}
        for name, source in rows.FITTED.items():
            self.assertIn(name, rows.Constants._fields)
            self.assertLessEqual(set(source) if isinstance(source, tuple) else set(), known, name)


class Page(unittest.TestCase):
    def test_the_page_is_what_the_script_writes_and_the_model_misses_what_it_says(self):
        self.assertEqual(page.faults(page.newest_run()), [])
        self.assertEqual(page.PAGE.read_text(), page.page())

    def test_a_measured_row_that_is_far_off_is_a_fault(self):
        run = copy.deepcopy(page.newest_run())
        next(row for row in run["rows"] if row["id"] == "decode 1")["second"] = 150
        self.assertEqual(page.faults(run), ["decode 1: forecast 192 tokens/s, seen 150: +28%"])

    def test_a_miss_that_is_none_any_more_is_a_fault(self):
        run = copy.deepcopy(page.newest_run())
        next(row for row in run["rows"] if row["id"] == "link 16 MiB")["second"] = 50
        self.assertEqual(page.faults(run), ["link 16 MiB is in the list of misses, but its forecast is not off"])

    def test_a_row_that_the_model_does_not_know_is_a_fault(self):
        run = copy.deepcopy(page.newest_run())
        run["rows"].append({"id": "nobody", "second": 1, "better": "higher"})
        self.assertEqual(page.faults(run), ["nobody was measured, but the model has no such row"])

    def test_rows_without_a_measurement_are_marked_as_forecasts(self):
        line = next(line for line in page.results(page.newest_run()).splitlines() if "16 KiB" in line)
        self.assertIn("(forecast)", line)

    def test_a_goal_is_met_or_missed_by_the_side_that_counts(self):
        row = {"second": 95, "beside": [{"value": 100, "name": "peer"}], "goal": 0.9}
        self.assertEqual(page.comparison(row | {"better": "higher"})[2:], ("at least 0.9", "yes"))
        self.assertEqual(page.comparison(row | {"better": "lower"})[2:], ("at most 0.9", "**no**"))

    def test_each_case_of_the_benchmarks_is_one_row_of_the_forecasts(self):
        for bench, case, unit, peer, id_ in CASES:
            row = {"bench": bench, "case": case, "unit": unit, "ours": 1.0, "peer": 2.0, "peer_name": peer}
            found = [forecast.id for forecast in rows.rows() if forecast.value and verdict.seen(forecast, [row]) == (2.0 if peer else 1.0)]
            self.assertEqual(found, [id_], case)

    def test_what_changed_since_a_run_is_forecast_as_it_is_now(self):
        assist = next(row for row in rows.rows() if row.id == "lone cpu-assist")
        self.assertLess(assist.now, assist.value / 2)


class Verdict(unittest.TestCase):
    RUN = [
        {"bench": "cuda-decode", "case": CASES[0][1], "unit": "tokens/s", "ours": 100.0, "peer": 37.0, "peer_name": "transformers"},
        {"bench": "cuda-lora", "case": "a step of 32 streams on 32 adapters of rank 16", "unit": "ms", "ours": 8.5, "peer": 3.0,
         "peer_name": "holobiont, 32 base streams"},
        {"bench": "cuda-cold", "case": "first token of a lone prompt of 128, rank 64, cpu-assist", "unit": "ms", "ours": 7.5,
         "peer": 8.4, "peer_name": "holobiont, cached"},
    ]  # fmt: skip

    def test_a_run_is_compared_with_the_forecasts_and_the_furthest_off_comes_first(self):
        found = {line["row"]: line for line in verdict.verdicts(self.RUN)}
        self.assertEqual({id_: line["verdict"] for id_, line in found.items()}, {
            "decode 1": "WORSE", "step 32 base": "better", "step 32 rank 16": "as forecast", "lone cpu-assist": "as forecast",
            "lone cached": "WORSE",
        })  # fmt: skip
        self.assertEqual([line["never_ran"] for line in found.values()].count(True), 1)
        offs = [abs(line["off"]) for line in verdict.verdicts(self.RUN)]
        self.assertEqual(offs, sorted(offs, reverse=True))

    def test_the_forecasts_are_those_of_the_device_that_ran(self):
        copy = {"bench": "cuda-lora", "case": "deltas of 32 adapters of rank 16, q k v of 8 layers", "unit": "GB/s of factors",
                "ours": 990.0, "peer": 6042.0, "peer_name": "a copy on the device"}  # fmt: skip
        of = lambda run: next(line["forecast"] for line in verdict.verdicts(run) if line["row"] == "decode 1")  # noqa: E731
        self.assertEqual(verdict.constants_of([copy]).copy_gbps, 6042.0)
        self.assertGreater(of([*self.RUN, copy]), 1.5 * of(self.RUN))

    def test_without_results_there_is_no_verdict(self):
        self.assertEqual(verdict.verdicts([]), [])

    def test_the_table_marks_what_never_ran(self):
        lines = verdict.table(verdict.verdicts(self.RUN), page.number)
        self.assertEqual(sum("*" in line for line in lines), 1)


if __name__ == "__main__":
    unittest.main()
