"""`holobiont.model` and `holobiont.tokenizer`: a base from its endpoint alone. Needs torch, transformers, peft and gguf."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")
gguf = pytest.importorskip("gguf")

from compare import TOKENS, same_step, targets_of, tokens_of, with_lora  # noqa: E402
from fake_executor import FakeExecutor  # noqa: E402
from gguf_models import GGUF_MAKERS, make_gguf, write_gguf  # noqa: E402
from models import MAKERS, make, sites  # noqa: E402
from real import MODEL, PROMPT, ROOT, executor, needs_executor, needs_model  # noqa: E402
from sft import SENTENCES, same_fine_tuning, words  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import holobiont  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """A cache of its own for what is fetched."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder / "holobiont" / "python-skeletons"


# --- Safetensors folders ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=list(MAKERS))
def served(request, tmp_path_factory):
    """An architecture, and an executor that serves its linear layers from a safetensors folder with a tokenizer."""
    place = tmp_path_factory.mktemp(request.param)
    make(request.param).save_pretrained(place / "model")
    words().save_pretrained(place / "model")
    with executor(place / "model", place, "--engine", "none") as address:
        yield request.param, address


@needs_executor
def test_a_model_from_an_endpoint_is_the_local_one_attached_to_the_bit(served):
    architecture, address = served
    model, attached = holobiont.model(address), make(architecture)
    holobiont.attach(attached, address)
    assert not model.training and model.dtype is torch.float32 and not any(p.is_meta for p in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, attached(TOKENS).logits)
    assert torch.equal(tokens_of(model), tokens_of(make(architecture)))


@needs_executor
def test_lora_over_a_model_from_an_endpoint_is_lora_over_the_local_one(served):
    architecture, address = served
    targets = targets_of(architecture)
    same_step(with_lora(holobiont.model(address), targets), with_lora(make(architecture), targets), 1e-3)


@needs_executor
def test_a_bf16_model_is_built_and_rented_in_bf16(tmp_path):
    make("llama").bfloat16().save_pretrained(tmp_path / "model")
    with executor(tmp_path / "model", tmp_path, "--engine", "none") as address:
        with holobiont.Session(address) as session:
            model = holobiont.model(session)
            before = session.counters
            with torch.no_grad():
                logits = model(TOKENS).logits
            narrow = session.counters - before
            wide_model = holobiont.model(session, dtype=torch.float32)
            before = session.counters
            with torch.no_grad():
                wide_model(TOKENS)
            wide = session.counters - before
            stats = session.stats()
            counted = session.counters
        attached = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        holobiont.attach(attached, address, dtype="f32")
        with torch.no_grad():
            assert model.dtype is logits.dtype is torch.bfloat16 and torch.equal(logits, attached(TOKENS).logits)
    assert narrow.calls == wide.calls and 0.5 < narrow.bytes_out / wide.bytes_out < 0.6
    assert counted.calls == stats.calls and counted.reconnects == 0


@needs_executor
def test_sft_trainer_and_its_log_of_what_travels(tmp_path):
    pytest.importorskip("trl")
    make("gemma").save_pretrained(tmp_path / "model")
    words().save_pretrained(tmp_path / "model")
    with executor(tmp_path / "model", tmp_path, "--engine", "none") as address:
        model, tokenizer = holobiont.model(address), holobiont.tokenizer(address)
        assert tokenizer(SENTENCES[0]).input_ids == words()(SENTENCES[0]).input_ids
        traffic = holobiont.TrafficCallback()
        same_fine_tuning(model, make("gemma"), tokenizer, SENTENCES, tmp_path, [traffic])
    assert len(traffic.steps) == 6
    for step in traffic.steps:
        assert step.calls > 0 and step.bytes_out > 0 and step.bytes_in > 0 and step.reconnects == 0


# --- GGUF files -------------------------------------------------------------------------------------------------------


@needs_executor
@pytest.mark.parametrize("architecture", list(GGUF_MAKERS))
def test_a_model_from_a_gguf_file_is_the_one_it_was_written_of(architecture, tmp_path):
    factors = [1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0] if architecture == "llama" else None
    local = make_gguf(architecture)
    write_gguf(local, tmp_path / "model.gguf", factors)
    with executor(tmp_path / "model.gguf", tmp_path, "--engine", "none") as address:
        model = holobiont.model(address)
        same_step(with_lora(model, ["q_proj", "v_proj"]), with_lora(local, ["q_proj", "v_proj"]), 1e-3)
        assert torch.equal(tokens_of(model), tokens_of(local))


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """An executor of SmolLM2 with its resident engine."""
    place = tmp_path_factory.mktemp("real")
    with executor(MODEL, place, "--socket", place / "run" / "executor.sock") as address:
        yield address


@needs_executor
@needs_model
def test_the_real_model_is_the_attached_one_to_the_bit(smollm2, cache):
    files = {"gguf_file": MODEL.name}
    tokenizer = holobiont.tokenizer(smollm2)
    tokens = tokenizer(PROMPT, return_tensors="pt").input_ids
    assert torch.equal(tokens, AutoTokenizer.from_pretrained(MODEL.parent, **files)(PROMPT, return_tensors="pt").input_ids)
    fetched = set(cache.iterdir())
    model = holobiont.model(smollm2)
    assert set(cache.iterdir()) == fetched, "the skeleton is fetched once"
    local = AutoModelForCausalLM.from_pretrained(MODEL.parent, dtype=torch.float32, **files).eval()
    with torch.no_grad():
        exact = local(tokens).logits
        holobiont.attach(local, smollm2, free=True)
        logits = model(tokens).logits
        assert torch.equal(logits, local(tokens).logits)
    torch.testing.assert_close(logits, exact, atol=1e-3, rtol=0)
    said = model.generate(tokens, max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(said[0]).startswith(f"{PROMPT} Paris")


_GROWTH = """
import sys, pathlib, re, torch, transformers, gguf, holobiont, holobiont.load, holobiont.gguf_file
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
transformers.LlamaForCausalLM, transformers.LlamaConfig
before = peak()
model = holobiont.model(sys.argv[1])
print(peak() - before)
"""


@needs_executor
@needs_model
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there is no /proc")
def test_the_base_is_never_held(smollm2):
    """538 MB in 32 bits, of which the embedding has 113."""
    folder = os.path.dirname(os.path.dirname(holobiont.__file__))
    run = subprocess.run(
        [sys.executable, "-c", _GROWTH, smollm2],
        env={**os.environ, "PYTHONPATH": folder},
        check=True,
        capture_output=True,
        text=True,
    )
    grown = int(run.stdout.splitlines()[-1]) / 1e3
    print(f"{grown:.0f} MB more")
    assert grown < 260


# --- What cannot be built ---------------------------------------------------------------------------------------------


def given(*files):
    """Files as a fake executor gives them out, whole."""
    return [(name, data, ((0, len(data)),)) for name, data in files]


def written(tmp_path, architecture):
    """The bytes of a GGUF file without tensors."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return (tmp_path / "model.gguf").read_bytes()


@pytest.mark.parametrize(
    ("name", "data", "error", "says"),
    [
        ("model.gguf", "mamba", holobiont.UnsupportedModel, "'mamba', and llama, qwen2, qwen3"),
        ("model.gguf", b"GGUF\3\0\0\0" + bytes([255] * 16), holobiont.ProtocolError, "ends early"),
        ("model.gguf", b"not this", holobiont.ProtocolError, "no GGUF"),
        ("config.json", b'{"model_type": "nothing"}', holobiont.UnsupportedModel, "attach"),
        ("config.json", b'{"model_type": "vit"}', holobiont.UnsupportedModel, "attach"),
    ],
)
def test_what_cannot_be_built_says_what_can_be_done(place, tmp_path, name, data, error, says):
    data = written(tmp_path, data) if isinstance(data, str) else data
    with FakeExecutor(place / "layers.zmq", sites(make("llama")), files=given((name, data))) as fake:
        with pytest.raises(error, match=says):
            holobiont.model(fake.address)


def test_an_executor_without_a_skeleton_is_named(place):
    with FakeExecutor(place / "layers.zmq", sites(make("llama"))) as fake:
        with pytest.raises(holobiont.UnsupportedModel, match="gives out no skeleton"):
            holobiont.model(fake.address)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_holes_are_not_taken_for_weights(place, tmp_path, kind):
    """The files of a whole model, of which the last bytes are not given out."""
    if kind == "gguf":
        local = make_gguf("llama")
        write_gguf(local, tmp_path / "model.gguf")
    else:
        local = make("llama")
        local.save_pretrained(tmp_path)
    whole = [(file.name, file.read_bytes()) for file in sorted(tmp_path.iterdir())]
    files = [(n, data, ((0, len(data) if n.endswith("json") else len(data) - 512),)) for n, data in whole]
    with FakeExecutor(place / "layers.zmq", sites(local, ["lm_head"] * (kind == "gguf")), files=files) as fake:
        with pytest.raises(holobiont.UnsupportedModel, match="does not give out model.*norm.weight"):
            holobiont.model(fake.address)


def test_a_layer_that_is_nowhere_is_named(place, tmp_path):
    local = make("llama")
    local.save_pretrained(tmp_path)
    whole = [(file.name, file.read_bytes()) for file in sorted(tmp_path.iterdir())]
    with FakeExecutor(place / "layers.zmq", sites(local, ["lm_head"]), files=given(*whole)) as fake:
        with pytest.raises(holobiont.LayersStayLocal, match="lm_head"):
            holobiont.model(fake.address)


# --- The guide --------------------------------------------------------------------------------------------------------


@needs_executor
def test_the_guide_runs_as_it_stands(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    guide = (ROOT / "docs/guides/python-training.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    make("gemma").save_pretrained(tmp_path / "model")
    words().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    with executor(tmp_path / "model", tmp_path, "--engine", "none") as address:
        names = {}
        for block in blocks:
            exec(block.replace("~/.local/share/holobiont/state", address), names)
        names["session"].close()
    assert len(blocks) >= 4 and len(names["traffic"].steps) == 2
    assert (tmp_path / "pirate" / "adapter_model.safetensors").is_file()
