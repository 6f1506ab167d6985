"""x A B by PyTorch: one line in ("float32 2": type and threads), one line out (milliseconds of each call)."""

import statistics
import sys
import time

import torch

ROWS, HIDDEN, RANK = (int(size) for size in sys.argv[1:4])
WARM_UP_CALLS, CALLS = (int(count) for count in sys.argv[4:6])


def factors(kind):
    generator = torch.Generator().manual_seed(1)
    shapes = (ROWS, HIDDEN), (HIDDEN, RANK), (RANK, HIDDEN)
    return [(torch.rand(shape, generator=generator) - 0.5).to(kind) for shape in shapes]


def milliseconds(x, a, b, shrunk, out):
    started = time.perf_counter()
    torch.matmul(x, a, out=shrunk)
    torch.matmul(shrunk, b, out=out)
    return (time.perf_counter() - started) * 1000.0


@torch.inference_mode()
def main():
    operands = {}
    for name in ("float32", "bfloat16"):
        x, a, b = factors(getattr(torch, name))
        operands[name] = (x, a, b, x @ a, x @ a @ b)
    for line in sys.stdin:
        name, threads = line.split()
        torch.set_num_threads(int(threads))
        times = [milliseconds(*operands[name]) for _ in range(WARM_UP_CALLS + CALLS)]
        print(statistics.median(times[WARM_UP_CALLS:]), flush=True)


main()
