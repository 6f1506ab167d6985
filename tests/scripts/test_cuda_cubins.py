"""Tests of scripts/cuda-cubins: the format of the files, and what is refused.

    python3 -m unittest discover tests/scripts
"""

import tempfile
import unittest
from pathlib import Path
from unittest import mock

from loaded import script  # first: it finds the modules of scripts

from cuda_code import Failure

ROOT = Path(__file__).resolve().parents[2]

cuda_cubins = script("cuda-cubins")

PTX = {"gemv": "// source 1 of gemv.cu\n", "lora": "// source 2 of lora.cu\n"}
CODE = {"gemv": b"\x7fELF\n\n1", "lora": b"\x7fELF 2"}


def file(gpu="sm_90"):
    return cuda_cubins.bundle(gpu, PTX, CODE)


class Format(unittest.TestCase):
    def test_a_file_names_the_ptx_that_each_code_was_made_of(self):
        expected = {name: cuda_cubins.sha256(text.encode()) for name, text in PTX.items()}
        self.assertEqual(cuda_cubins.contents(file(), "sm_90"), expected)

    def test_a_file_of_another_gpu_is_refused(self):
        with self.assertRaisesRegex(Failure, "no machine code for sm_80"):
            cuda_cubins.contents(file(), "sm_80")

    def test_damaged_code_is_refused(self):
        data = bytearray(file())
        data[-1] ^= 1
        with self.assertRaisesRegex(Failure, "lora for sm_90 is damaged"):
            cuda_cubins.contents(bytes(data), "sm_90")
        for data in (file()[:-1], file() + b"1"):
            with self.assertRaises(Failure):
                cuda_cubins.contents(data, "sm_90")

    def test_the_program_reads_the_format_that_is_written(self):
        source = (ROOT / "kernels/src/cuda/cubins.rs").read_text()
        self.assertIn(f'const MAGIC: &str = "{cuda_cubins.MAGIC}";', source)

    def test_every_gpu_is_in_the_guide(self):
        guide = (ROOT / "docs/guides/gpu.md").read_text()
        for gpu in cuda_cubins.GPUS:
            self.assertIn(f"{gpu[3:-1]}.{gpu[-1]}", guide)


class Check(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.enterContext(mock.patch.object(cuda_cubins, "archived", lambda: PTX))
        for gpu in cuda_cubins.GPUS:
            (self.folder / f"{gpu}.cubins").write_bytes(file(gpu))

    def test_whole_files_of_the_archived_ptx_pass(self):
        cuda_cubins.check(self.folder)

    def test_a_missing_file_and_one_of_other_ptx_are_named(self):
        with mock.patch.object(cuda_cubins, "archived", lambda: PTX | {"lora": "other"}):
            with self.assertRaisesRegex(Failure, "sm_80.cubins was made of other PTX"):
                cuda_cubins.check(self.folder)
        (self.folder / "sm_120.cubins").unlink()
        with self.assertRaisesRegex(FileNotFoundError, "sm_120.cubins"):
            cuda_cubins.check(self.folder)


if __name__ == "__main__":
    unittest.main()
