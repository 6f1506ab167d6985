"""Loads 64 adapters, lets aiperf ask them by a Zipf distribution, and compares its counts with the server's.

Called by scripts/load-test. Prints one JSON object and exits with 1 if a request failed or the counts differ.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ADAPTERS = 64
EXPONENT = 1.0
SEED = 1
QUESTIONS = ["What is the sea?", "Name three colours.", "Tell me about Tokyo.", "Why is the sky blue?", "What do bees make?"]


def call(url: str, body: dict | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def load_adapters(url: str, examples: Path, into: Path) -> list[str]:
    """Variants of the examples: the same matrices, each at another strength, so each another generation."""
    sources = sorted(path for path in examples.iterdir() if (path / "adapter_config.json").exists())
    names = []
    for index, source in zip(range(ADAPTERS), itertools.cycle(sources)):
        name = f"{source.name}-{index}"
        shutil.copytree(source, into / name)
        config = json.loads((into / name / "adapter_config.json").read_text())
        config["lora_alpha"] = 8 + index
        (into / name / "adapter_config.json").write_text(json.dumps(config))
        call(f"{url}/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(into / name)})
        names.append(name)
    return names


def payloads(names: list[str], count: int) -> list[dict]:
    chooser = random.Random(SEED)
    weights = [1 / (rank + 1) ** EXPONENT for rank in range(len(names))]
    models = chooser.choices(names, weights, k=count)
    return [
        {
            "model": model,
            "messages": [{"role": "user", "content": chooser.choice(QUESTIONS)}],
            "max_completion_tokens": chooser.choice([8, 16, 32]),
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for model in models
    ]


def generated_tokens(url: str) -> int:
    """Tokens the server says it has generated, over all models. Its figures are up to a second old."""
    time.sleep(2.5)
    lines = (line for line in call(f"{url}/metrics").splitlines() if line.startswith("holobiont_generated_tokens_total"))
    return round(sum(float(line.rsplit(" ", 1)[1]) for line in lines))


TOKENIZER = "holobiont/words"


def put_tokenizer_into_cache(home: Path) -> None:
    """aiperf wants a tokenizer even where it counts by the server's figures; it must not ask a hub for one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    repository = home / "hub" / f"models--{TOKENIZER.replace('/', '--')}"
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(repository / "snapshots" / "0")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0")


def run_aiperf(arguments: argparse.Namespace, dataset: Path) -> dict:
    home = arguments.artifacts / "hf"
    put_tokenizer_into_cache(home)
    command = [
        arguments.aiperf, "profile", "--model", "holobiont", "--url", arguments.url, "--endpoint-type", "chat", "--streaming",
        "--input-file", str(dataset), "--custom-dataset-type", "raw-payload", "--use-server-token-count", "--tokenizer", TOKENIZER,
        "--request-count", str(arguments.requests), "--concurrency", str(arguments.concurrency), "--random-seed", str(SEED),
        "--artifact-dir", str(arguments.artifacts), "--ui-type", "none",
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"aiperf failed:\n{done.stdout[-4000:]}")
    return json.loads(next(arguments.artifacts.rglob("profile_export_aiperf.json")).read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    for name in ("--examples", "--adapters", "--artifacts"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--aiperf", required=True)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    arguments = parser.parse_args()

    names = load_adapters(arguments.url, arguments.examples, arguments.adapters)
    asked = payloads(names, arguments.requests)
    dataset = arguments.adapters / "payloads.jsonl"
    dataset.write_text("".join(json.dumps(payload) + "\n" for payload in asked))
    before = generated_tokens(arguments.url)
    report = run_aiperf(arguments, dataset)
    server_tokens = generated_tokens(arguments.url) - before

    def value(figure: str, of: str = "avg") -> float | None:
        return (report.get(figure) or {}).get(of)

    result = {
        "requests": value("request_count"),
        "errors": value("error_request_count") or 0,
        "adapters_asked": len({payload["model"] for payload in asked}),
        "tokens_asked_for": sum(payload["max_completion_tokens"] for payload in asked),
        "tokens_client": value("output_sequence_length", "sum"),
        "tokens_server": server_tokens,
        "tokens_per_s": value("output_token_throughput"),
        "ttft_ms_p50": value("time_to_first_token", "p50"),
        "ttft_ms_p99": value("time_to_first_token", "p99"),
    }
    print(json.dumps(result))
    counts = {result["tokens_asked_for"], result["tokens_client"], result["tokens_server"]}
    if result["errors"] or result["requests"] != arguments.requests or len(counts) != 1:
        sys.exit("a request failed, or client and server do not count the same tokens")


if __name__ == "__main__":
    main()
