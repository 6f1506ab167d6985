"""The table of verified models in docs/reference/models.md, from the records in docs/proof/models."""

import json

from page_parts import ROOT, replace_part, write_or_check
from verified.models import MODELS, WINDOW, WINDOWS

RECORDS = ROOT / "docs/proof/models"
PAGE = ROOT / "docs/reference/models.md"
KINDS = {"base": "base", "lora": "LoRA by PEFT"}


def error(value):
    return f"{value:.1e}" if value < 0.01 else f"{value:.2f}"


def agreement(told):
    """Cells of one comparison: the largest error, and how many answers are equal."""
    mark = "" if told["holds"] else " **missed**"
    return f"{error(told['largest_error'])}{mark} | {told['equal_answers']} of {told['answers']}"


def rows(record, model):
    for kind, words in KINDS.items():
        name = f"[{model.title}](../proof/models/{model.name}.json)" if kind == "base" else ""
        yield f"| {name} | {words} | {agreement(record['exact'][kind])} | {agreement(record['served'][kind])} |"


def perplexities(record, model):
    values = [record["perplexity"].get(side) for side in ("transformers", "exact", "served", "llama.cpp")]
    cells = " | ".join("not measured" if value is None else f"{value:.4f}" for value in values)
    return f"| {model.title} | {cells} |"


def tables():
    """Markdown of all records that are there."""
    paths = {model: RECORDS / f"{model.name}.json" for model in MODELS}
    records = {model: json.loads(path.read_text()) for model, path in paths.items() if path.is_file()}
    if not records:
        return "No model has been verified yet."
    [tolerances] = {(record["exact"]["base"]["tolerance"], record["served"]["base"]["tolerance"]) for record in records.values()}
    heads = [f"{words}, largest error (tolerance {bound:g}) | equal answers" for words, bound in zip(("Exact", "As served"), tolerances)]
    numbers = "; ".join(f"{model.title.split(',')[0]}: {record['served']['numbers']}" for model, record in records.items())
    return "\n".join([
        f"| Model | | {' | '.join(heads)} |",
        "|---|---|---:|---:|---:|---:|",
        *(row for model, record in records.items() for row in rows(record, model)),
        "",
        f"Perplexity of {WINDOWS} windows of {WINDOW} tokens of this repository's guides, the second half of each:",
        "",
        "| Model | transformers, f32 | Exact | As served | llama.cpp |",
        "|---|---:|---:|---:|---:|",
        *(perplexities(record, model) for model, record in records.items()),
        "",
        f"Numbers as served: {numbers}. {sources(records)}",
    ])  # fmt: skip


def sources(records):
    """Where and when the records were made."""
    machines = sorted({record["machine"]["processor"] for record in records.values()})
    dates = sorted({record["date"] for record in records.values()})
    commits = sorted({record["commit"] for record in records.values()})
    return f"Measured on {', '.join(machines)}, {', '.join(dates)}, commit `{'`, `'.join(commits)}`."


def write(check):
    text = replace_part(PAGE.read_text(), "verified models", tables(), "scripts/verify-models --table")
    write_or_check({PAGE: text}, check, "scripts/verify-models --table")
