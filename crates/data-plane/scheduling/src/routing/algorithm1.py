"""Algorithm 1 of CaraServe as printed (C-14) and mended (C-15), written apart from the Rust code.

Prints algorithm1.golden: `python3 algorithm1.py > algorithm1.golden`. A case is a line of its request, and one for each
candidate: its planes and loads, the total as printed, the total as mended; then the choices of both.
"""

import random

PENALTY = 1e3


def row_ranks(form, load):
    return load["requests"] * load["max_rank"] if form == "padded" else load["ranks"]


def token_ranks(form, load):
    return load["tokens"] * load["max_rank"] if form == "padded" else load["token_ranks"]


def dec_perf(server, load):
    step, each, token, rank = server["decode"]
    return step + each * load["requests"] + token * load["tokens"] + rank * row_ranks(server["form"], load)


def pre_perf(server, load):
    asked, token, rank = server["prefill"]
    return asked + token * load["tokens"] + rank * token_ranks(server["form"], load)


def both(one, other):
    summed = {key: one[key] + other[key] for key in ("requests", "ranks", "tokens", "token_ranks")}
    return summed | {"max_rank": max(one["max_rank"], other["max_rank"])}


def total(server, req, slo, answer, mended):
    exists = both(server["running"], server["queue"])
    queue = server["queue"]
    # No prompts take no pass.
    before = pre_perf(server, queue) if queue["tokens"] > 0 else 0.0
    prefill = pre_perf(server, both(queue, req)) - before
    after = dec_perf(server, both(exists, req))
    cost = prefill / answer + after - dec_perf(server, exists)
    penalty = PENALTY * slo if after > slo else 0.0
    n = exists["requests"]
    if not mended:
        return (cost + penalty) * n
    return cost * max(1, n) + penalty


def load(draw, most):
    requests = draw.choice([0, 0, 1, 2, 5, 12, most])
    ranks = [draw.choice([0, 8, 16, 32, 64, 128]) for _ in range(requests)]
    tokens = [draw.randint(1, 400) for _ in ranks]
    token_ranks = sum(rank * count for rank, count in zip(ranks, tokens))
    return {"requests": requests, "ranks": sum(ranks), "max_rank": max(ranks, default=0), "tokens": sum(tokens), "token_ranks": token_ranks}


def words(numbers):
    return " ".join(repr(number) for number in numbers)


def main():
    draw = random.Random(16)
    for _ in range(40):
        rank, prompt = draw.choice([8, 16, 32, 64, 128]), draw.randint(1, 500)
        req = {"requests": 1, "ranks": rank, "max_rank": rank, "tokens": prompt, "token_ranks": rank * prompt}
        slo_us = draw.choice([30_000, 36_000, 45_000])
        print("request", rank, prompt, slo_us)
        printed, mended = [], []
        for executor in range(draw.randint(2, 5)):
            server = {
                "form": draw.choice(["padded", "true"]),
                "decode": [draw.uniform(0.02, 0.035), draw.uniform(0, 2e-4), draw.uniform(0, 2e-7), draw.uniform(0, 4e-6)],
                "prefill": [draw.uniform(0, 0.02), draw.uniform(0, 2e-4), draw.uniform(0, 1e-6)],
                "running": load(draw, 24),
                "queue": load(draw, 8),
            }
            totals = [total(server, req, slo_us * 1e-6, 58.0, mended) for mended in (False, True)]
            requests = server["running"]["requests"] + server["queue"]["requests"]
            printed.append((totals[0], executor))
            mended.append((totals[1], requests, executor))
            loads = [server[which][key] for which in ("running", "queue") for key in ("requests", "ranks", "max_rank", "tokens", "token_ranks")]
            print("candidate", server["form"], words(server["decode"]), words(server["prefill"]), words(loads), words(totals))
        print("choices", min(printed)[-1], min(mended)[-1])


main()
