"""The loops of `tinker-cookbook`, unmodified, against a running Holobiont that trains.

HOLOBIONT_URL must serve SmolLM2-135M-Instruct from the GGUF file HOLOBIONT_TEST_MODEL, and have trainers. All data are
local. The cookbook's renderer `qwen3_instruct` writes ChatML, which is the model's own template.
"""

import asyncio
import json
import os
import urllib.request
from pathlib import Path

os.environ["TINKER_TELEMETRY"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TINKER_API_KEY"] = KEY = "tml-" + os.environ.get("HOLOBIONT_API_KEY", "none")

import pytest  # noqa: E402
import tinker  # noqa: E402
from tinker_cookbook import tokenizer_utils  # noqa: E402
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder  # noqa: E402
from tinker_cookbook.rl import train as rl_train  # noqa: E402
from tinker_cookbook.supervised import train as supervised_train  # noqa: E402
from tinker_cookbook.supervised.data import FromConversationFileBuilder  # noqa: E402
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

URL = os.environ["HOLOBIONT_URL"].rstrip("/").removesuffix("/v1")
MODEL_FILE = Path(os.environ["HOLOBIONT_TEST_MODEL"])
RENDERER = "qwen3_instruct"
PAIRS = [("Who are you?", "Arr, a pirate!"), ("Hello.", "Ahoy!"), ("Bye.", "Fair winds!"), ("2+2?", "Four, matey!")]


@pytest.fixture(scope="session")
def base():
    models = tinker.RestClient(base_url=URL, api_key=KEY).get_server_capabilities().result().supported_models
    name = models[0].model_name
    # The loops ask for the tokenizer at every batch, and reading a GGUF file takes many seconds.
    tokenizer = AutoTokenizer.from_pretrained(MODEL_FILE.parent, gguf_file=MODEL_FILE.name)
    tokenizer_utils.register_tokenizer(name, lambda: tokenizer)
    return name


def rows(log_path):
    return [json.loads(line) for line in (Path(log_path) / "metrics.jsonl").read_text().splitlines()]


def checkpoints(log_path):
    return [json.loads(line) for line in (Path(log_path) / "checkpoints.jsonl").read_text().splitlines()]


def version(sampler_path):
    """The content hash of a saved adapter: two adapters with one hash have the same bits."""
    run, _, name = sampler_path.removeprefix("tinker://").split("/")
    request = urllib.request.Request(f"{URL}/v1/lora_adapters?runs=true", headers={"authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request) as answer:
        listed = json.load(answer)["data"]
    return next(card["generation"] for card in listed if card["name"] == f"tinker-{run}-{name}".replace(":", "-"))


def sft(base, tmp_path, log_path):
    data = tmp_path / "data.jsonl"
    lines = [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in PAIRS]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=base, renderer_name=RENDERER, max_length=256, batch_size=2
    )
    return supervised_train.Config(
        log_path=str(log_path),
        model_name=base,
        recipe_name="recipe_sl_basic",
        renderer_name=RENDERER,
        dataset_builder=FromConversationFileBuilder(file_path=str(data), common_config=common),
        learning_rate=2e-3,
        num_epochs=4,
        lora_rank=8,
        base_url=URL,
        save_every=3,
        eval_every=0,
    )


def test_the_supervised_loop_learns_and_resumes_to_the_same_bits_each_time(base, tmp_path):
    asyncio.run(supervised_train.main(sft(base, tmp_path, tmp_path / "whole")))
    losses = [row["train_mean_nll"] for row in rows(tmp_path / "whole") if "train_mean_nll" in row]
    assert len(losses) == 8
    assert losses[-1] < 0.6 * losses[0], losses

    # Loops that crashed after the first checkpoint have this log. The cookbook sends the next step before it saves, and repeats
    # that step when it resumes, so a resumed loop ends elsewhere than the whole one.
    first = (tmp_path / "whole" / "checkpoints.jsonl").read_text().splitlines()[0]
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoints.jsonl").write_text(f"{first}\n")
        asyncio.run(supervised_train.main(sft(base, tmp_path, tmp_path / name)))
        assert len(rows(tmp_path / name)) == 5
    final = [checkpoints(tmp_path / name)[-1] for name in ("one", "other")]
    assert [kept["name"] for kept in final] == ["final", "final"]
    assert version(final[0]["sampler_path"]) == version(final[1]["sampler_path"])


def test_the_rl_loop_samples_what_it_trains(base, tmp_path):
    builder = ArithmeticDatasetBuilder(
        batch_size=2, model_name_for_tokenizer=base, renderer_name=RENDERER, n_batches=3, group_size=4
    )
    config = rl_train.Config(
        learning_rate=1e-3,
        dataset_builder=builder,
        model_name=base,
        recipe_name="recipe_math_rl",
        renderer_name=RENDERER,
        max_tokens=8,
        log_path=str(tmp_path / "rl"),
        base_url=URL,
        lora_rank=8,
        eval_every=0,
        save_every=2,
    )
    asyncio.run(rl_train.main(config))
    found = rows(tmp_path / "rl")
    assert len(found) == 3
    for row in found:
        # The log-probabilities of sampling and of training are the same bits, so both estimates are exactly 0.
        kl = {name: value for name, value in row.items() if name.startswith("optim/kl_sample_train")}
        assert kl and all(value == 0 for value in kl.values()), kl
        # An answer of another form is punished by a tenth.
        assert -0.11 <= row["env/all/reward/total"] <= 1.1
    assert checkpoints(tmp_path / "rl")[-1]["name"] == "final"
