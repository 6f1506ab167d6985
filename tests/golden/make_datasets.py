#!/usr/bin/env python3
"""Makes the files of training data in `datasets/` with the libraries `datasets` and pyarrow.

    make_datasets.py

This script writes one set of conversations in each format of training data: `hub/` has the layout of a data set on the
hub, `saved/` that of `save_to_disk`, and the single files have one format each. All must read as `conversations.jsonl`.
"""

import gzip
import json
import shutil
from pathlib import Path

import datasets
import pyarrow
import pyarrow.feather
import pyarrow.parquet

HERE = Path(__file__).parent / "datasets"

# Rows with different fields, so that a table holds nulls: a tool call, reasoning content, a weight.
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
ROWS = [
    {
        "messages": [{"role": "user", "content": "Hi \u65e5\u672c"}, {"role": "assistant", "content": "Yes\n\"no\""}],
        "weight": 1.0,  # `from_list` makes columns of the first row's fields
    },
    {
        "messages": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "4", "tool_call_id": "c1"},
            {"role": "assistant", "content": "4", "thinking": "Read it."},
        ],
        "weight": -0.5,
    },
] + [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]} for n in range(70)]


def main() -> None:
    shutil.rmtree(HERE, ignore_errors=True)
    (HERE / "hub" / "data").mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (HERE / "conversations.jsonl").write_text(lines)
    (HERE / "conversations.json").write_text(json.dumps(ROWS[:4], indent=2))
    (HERE / "conversations.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(HERE / "saved", num_shards=2)
    for number, part in enumerate(table.shard(2, index, contiguous=True) for index in range(2)):
        part.to_parquet(HERE / "hub" / "data" / f"train-0000{number}-of-00002.parquet")
    table.select([0]).to_parquet(HERE / "hub" / "data" / "test-00000-of-00001.parquet")
    (HERE / "hub" / "README.md").write_text("# A data set\n")
    arrow = table.data.table.combine_chunks()
    for codec in ["snappy", "zstd", "gzip", "lz4"]:
        pyarrow.parquet.write_table(arrow, HERE / f"{codec}.parquet", compression=codec)
    pyarrow.feather.write_feather(arrow, HERE / "file.arrow", compression="lz4")


if __name__ == "__main__":
    main()
