"""How figures are read from what commands print. Each function here returns a reading: from an output to a figure."""

import json
import re

from proof.claim import Figure
from proof.commands import CommandError


def lines(output):
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def only(found, what):
    if len(found) != 1:
        raise CommandError(f"{len(found)} lines have {what}")
    return found[0]


def row(case, peer="", read=None):
    """Of the benchmark's one row whose case and peer match the patterns: `read(row)`, by default the ratio, above 1 if ahead."""

    def reading(output):
        rows = [line for line in lines(output) if re.search(case, line["case"]) and re.search(peer, line["peer_name"])]
        return (read or ratio)(only(rows, f"{case}, {peer}"))

    return reading


def ratio(line):
    """The ratio of the medians, within what the ranges of both sides allow."""
    (low, high), (least, most) = line["ours_range"], line["peer_range"]
    ends = (low / most, high / least) if line["better"] == "higher" else (least / high, most / low)
    return Figure(line["ratio"], *ends, line["runs"])


def share(line):
    """Our value as a share of the peer's, whichever is better."""
    (low, high), (least, most) = line["ours_range"], line["peer_range"]
    return Figure(line["ours"] / line["peer"], low / most, high / least, line["runs"])


def ours(line):
    return Figure(line["ours"], *line["ours_range"], line["runs"])


def variant(name, metric, beside=True):
    """A cache policy's metric, times that of ELORA's policy (`beside`) or by itself."""

    def reading(output):
        settings, *rest = lines(output)
        line = only([line for line in rest if line["variant"] == name], name)
        return of_seeds(line["ratios"][metric] if beside else line[metric], settings["seeds"])

    return reading


def policy(name, metric, kernel="true-rank"):
    """A routing policy's metric on a kernel."""

    def reading(output):
        settings, *rest = lines(output)
        line = only([line for line in rest if (line["policy"], line["kernel"]) == (name, kernel)], name)
        return of_seeds(line[metric], settings["seeds"])

    return reading


def gain(name, kernel="true-rank"):
    """By how much of `name`'s time per token the rank-aware policy is faster, in percent."""

    def reading(output):
        figure = policy(name, "tpot_ratio", kernel)(output)
        return Figure(*(100 - 100 / end for end in (figure.value, figure.low, figure.high)), figure.runs)

    return reading


def of_seeds(estimate, seeds):
    """A mean with the ends of its 95 % interval."""
    mean = estimate["mean"]
    half = estimate.get("half_interval", 0.0)
    return Figure(mean, estimate.get("low", mean - half), estimate.get("high", mean + half), seeds)


def peak_beside(name):
    """ELORA's highest rate over that of `name`."""

    def reading(output):
        line = only([line for line in lines(output) if line.get("variant") == name], name)
        return Figure(*[1 / line["ratio"]] * 3, lines(output)[0]["seeds"])

    return reading


def passed(output):
    """The share of the tests that passed, in percent."""
    summary = re.findall(r"Summary \[.*?\] +(\d+) tests? run: (\d+) passed", output)
    if not summary or summary[-1][0] == "0":
        raise CommandError("no test of these names ran")
    run, good = map(int, summary[-1])
    return Figure(*[100 * good / run] * 3, run)


def printed(pattern):
    """The numbers that tests print where the pattern has its group: the median of those found, within their range."""

    def reading(output):
        found = sorted(float(number) for number in re.findall(pattern, output))
        if not found:
            raise CommandError(f"no line has {pattern}")
        return Figure(found[len(found) // 2], found[0], found[-1], len(found))

    return reading


def single(name):
    """The field `name` of the last line that has it."""

    def reading(output):
        found = [line[name] for line in lines(output) if name in line]
        if not found:
            raise CommandError(f"no line has {name}")
        return Figure(*[found[-1]] * 3, 1)

    return reading
