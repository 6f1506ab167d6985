"""Figures of a kernel's machine code: what it takes, and how it waits for memory.

The figures count instructions and do not simulate a GPU. A warp issues in order, so an instruction that reads a register
which a load has not filled yet holds up all that follow. Two figures rest on this rule:

first    the memory latencies that pass before the first load of the main loop's kind, which may stand in front of the
         loop: each is a load whose address or condition came from another load
loop     the same before the first load inside the main loop
asked    the bytes that a multiprocessor has under way at most: loads issued before the first of them is read, times
         threads, times the blocks that registers and shared memory let stay at once
"""

import re
from typing import NamedTuple

from sass.code import dominators, loops, order

# Bytes of shared memory of a multiprocessor; a block takes 1,024 more than its own.
SHARED_BYTES = {80: 164 << 10, 86: 100 << 10, 89: 100 << 10, 90: 228 << 10, 100: 228 << 10, 120: 100 << 10}
MAX_THREADS = {80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048, 120: 1536}
MAX_BLOCKS = {80: 32, 86: 16, 89: 24, 90: 32, 100: 32, 120: 24}
RESERVED_BYTES = 1024
# A quarter of a multiprocessor has so many registers, and warps take them by 256.
QUARTER_REGISTERS, REGISTER_STEP, LANES = 16384, 256, 32

LOADS = ("LDG", "LD", "ATOMG", "ATOM")
ASYNC_LOAD, ASYNC_GROUP, ASYNC_WAIT = "LDGSTS", "LDGDEPBAR", "DEPBAR"
FRONT_WAIT = "ACQBULK"
PRODUCTS = ("HMMA", "IMMA", "DMMA", "HGMMA", "IGMMA", "QGMMA")
STORES = ("STG", "STS", "STL", "ST", "RED", "REDG", "SUST")
# Beside stores, what writes no register although a register may come first.
WITHOUT_RESULT = STORES + (
    "ISETP", "FSETP", "DSETP", "HSETP2", "BRA", "EXIT", "BAR", "R2P", "CCTL", "BRX", "RET", "WARPSYNC", "MEMBAR", ASYNC_LOAD,
)  # fmt: skip
PREDICATE = re.compile(r"!?U?P[T\d]$")
REGISTER = re.compile(r"(?<![\w])R(\d+)(\.64)?")


class Figures(NamedTuple):
    """What the table has of a kernel on an architecture; None where it does not apply."""

    threads: int  # of a block
    registers: int  # of a thread
    shared: int  # bytes of a block, static and dynamic
    blocks: int  # of a multiprocessor at once
    early: int | None  # bytes a thread asks for before it waits for the kernel in front
    first: int | None  # memory latencies before the first load of the main loop's kind
    loop: int | None  # memory latencies before the main loop's first load
    asked: int | None  # KiB under way in a multiprocessor
    turn: int | None  # bytes a thread loads in a turn of the main loop
    issued: int | None  # instructions of a turn
    mma: int | None  # of these, products of tensor cores
    barriers: int | None  # of these, barriers of the block
    dependent: int | None  # loads of a turn whose address another load of the turn gives


def width(instruction):
    """Bytes that a load or store moves for a thread."""
    for modifier, moved in (("128", 16), ("64", 8), ("U16", 2), ("S16", 2), ("U8", 1), ("S8", 1)):
        if instruction.has(modifier):
            return moved
    return 4


def loaded(instruction):
    """Bytes that an instruction asks memory for."""
    is_load = instruction.base in LOADS or instruction.base == ASYNC_LOAD
    return width(instruction) if is_load else 0


def registers_in(operand, count=1):
    found = set()
    for number, is_pair in REGISTER.findall(operand):
        found |= set(range(int(number), int(number) + max(count, 2 if is_pair else 1)))
    return found


def result_at(instruction):
    """Index of the operand that is written, or None."""
    if instruction.base in WITHOUT_RESULT:
        return None
    for index, operand in enumerate(instruction.operands):
        if not PREDICATE.match(operand):
            return index if re.match(r"R\d", operand) else None
    return None


def result_registers(instruction):
    """Number of registers that the result takes."""
    if loaded(instruction):
        return max(width(instruction) // 4, 1)
    if instruction.base in PRODUCTS:
        return 4
    if instruction.base == "LDSM":
        return next((int(part) for part in ("4", "2") if instruction.has(part)), 1)
    if instruction.base in ("LDS", "LDL", "LDC"):
        return max(width(instruction) // 4, 1)
    return 2 if instruction.has("WIDE") or instruction.has("64") or instruction.base == "CS2R" else 1


def written(instruction):
    at = result_at(instruction)
    return set() if at is None else registers_in(instruction.operands[at], result_registers(instruction))


def read(instruction):
    """Registers that an instruction reads."""
    found, result = set(), result_at(instruction)
    for index, operand in enumerate(instruction.operands):
        if index == result:
            # Brackets in a first operand would be an address.
            continue
        count = 1
        if instruction.base in PRODUCTS:
            count = {1: 4, 2: 2, 3: 4}.get(index, 1)
        elif instruction.base in STORES and "[" not in operand:
            count = max(width(instruction) // 4, 1)
        elif instruction.has("WIDE") and index == 3:
            count = 2
        found |= registers_in(operand, count)
    return found


class Issue:
    """How many memory latencies have passed where a warp has come to, along the longest way."""

    def __init__(self, fronts=()):
        self.level = max((front.level for front in fronts), default=0)
        self.shared = max((front.shared for front in fronts), default=0)
        self.copied = max((front.copied for front in fronts), default=0)
        self.pending = {}
        for front in fronts:
            for register, level in front.pending.items():
                self.pending[register] = max(level, self.pending.get(register, 0))

    def step(self, instruction):
        """Issues an instruction; returns the latencies that have passed before."""
        waits = [self.pending.pop(register) for register in read(instruction) if register in self.pending]
        self.level = max([self.level, *waits])
        if instruction.base == "STS":
            self.shared = max(self.shared, self.level)
        elif instruction.base == "BAR":
            # A value that another thread stored may have come from a load.
            self.level = max(self.level, self.shared)
        elif instruction.base == ASYNC_LOAD:
            self.copied = max(self.copied, self.level + 1)
        elif instruction.base == ASYNC_WAIT:
            self.level = max(self.level, self.copied)
        for register in written(instruction):
            self.pending.pop(register, None)
            if loaded(instruction):
                self.pending[register] = self.level + 1
        return self.level


class UnderWay:
    """Bytes that a thread has asked for and not yet waited for."""

    def __init__(self):
        self.loads, self.groups, self.open, self.most = {}, [], 0, 0

    def step(self, instruction):
        touched = read(instruction) | written(instruction)
        for first in [first for first, (registers, _) in self.loads.items() if registers & touched]:
            del self.loads[first]
        if instruction.base == ASYNC_LOAD:
            self.open += width(instruction)
        elif instruction.base == ASYNC_GROUP:
            self.groups.append(self.open)
            self.open = 0
        elif instruction.base == ASYNC_WAIT and len(instruction.operands) > 1:
            left = int(instruction.operands[1], 0)
            self.groups = self.groups[max(len(self.groups) - left, 0) :]
        elif loaded(instruction) and (registers := written(instruction)):
            self.loads[min(registers)] = (registers, width(instruction))
        now = sum(size for _, size in self.loads.values()) + sum(self.groups) + self.open
        self.most = max(self.most, now)


def instructions(graph, chosen):
    for block in chosen:
        yield from graph[block].instructions


def main_loop(graph, dominating):
    """The loop that loads most a turn, without what loading loops inside it do; None if no loop loads."""
    all_loops = [loop for loop in loops(graph, dominating) if any(map(loaded, instructions(graph, loop.blocks)))]
    for loop in all_loops:
        inner = [set(other.blocks) for other in all_loops if set(other.blocks) < set(loop.blocks)]
        loop.own = [block for block in loop.blocks if not any(block in blocks for blocks in inner)]
    return max(all_loops, key=lambda loop: (turn_bytes(graph, loop), -loop.head), default=None)


def turn_bytes(graph, loop):
    return sum(map(loaded, instructions(graph, loop.own)))


def fronts_of(graph, reached):
    """For each reached block those that may come before it."""
    fronts = {block: [] for block in reached}
    for block in reached:
        for next_ in graph[block].follows:
            fronts[next_].append(block)
    return fronts


def levels(graph):
    """Every load on the way through a kernel: block, load, and the memory latencies that have passed before it."""
    reached, states = order(graph), {}
    fronts = fronts_of(graph, reached)
    for block in reached:
        state = Issue([states[front] for front in fronts[block] if front in states])
        for instruction in graph[block].instructions:
            level = state.step(instruction)
            if loaded(instruction):
                yield block, instruction, level
        states[block] = state


def addresses(graph):
    """The loads whose result becomes the address of another load, by identity."""
    reached, states, found = order(graph), {}, set()
    fronts = fronts_of(graph, reached)
    for block in reached:
        origins = {}
        for front in fronts[block]:
            for register, loads in states.get(front, {}).items():
                origins[register] = origins.get(register, frozenset()) | loads
        for instruction in graph[block].instructions:
            if loaded(instruction):
                of_address = registers_in(" ".join(operand for operand in instruction.operands if "[" in operand))
                found |= {load for register in of_address for load in origins.get(register, ())}
                given = frozenset([id(instruction)])
            else:
                given = frozenset().union(*(origins.get(register, ()) for register in read(instruction)))
            for register in written(instruction):
                origins[register] = given
        states[block] = origins
    return found


def latencies_before(graph, loop):
    """Memory latencies before the first load of the main loop's kind, and before the first one inside the loop."""
    kinds = {}
    for instruction in instructions(graph, loop.own):
        kinds[instruction.name] = kinds.get(instruction.name, 0) + loaded(instruction)
    kind, tables, all_loads = max(kinds, key=kinds.get), addresses(graph), list(levels(graph))
    of_kind = [level for _, load, level in all_loads if load.name == kind and id(load) not in tables]
    inside = [level for block, _, level in all_loads if block in loop.own]
    return min(of_kind, default=min(inside)), min(inside)


def dependent_loads(graph, loop):
    """Loads of a turn whose address another load of the turn gives."""
    given, count = set(), 0
    for instruction in instructions(graph, loop.own):
        result = written(instruction)
        if loaded(instruction):
            address = set().union(*(registers_in(operand) for operand in instruction.operands if "[" in operand))
            count += bool(address & given)
            given |= result
        elif read(instruction) & given:
            given |= result
        else:
            # Also under a condition: an address is computed under the condition of its load.
            given -= result
    return count


def asked_bytes(graph, dominating, loop):
    """Bytes that a thread has under way at most, on the way to a loop and in two turns of it."""
    state = UnderWay()
    ahead = [block for block in order(graph) if block in dominating[loop.head] and block not in loop.blocks]
    for instruction in instructions(graph, [*ahead, *loop.blocks, *loop.blocks]):
        state.step(instruction)
    return state.most


def early_bytes(graph, dominating):
    """Bytes that a thread asks for before it waits for the kernel in front, or None where it does not wait."""
    found = []
    for block in dominating:
        if any(instruction.base == FRONT_WAIT for instruction in graph[block].instructions):
            asked = sum(map(loaded, instructions(graph, dominating[block] - {block})))
            for instruction in graph[block].instructions:
                if instruction.base == FRONT_WAIT:
                    found.append(asked)
                asked += loaded(instruction)
    return max(found) if found else None


def resident_blocks(architecture, threads, registers, shared):
    """Blocks that stay in a multiprocessor at once."""
    warps = -(-threads // LANES)
    of_warp = -(-registers * LANES // REGISTER_STEP) * REGISTER_STEP
    by_registers = QUARTER_REGISTERS // of_warp * 4 // warps
    by_shared = SHARED_BYTES[architecture] // (shared + RESERVED_BYTES)
    return min(by_registers, by_shared, MAX_THREADS[architecture] // (warps * LANES), MAX_BLOCKS[architecture])


def figures(graph, architecture, threads, registers, shared):
    """The figures of a kernel from its blocks and from what the assembler says it takes."""
    dominating = dominators(graph)
    blocks, loop = resident_blocks(architecture, threads, registers, shared), main_loop(graph, dominating)
    of_loop = [None] * 8
    if loop:
        turn = list(instructions(graph, loop.own))
        asked = asked_bytes(graph, dominating, loop) * threads * blocks
        of_loop = [
            *latencies_before(graph, loop), asked // 1024, turn_bytes(graph, loop), len(turn),
            sum(instruction.base in PRODUCTS for instruction in turn),
            sum(instruction.base == "BAR" for instruction in turn), dependent_loads(graph, loop),
        ]  # fmt: skip
    return Figures(threads, registers, shared, blocks, early_bytes(graph, dominating), *of_loop)
