"""The package against the real executor. Needs torch, transformers, peft, gguf, and what `real` names."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from compare import same_step, step, targets_of, tokens_of, with_lora  # noqa: E402
from models import MAKERS, make  # noqa: E402
from real import MODEL, PROMPT, executor, free_port, needs_executor  # noqa: E402
from sft import SENTENCES, same_fine_tuning, words  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import holobiont  # noqa: E402

KEY = "hb-python-test"
# BLAKE3 in its key derivation mode, context "holobiont 2026 API key lookup v1", of the key.
KEY_HASH = "30b0e6889911063373c4d5d570caa9bbf73d32b3e4d17239a136e18cc464901d"
FIRST = ("q_proj", "k_proj", "v_proj", "c_attn")

pytestmark = needs_executor


@pytest.fixture(scope="module", params=list(MAKERS))
def served(request, tmp_path_factory):
    """An architecture, and an executor that serves its linear layers from a safetensors directory."""
    place = tmp_path_factory.mktemp(request.param)
    make(request.param).save_pretrained(place / "model")
    with executor(place / "model", place, "--engine", "none") as address:
        yield request.param, address


def wrapped(architecture, address, order, **options):
    """The model over remote layers, with LoRA."""
    model, targets = make(architecture), targets_of(architecture)
    if order == "attach first":
        attached = holobiont.attach(model, address, **options)
        return with_lora(model, targets), attached
    model = with_lora(model, targets)
    return model, holobiont.attach(model, address, **options)


@pytest.mark.parametrize("order", ["attach first", "peft first"])
def test_logits_gradients_and_tokens_are_those_of_the_local_model(served, order):
    architecture, address = served
    reference = with_lora(make(architecture), targets_of(architecture))
    model, attached = wrapped(architecture, address, order, strict=True)
    assert len(attached.remote) >= 2 * 4
    logits, gradients = same_step(model, reference, 1e-3)
    assert torch.equal(tokens_of(model), tokens_of(reference))
    print(f"{architecture}, {order}: logits within {logits:.1e}, gradients within {gradients:.1e}")
    holobiont.detach(model)


@pytest.mark.parametrize("architecture", list(MAKERS))
def test_what_is_compared_was_computed_by_the_executor(architecture, tmp_path):
    """The control of the test above: weights a hundredth larger at the executor show in logits and gradients."""
    larger, targets = make(architecture), targets_of(architecture)
    with torch.no_grad():
        for name, module in larger.named_modules():
            if type(module).__name__ in ("Linear", "Conv1D") and name != "lm_head":
                module.weight.mul_(1.01)
    larger.save_pretrained(tmp_path / "model")
    reference = with_lora(make(architecture), targets)
    with executor(tmp_path / "model", tmp_path, "--engine", "none") as address:
        model, attached = wrapped(architecture, address, "attach first", check_weights=False)
        logits, _, gradients = step(model)
        sites = len({layer.site for layer in attached.remote})
        # Below what reads the first block's input nothing is trained: these layers are not asked for its gradient.
        first = {r.site for r in attached.remote if ".0." in r.name and r.name.endswith(FIRST)}
        assert attached.session.stats().calls == sites + sites - len(first)
    logits_r, _, gradients_r = step(reference)
    assert float((logits - logits_r).abs().max()) > 1e-2
    assert max(float((gradients[name] - g).abs().max() / g.abs().max()) for name, g in gradients_r.items()) > 5e-3


def test_sft_trainer_trains_as_over_the_local_model(tmp_path):
    pytest.importorskip("trl")
    make("gemma").save_pretrained(tmp_path / "model")
    with executor(tmp_path / "model", tmp_path, "--engine", "none") as address:
        model = make("gemma")
        attached = holobiont.attach(model, address)
        same_fine_tuning(model, make("gemma"), words(), SENTENCES, tmp_path)
        assert attached.session.stats().rows[3] > 0


def test_masked_training_is_training(served):
    architecture, address = served
    reference = with_lora(make(architecture), targets_of(architecture))
    model, attached = wrapped(architecture, address, "attach first", masking="paper")
    same_step(model, reference, 1e-3)
    holobiont.detach(model)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_training_over_two_executors_has_the_bits_of_exact_arithmetic(architecture, tmp_path):
    make(architecture).save_pretrained(tmp_path / "model")
    places = [tmp_path / name for name in ("first", "second")]
    for place in places:
        place.mkdir()
    served = [executor(tmp_path / "model", place, "--engine", "none", "--layer-exact") for place in places]
    with served[0] as first, served[1] as second:
        exact, _ = wrapped(architecture, first, "attach first", path="ring")
        same_step(exact, with_lora(make(architecture), targets_of(architecture)), 1e-3)
        logits, loss, gradients = step(exact)
        masked, attached = wrapped(architecture, first, "peft first", masking="shares", second=second)
        found, its, of = step(masked)
        assert torch.equal(found, logits) and its == loss
        assert all(torch.equal(of[name], gradients[name]) for name in gradients)
        assert torch.equal(tokens_of(masked), tokens_of(exact))
        assert attached.session.stats().refused == 0
        holobiont.detach(masked)


def test_an_executor_counts_what_a_session_used(served):
    architecture, address = served
    model = make(architecture)
    with holobiont.Session(address, name="counted") as session:
        holobiont.attach(model, session, check_weights=False)
        tokens_of(model, count=3)
        stats = session.stats()
        assert stats.calls > 0 and stats.refused == 0 and stats.rows[0] > 0 and stats.rows[2] > 0
        assert stats.bytes_in > 0 and stats.bytes_out > 0


def test_a_killed_executor_is_followed_by_its_successor(tmp_path):
    make("gpt2").save_pretrained(tmp_path / "model")
    model, reference = make("gpt2"), make("gpt2")
    with executor(tmp_path / "model", tmp_path, "--engine", "none") as address:
        holobiont.attach(model, address)
        before = tokens_of(model)
    (tmp_path / "run" / "layers.zmq").unlink(missing_ok=True)
    with executor(tmp_path / "model", tmp_path, "--engine", "none"):
        assert torch.equal(tokens_of(model), before)
    assert torch.equal(before, tokens_of(reference))


def test_keys_open_the_tls_door(tmp_path, certificates):
    make("llama").save_pretrained(tmp_path / "model")
    keys = tmp_path / "keys"
    keys.write_text(f"user alice blake3:{KEY_HASH}\n")
    keys.chmod(0o600)
    port = free_port()
    files = ["--layer-cert", certificates / "server.pem", "--layer-cert-key", certificates / "server.key"]
    door = ["--layer-listen", f"127.0.0.1:{port}", *files, "--layer-key-file", keys]
    ca = certificates / "server.pem"
    with executor(tmp_path / "model", tmp_path, "--engine", "none", *door):
        model = make("llama")
        with pytest.raises(holobiont.AuthenticationFailed):
            holobiont.attach(model, f"tls://localhost:{port}", api_key="wrong", ca=ca)
        attached = holobiont.attach(model, f"tls://localhost:{port}", api_key=KEY, ca=ca)
        assert attached.session.opened.tenant == "alice"
        reference = with_lora(make("llama"), targets_of("llama"))
        same_step(with_lora(model, targets_of("llama")), reference, 1e-3)


# --- The real model ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """SmolLM2 with its resident engine, and the same weights dequantized by the gguf package."""
    pytest.importorskip("gguf")
    if not MODEL.is_file():
        pytest.skip(f"there is no model at {MODEL}; scripts/fetch-model")
    place = tmp_path_factory.mktemp("real")
    files = {"gguf_file": MODEL.name}

    def load():
        return AutoModelForCausalLM.from_pretrained(MODEL.parent, dtype=torch.float32, **files).eval()

    tokens = AutoTokenizer.from_pretrained(MODEL.parent, **files)(PROMPT, return_tensors="pt").input_ids
    with executor(MODEL, place, "--socket", place / "run" / "executor.sock") as address:
        yield address, load, tokens


def test_the_real_model_is_the_dequantized_one(real):
    address, load, tokens = real
    targets = ["q_proj", "v_proj", "down_proj"]
    reference, model = with_lora(load(), targets), with_lora(load(), targets)
    attached = holobiont.attach(model, address)
    assert len(attached.remote) >= 30 * 7
    logits, gradients = same_step(model, reference, 1e-3, tokens)
    print(f"SmolLM2: logits within {logits:.1e}, gradients within {gradients:.1e}")
    with torch.no_grad():
        settings = {"max_new_tokens": 8, "do_sample": False}
        assert torch.equal(model.generate(tokens, **settings), reference.generate(tokens, **settings))
    holobiont.detach(model)


def test_the_fast_path_rounds_and_says_nearly_the_same(real):
    address, load, tokens = real
    reference, model = load(), load()
    holobiont.attach(model, address, path="fast", free=True, check_weights=False)
    with torch.no_grad():
        near, exact = model(tokens).logits, reference(tokens).logits
    apart = float((near - exact).norm() / exact.norm())
    print(f"SmolLM2, fast path: logits {apart:.1%} apart")
    assert 0 < apart < 0.1
    assert int(near[0, -1].argmax()) == int(exact[0, -1].argmax())


def test_a_skeleton_and_rented_layers_are_a_model(real, tmp_path):
    address, load, tokens = real
    with holobiont.Session(address) as session:
        [file] = holobiont.skeleton(session, tmp_path)
        assert file.stat().st_size == MODEL.stat().st_size
        model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).eval()
        holobiont.attach(model, session, free=True, check_weights=False)
        with torch.no_grad():
            torch.testing.assert_close(model(tokens).logits, load()(tokens).logits, atol=1e-3, rtol=0)
