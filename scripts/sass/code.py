"""Reads what nvdisasm prints: kernels, their instructions, blocks and loops."""

import re
from dataclasses import dataclass, field

KERNEL = re.compile(r"^\s*\.section\s+\.text\.(\w+),", re.MULTILINE)
LABEL = re.compile(r"^(\.L_\w+|\$?[\w$.]+):$")
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?(.*?)\s*;")
TARGET = re.compile(r"`\((\S+?)\)")


@dataclass
class Instruction:
    """One instruction: whether it has a condition, its name with modifiers, and its operands as text."""

    guard: str | None
    name: str
    operands: list[str]

    @property
    def base(self):
        return self.name.split(".", 1)[0]

    def has(self, modifier):
        return modifier in self.name.split(".")[1:]


@dataclass
class Block:
    """Instructions that run one after another, and the blocks that may follow."""

    instructions: list[Instruction]
    follows: list[int] = field(default_factory=list)


@dataclass
class Loop:
    """A natural loop: the block that begins it, all its blocks in the order of the code, and those of no loop in it."""

    head: int
    blocks: list[int]
    own: list[int] = field(default_factory=list)


def split_operands(text):
    """Operands between commas that stand in no brackets."""
    return [part.strip() for part in re.split(r",\s*(?![^\[]*\])", text)] if text else []


def instruction(line):
    found = INSTRUCTION.match(line)
    if not found:
        return None
    name, _, operands = found.group(3).partition(" ")
    return Instruction(found.group(2), name, split_operands(operands.strip()))


def kernels(text):
    """The blocks of every kernel in a disassembly: name -> blocks, the first of which is the entry."""
    parts = KERNEL.split(text)
    return {name: blocks(body) for name, body in zip(parts[1::2], parts[2::2])}


def blocks(body):
    """Cuts the lines of a kernel into blocks and connects them."""
    found, at_label, current = [], {}, []
    for line in body.splitlines():
        if label := LABEL.match(line):
            if current:
                found.append(Block(current))
                current = []
            at_label[label.group(1)] = len(found)
        elif parsed := instruction(line):
            current.append(parsed)
            if parsed.base in ("BRA", "EXIT", "RET", "BRX", "JMX", "JMP"):
                found.append(Block(current))
                current = []
        elif re.match(r"\s*\.section\s", line):
            break
    if current:
        found.append(Block(current))
    for index, block in enumerate(found):
        block.follows = [next_ for next_ in following(block, index, at_label) if next_ < len(found)]
    return found


def following(block, index, at_label):
    last = block.instructions[-1]
    ahead = [index + 1]
    if last.base in ("BRA", "JMP"):
        target = TARGET.search(" ".join(last.operands))
        targets = [at_label[target.group(1)]] if target and target.group(1) in at_label else []
        return targets + (ahead if is_conditional(last) else [])
    if last.base in ("EXIT", "RET", "BRX", "JMX"):
        return ahead if last.guard else []
    return ahead


def is_conditional(branch):
    """Whether a branch may not be taken: by its guard, or by a predicate among its operands."""
    return bool(branch.guard) or any(re.fullmatch(r"!?U?P\d", operand) for operand in branch.operands)


def order(graph):
    """Blocks that the entry reaches, each before those that follow it, loops apart."""
    seen, done = set(), []
    stack = [(0, iter(graph[0].follows))] if graph else []
    seen.add(0)
    while stack:
        block, follows = stack[-1]
        for next_ in follows:
            if next_ not in seen:
                seen.add(next_)
                stack.append((next_, iter(graph[next_].follows)))
                break
        else:
            done.append(block)
            stack.pop()
    return done[::-1]


def dominators(graph):
    """For each reached block the blocks that stand on every way to it, itself among them."""
    reached = order(graph)
    before = {block: [] for block in reached}
    for block in reached:
        for next_ in graph[block].follows:
            before[next_].append(block)
    everything = set(reached)
    found = {block: everything for block in reached}
    found[0] = {0}
    changed = True
    while changed:
        changed = False
        for block in reached[1:]:
            of_front = set.intersection(*(found[front] for front in before[block])) | {block}
            if of_front != found[block]:
                found[block], changed = of_front, True
    return found


def loops(graph, dominating):
    """All natural loops; those with one head are one."""
    before = {block: [] for block in dominating}
    for block in dominating:
        for next_ in graph[block].follows:
            before[next_].append(block)
    bodies = {}
    for block in dominating:
        for head in graph[block].follows:
            if head not in dominating[block]:
                continue
            body, waiting = bodies.setdefault(head, {head}), [block]
            while waiting:
                at = waiting.pop()
                if at not in body:
                    body.add(at)
                    waiting += before[at]
    return [Loop(head, sorted(body)) for head, body in sorted(bodies.items())]
