"""A run of the benchmarks beside the forecasts for its device: what came as forecast, what better, what worse."""

import re

from gpu_model.rows import Constants, rows

# As the page allows it (docs/performance/gpu.md).
TOLERANCE = 0.1
LOWER_IS_BETTER = ("ms", "us")


def constants_of(results):
    """The model's constants with the rates that the run measured on its device."""
    measured = {}
    for row in results:
        if row.get("peer_name") == "a copy on the device":
            measured["copy_gbps"] = row["peer"]
        elif row["bench"] == "cuda-prefill" and row["unit"] == "TFLOP/s":
            measured["matrix_tflops"] = row["peer"]
    return Constants()._replace(**measured)


def seen(forecast, results):
    """What a run shows of a forecast's row, or None."""
    for row in results:
        if (row["bench"], row["unit"]) != (forecast.bench, forecast.unit) or not re.search(forecast.case, row["case"]):
            continue
        if not forecast.peer:
            return row["ours"]
        if re.search(forecast.peer, row.get("peer_name", "")):
            return row["peer"]
    return None


def verdicts(results):
    """A line for each forecast that the run measured, the furthest off first."""
    found = []
    for forecast in rows(constants_of(results)):
        value = forecast.value if forecast.now is None else forecast.now
        measured = seen(forecast, results) if value and forecast.bench else None
        if measured is None:
            continue
        error = measured / value - 1
        is_better = (error < 0) == (forecast.unit in LOWER_IS_BETTER)
        verdict = "as forecast" if abs(error) <= TOLERANCE else "better" if is_better else "WORSE"
        line = {"verdict": verdict, "row": forecast.id, "what": forecast.what, "unit": forecast.unit}
        line |= {"forecast": value, "seen": measured, "off": round(error, 4), "never_ran": forecast.now is not None}
        found.append(line)
    return sorted(found, key=lambda line: -abs(line["off"]))


def table(found, number):
    """Verdicts as text, aligned; a star marks what had never run before."""
    cells = [("verdict", "what", "forecast", "seen", "off")]
    for line in found:
        what = line["what"] + (" *" if line["never_ran"] else "")
        cells.append((line["verdict"], what, f"{number(line['forecast'])} {line['unit']}", number(line["seen"]), f"{line['off']:+.0%}"))
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells]
