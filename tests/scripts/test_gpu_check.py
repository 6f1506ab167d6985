"""Tests of scripts/gpu-check with programs that only say what real ones would.

    python3 -m unittest discover tests/scripts
"""

import contextlib
import io
import json
import os
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from loaded import script  # first: it finds the modules of scripts

ROOT = Path(__file__).resolve().parents[2]

gpu_check, gpu_pack = script("gpu-check"), script("gpu-pack")

DECODE = {"bench": "cuda-decode", "case": "1 stream, 64 tokens behind 128", "unit": "tokens/s", "ours": 191.0, "peer": 227.0,
          "peer_name": "a limit", "ratio": 0.84, "target": ">= 0.85", "met": False}  # fmt: skip
LINK = {"bench": "cuda-link", "case": "64 KiB from pinned memory", "unit": "GB/s", "ours": 20.0, "peer": 2.4,
        "peer_name": "pageable memory", "ratio": 8.3}  # fmt: skip
BENCH = f"""#!/bin/sh
case " $* " in
    *" cuda-decode "*) echo '{json.dumps(DECODE)}' ;;
    *" cuda-link "*) echo '{json.dumps(LINK)}' ;;
esac
"""


class Run(unittest.TestCase):
    def setUp(self):
        self.root = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.enterContext(mock.patch.object(gpu_check, "ROOT", self.root))
        self.enterContext(mock.patch.object(gpu_check, "cuda_device", lambda _: ("a GPU", "13.0")))
        self.enterContext(mock.patch.object(gpu_check, "find_cublas", lambda _: "none"))
        self.enterContext(mock.patch.object(gpu_check, "find_sanitizer", lambda: None))
        self.enterContext(mock.patch.dict(os.environ, {"HOLOBIONT_TORCH_PYTHON": "/bin/false", "PATH": "/bin:/usr/bin"}))
        (self.root / "gpu-check.json").write_text(json.dumps({"commit": "abc", "tests": ["kernels-cuda"]}))
        self.program("programs/holobiont-bench", BENCH)
        self.program("programs/deps/kernels-cuda", "#!/bin/sh\necho 'test result: ok. 3 passed'\n")

    def program(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def check(self, *arguments):
        """Exit code, the report, and the JSON lines of a run."""
        out = self.root / "out"
        with mock.patch.object(sys, "argv", ["gpu-check", "--out", str(out), *arguments]):
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                code = gpu_check.main()
        lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
        return code, (out / "report.txt").read_text(), lines

    def test_what_no_gpu_has_run_comes_first_and_sanitizers_last(self):
        _, _, lines = self.check()
        self.assertEqual([line["part"] for line in lines if "part" in line], [
            "machine", "cuda-link cuda-cold cuda-fused", "peer", "cuda-decode cuda-prefill cuda-lora", "tests kernels-cuda",
            "answers", "memcheck", "racecheck",
        ])  # fmt: skip

    def test_a_run_ends_with_verdicts_beside_the_forecasts(self):
        code, report, lines = self.check()
        self.assertEqual(code, 3, "a goal is missed")
        found = {line["row"]: line["verdict"] for line in lines if "verdict" in line}
        self.assertEqual(found, {"decode 1": "as forecast", "link 64 KiB": "better"})
        self.assertIn("better       link, one copy of 64 KiB, pinned", report)

    def test_a_failed_part_is_named_and_the_others_go_on(self):
        self.program("programs/holobiont-bench", "#!/bin/sh\nexit 1\n")
        code, report, lines = self.check()
        self.assertEqual(code, 1)
        outcomes = {line["part"]: line["outcome"] for line in lines if "part" in line}
        self.assertEqual((outcomes["cuda-decode cuda-prefill cuda-lora"], outcomes["tests kernels-cuda"]), ("FAILED", "passed"))
        self.assertIn("2 parts failed, 0 goals missed", report)

    def test_named_parts_alone_run(self):
        _, _, lines = self.check("--quick", "changed", "tests")
        self.assertEqual([line["part"] for line in lines if "part" in line],
                         ["machine", "cuda-link cuda-fused", "tests kernels-cuda"])  # fmt: skip


class Package(unittest.TestCase):
    def test_all_that_gpu_check_imports_of_ours_is_packed(self):
        packed = set(gpu_pack.SCRIPTS)
        self.assertTrue(all((ROOT / name).exists() for name in packed))
        modules = {f"scripts/gpu_model/{name}.py" for name in ("__init__", "rows", "verdict", "work")}
        self.assertLessEqual(modules, packed)
        for name in modules:
            for line in (ROOT / name).read_text().splitlines():
                if line.startswith("from gpu_model."):
                    self.assertIn(f"scripts/gpu_model/{line.split()[1].removeprefix('gpu_model.')}.py", packed)

    def test_every_part_has_a_limit(self):
        self.assertEqual(set(gpu_check.LIMITS_S), {"machine", "changed", "peer", "benchmarks", "tests", "answers", "memcheck", "racecheck"})


if __name__ == "__main__":
    unittest.main()
