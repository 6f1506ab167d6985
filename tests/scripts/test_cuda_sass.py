"""Tests of scripts/cuda-sass: what is read from machine code, the figures of small kernels, and the table.

    python3 -m unittest discover tests/scripts
"""

import unittest
from pathlib import Path
from unittest import mock

from loaded import script  # first: it finds the modules of scripts

import cuda_code
from sass import code, figures, table

ROOT = Path(__file__).resolve().parents[2]


def disassembly(*lines, name="sample"):
    """Text like nvdisasm's: labels end in a colon, all else is an instruction."""
    text = [f"\t.section\t.text.{name},\"ax\",@progbits", '\t.sectionflags\t@"SHF_BARRIERS=1"', f"{name}:", f".text.{name}:"]
    for at, line in enumerate(lines):
        text.append(line if line.endswith(":") else f"        /*{at * 16:04x}*/                   {line} ;")
    return "\n".join([*text, "\t.section\t.nv.constant0,\"a\"", ""])


def figures_of(*lines, threads=256, registers=64, shared=0):
    return figures.figures(code.kernels(disassembly(*lines))["sample"], 90, threads, registers, shared)


# Two loads of 16 bytes a turn, used by a product behind a barrier.
STREAM = (
    "LDC.64 R40, c[0x0][0x210]",
    ".L_x_1:",
    "LDG.E.128 R8, desc[UR4][R2.64]",
    "LDG.E.128 R12, desc[UR4][R2.64+0x100]",
    "BAR.SYNC.DEFER_BLOCKING 0x0",
    "HMMA.16816.F32.BF16 R16, R8, R12, R16",
    "ISETP.GE.U32.AND P0, PT, R20, R21, PT",
    "@!P0 BRA `(.L_x_1)",
    "EXIT",
)


class Reading(unittest.TestCase):
    def test_an_instruction_has_a_guard_a_name_and_operands(self):
        parsed = code.instruction("        /*05e0*/              @!P0 LDG.E.NA.LTC128B.128 R12, desc[UR6][R30.64+0x80] ;")
        self.assertEqual((parsed.guard, parsed.base, parsed.operands), ("@!P0", "LDG", ["R12", "desc[UR6][R30.64+0x80]"]))
        self.assertEqual(figures.loaded(parsed), 16)
        self.assertEqual((figures.written(parsed), figures.read(parsed)), ({12, 13, 14, 15}, {30, 31}))

    def test_what_is_no_instruction_is_passed_over(self):
        for line in ("\t.align\t128", ".L_x_1:", "", "//--------- .text.sample"):
            self.assertIsNone(code.instruction(line))

    def test_stores_and_products_read_all_registers_of_an_operand(self):
        store = code.instruction("        /*0000*/  STG.E.64 desc[UR4][R2.64], R6 ;")
        product = code.instruction("        /*0000*/  HMMA.16816.F32 R16, R8, R12, R20 ;")
        self.assertEqual((figures.written(store), figures.read(store)), (set(), {2, 3, 6, 7}))
        self.assertEqual(figures.written(product), {16, 17, 18, 19})
        self.assertEqual(figures.read(product), {8, 9, 10, 11, 12, 13, 20, 21, 22, 23})

    def test_blocks_end_at_branches_and_labels(self):
        graph = code.kernels(disassembly(*STREAM))["sample"]
        self.assertEqual([block.follows for block in graph], [[1], [1, 2], []])
        self.assertEqual([loop.blocks for loop in code.loops(graph, code.dominators(graph))], [[1]])

    def test_an_unconditional_branch_has_one_target(self):
        graph = code.kernels(disassembly("BRA `(.L_x_2)", "NOP", ".L_x_2:", "BRA.U UP0, `(.L_x_2)", "EXIT"))["sample"]
        self.assertEqual(graph[0].follows, [2])
        self.assertEqual(code.order(graph), [0, 2] if not graph[2].follows[1:] else [0, 2, 3])

    def test_several_kernels_are_apart(self):
        text = disassembly("EXIT", name="one") + disassembly("NOP", "EXIT", name="other")
        self.assertEqual({name: len(graph[0].instructions) for name, graph in code.kernels(text).items()}, {"one": 1, "other": 2})


class OfAKernel(unittest.TestCase):
    def test_a_stream_has_its_loads_products_and_barriers_counted(self):
        found = figures_of(*STREAM)
        self.assertEqual((found.turn, found.issued, found.mma, found.barriers, found.dependent), (32, 6, 1, 1, 0))
        self.assertEqual((found.first, found.loop), (0, 0))
        # 32 bytes of 256 threads in 4 blocks.
        self.assertEqual((found.blocks, found.asked), (4, 32))

    def test_loads_in_front_of_a_loop_are_under_way_with_those_in_it(self):
        ahead = ("LDG.E.128 R24, desc[UR4][R2.64]", "LDG.E.128 R28, desc[UR4][R2.64]")
        self.assertEqual(figures_of(*ahead, *STREAM).asked, 64)
        used = (*ahead, "IADD3 R30, R24, R28, RZ")
        self.assertEqual(figures_of(*used, *STREAM).asked, 32)

    def test_each_load_whose_address_was_loaded_is_a_latency(self):
        chain = ("LDG.E R4, desc[UR4][R2.64]", "IMAD.WIDE R6, R4, 0x8, R2", "LDG.E.64 R2, desc[UR4][R6.64]")
        self.assertEqual(figures_of(*chain, *STREAM).first, 2)
        beside = ("LDG.E R4, desc[UR4][R2.64]", "LDG.E R5, desc[UR4][R2.64+0x4]", "IADD3 R2, R4, R5, RZ")
        self.assertEqual(figures_of(*beside, *STREAM).first, 1)

    def test_a_barrier_passes_on_what_another_thread_has_loaded(self):
        shared = ("LDG.E R4, desc[UR4][R2.64]", "STS [R6], R4", "BAR.SYNC.DEFER_BLOCKING 0x0", "LDS R2, [R6]")
        self.assertEqual(figures_of(*shared, *STREAM).first, 1)

    def test_a_branch_upon_a_loaded_number_is_a_latency(self):
        branch = ("LDG.E R4, desc[UR4][R2.64]", "ISETP.NE.AND P1, PT, R4, RZ, PT", "@P1 EXIT")
        self.assertEqual(figures_of(*branch, *STREAM).first, 1)

    def test_a_table_in_front_of_the_stream_is_not_the_stream(self):
        lines = [line.replace("LDG.E.128 R12", "LDG.E.64 R12").replace("LDG.E.128", "LDG.E.64") for line in STREAM]
        table_entry = ("LDG.E.64 R2, desc[UR4][R2.64]",)
        found = figures_of(*table_entry, *lines)
        self.assertEqual((found.first, found.loop), (1, 1))

    def test_a_load_of_a_turn_that_needs_another_is_dependent(self):
        lines = list(STREAM)
        lines.insert(2, "LDG.E R2, desc[UR4][R6.64]")
        self.assertEqual(figures_of(*lines).dependent, 2)

    def test_copies_are_under_way_until_their_group_is_waited_for(self):
        copy = "LDGSTS.E.BYPASS.128 [R30], desc[UR4][R2.64]"
        loop = (".L_x_1:", copy, "LDGDEPBAR", "DEPBAR.LE SB0, 0x1", "@!P0 BRA `(.L_x_1)", "EXIT")
        # Three groups: two in front of the loop, and the turn's own before it waits.
        found = figures_of(copy, "LDGDEPBAR", copy, "LDGDEPBAR", *loop)
        self.assertEqual(found.asked, 3 * 16 * 256 * 4 // 1024)

    def test_bytes_before_the_wait_for_the_kernel_in_front_are_early(self):
        ahead = ("LDG.E.128 R24, desc[UR4][R2.64]", "ACQBULK", "LDG.E.128 R28, desc[UR4][R2.64]")
        self.assertEqual(figures_of(*ahead, *STREAM).early, 16)
        self.assertIsNone(figures_of(*STREAM).early)

    def test_a_kernel_without_a_loading_loop_has_no_figures_of_one(self):
        found = figures_of("LDG.E R4, desc[UR4][R2.64]", "EXIT")
        self.assertEqual(found[4:], (None,) * 9)

    def test_registers_shared_memory_and_threads_limit_the_blocks(self):
        of = figures.resident_blocks
        self.assertEqual([of(90, 256, registers, 0) for registers in (64, 78, 80, 81, 128, 129)], [4, 3, 3, 2, 2, 1])
        self.assertEqual([of(90, 128, 32, shared) for shared in (0, 65536, 100352)], [16, 3, 2])
        self.assertEqual((of(80, 128, 32, 65536), of(86, 256, 32, 0), of(90, 32, 16, 0)), (2, 6, 32))


class Table(unittest.TestCase):
    FIGURES = figures.Figures(256, 78, 6144, 3, 128, 0, 0, 144, 192, 174, 8, 0, 0)

    def test_a_table_is_read_as_it_was_written(self):
        numbers = {("gemv_bf16_8", "sm_90"): self.FIGURES, ("rope", "sm_80"): self.FIGURES._replace(asked=None, first=None)}
        self.assertEqual(table.parse(table.render(numbers)), numbers)

    def test_a_difference_names_kernel_architecture_and_both_numbers(self):
        old, new = {("gemv", "sm_90"): self.FIGURES}, {("gemv", "sm_90"): self.FIGURES._replace(registers=96, blocks=2)}
        self.assertEqual(table.differences(old, new), ["gemv on sm_90: registers 78 -> 96, blocks 3 -> 2"])
        self.assertEqual(table.differences(old, {}), ["gemv on sm_90 is gone"])
        self.assertEqual(table.differences(old, old), [])

    def test_rules_hold_even_where_the_table_is_updated(self):
        bad = self.FIGURES._replace(asked=48, barriers=1)
        broken = table.broken_rules({("gemv_bf16_8", "sm_90"): bad, ("gemv_bf16_8", "sm_80"): bad, ("rope", "sm_90"): bad})
        self.assertEqual(broken, [
            "gemv_bf16_8 on sm_90: asked is 48, at least 96 is needed",
            "gemv_bf16_8 on sm_90: barriers is 1, at most 0 is allowed",
        ])  # fmt: skip

    def test_the_committed_table_has_every_kernel_and_breaks_no_rule(self):
        cuda_sass = script("cuda-sass")
        committed = table.parse((ROOT / "kernels/cuda/machine-code.txt").read_text())
        self.assertEqual(set(committed), {key for ptx in self.archived().values() for key in cuda_sass.keys_of(ptx)})
        self.assertEqual(table.broken_rules(committed), [])

    def test_spills_are_looked_for_on_every_served_gpu(self):
        cuda_sass, cuda_cubins = script("cuda-sass"), script("cuda-cubins")
        self.assertEqual(set(cuda_sass.GPUS + cuda_sass.OTHERS), set(cuda_cubins.GPUS))

    def test_kernels_with_dynamic_shared_memory_are_in_the_archive(self):
        cuda_sass = script("cuda-sass")
        names = {kernel for ptx in self.archived().values() for kernel in cuda_sass.threads_of(ptx)}
        self.assertLessEqual(set(cuda_sass.DYNAMIC_BYTES), names)

    @staticmethod
    def archived():
        with mock.patch.object(cuda_code, "ARCHIVE", ROOT / cuda_code.ARCHIVE):
            return cuda_code.archived()


class Code(unittest.TestCase):
    def test_devices_before_9_0_get_no_instructions_of_an_early_start(self):
        ptx = ".version 8.7\n.target sm_80\n.address_size 64\ngriddepcontrol.wait;\nret;\n"
        self.assertEqual(cuda_code.text_for(ptx, "sm_89"), ptx.replace("griddepcontrol.wait;\n", ""))
        for gpu in ("sm_90", "sm_100", "sm_120"):
            self.assertEqual(cuda_code.text_for(ptx, gpu), ptx.replace("sm_80", "sm_90"))

    def test_what_the_assembler_says_is_read(self):
        log = """ptxas info    : Compiling entry function 'gemv' for 'sm_90'
ptxas info    : Function properties for gemv
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 78 registers, used 1 barriers, 8 bytes cumulative stack size, 6144 bytes smem
"""
        self.assertEqual(cuda_code.resources(log), {"gemv": (78, 6144, 8, 16)})
        with self.assertRaisesRegex(cuda_code.Failure, "spill in gemv"):
            cuda_code.refuse_spills("gemv", [cuda_code.resources(log)])


if __name__ == "__main__":
    unittest.main()
