"""Any Hugging Face model over remote layers, with PEFT in both orders. Needs torch, transformers and peft."""

from __future__ import annotations

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from compare import TOKENS, same_step, step, targets_of, tokens_of, with_lora  # noqa: E402
from models import MAKERS, make, serve  # noqa: E402
from pools import make_pool  # noqa: E402

import holobiont  # noqa: E402
from holobiont import Class, Dtype, Op, Path  # noqa: E402

ARCHITECTURES = list(MAKERS)


@pytest.fixture
def llama(place):
    """A tiny Llama, and a fake executor of its layers."""
    model = make("llama")
    with serve(model, place) as executor:
        yield model, executor


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("order", ["attach first", "peft first"])
def test_lora_over_remote_layers_is_lora_over_local_ones(architecture, order, place):
    reference = with_lora(make(architecture), targets_of(architecture))
    with serve(make(architecture), place) as executor:
        model = make(architecture)
        if order == "attach first":
            holobiont.attach(model, executor.address, strict=True)
            model = with_lora(model, targets_of(architecture))
        else:
            model = with_lora(model, targets_of(architecture))
            holobiont.attach(model, executor.address, strict=True)
        same_step(model, reference, 1e-4)
        assert torch.equal(tokens_of(model), tokens_of(reference))
        kinds = {(call.op, call.urgency) for call in executor.calls}
        training = {(Op.FORWARD, Class.TRAINING), (Op.BACKWARD, Class.TRAINING)}
        assert training | {(Op.FORWARD, Class.DECODE), (Op.FORWARD, Class.PREFILL)} == kinds


def test_layers_that_share_their_input_are_one_call(llama):
    model, executor = llama
    holobiont.attach(model, executor.address, check_weights=False)
    with torch.no_grad():
        model(input_ids=TOKENS)
    assert len(executor.calls) == 2 * 4 + 1
    assert all(call.part is None or len(executor.sites[call.site]) == 1 for call in executor.calls)
    executor.calls.clear()
    step(with_lora(model, ["q_proj", "v_proj"]))
    # Below the first layer nothing is trained but through q and v: its own site's inputs need no gradient.
    assert sum(call.op is Op.FORWARD for call in executor.calls) == 9
    assert sum(call.op is Op.BACKWARD for call in executor.calls) == 8


def test_the_same_input_changed_in_place_is_another_input(llama):
    model, executor = llama
    local = make("llama").model.layers[0].self_attn
    holobiont.attach(model, executor.address)
    attention = model.model.layers[0].self_attn
    x = torch.randn(3, 64)
    with torch.no_grad():
        torch.testing.assert_close(attention.q_proj(x), local.q_proj(x))
        x += 1
        torch.testing.assert_close(attention.k_proj(x), local.k_proj(x))
        torch.testing.assert_close(attention.k_proj(x), local.k_proj(x))
        torch.testing.assert_close(attention.v_proj(x), local.v_proj(x))


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_recomputes_remotely(llama, reentrant):
    model, executor = llama
    reference = with_lora(make("llama"), ["q_proj", "down_proj"])
    holobiont.attach(model, executor.address)
    model = with_lora(model, ["q_proj", "down_proj"]).train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    same_step(model, reference.train(), 1e-4)


def test_freed_weights_take_no_memory_and_adapters_still_train(llama):
    model, executor = llama
    attached = holobiont.attach(model, executor.address, free=True)
    weights = {layer.name: model.get_submodule(layer.name).weight for layer in attached.remote}
    assert all(w.data_ptr() == 0 for w in weights.values())
    assert all(w.shape == make("llama").get_submodule(name).weight.shape for name, w in weights.items())
    model = with_lora(model, ["q_proj", "v_proj"])
    same_step(model, with_lora(make("llama"), ["q_proj", "v_proj"]), 1e-4)
    with pytest.raises(holobiont.WeightsGone):
        holobiont.detach(model)


def test_a_model_can_be_built_without_ever_having_its_linear_weights(llama):
    local, executor = llama
    with torch.device("meta"):
        model = MAKERS["llama"]().eval()
    holobiont.attach(model, executor.address)
    small = {n: p for n, p in local.state_dict().items() if "norm" in n or "embed" in n}
    for name, parameter in small.items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, torch.nn.Parameter(parameter, requires_grad=False))
    model.model.rotary_emb = local.model.rotary_emb
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=TOKENS).logits, local(input_ids=TOKENS).logits, atol=1e-4, rtol=0)


def test_detach_gives_the_local_layers_back(llama):
    model, executor = llama
    before = dict(model.named_modules())
    wrapped = with_lora(model, ["q_proj"])
    attached = holobiont.attach(wrapped, executor.address)
    executor.calls.clear()
    holobiont.detach(wrapped)
    same_step(wrapped, with_lora(make("llama"), ["q_proj"]), 0)
    assert not executor.calls and wrapped.base_model.model.lm_head is before["lm_head"]
    with pytest.raises(holobiont.HolobiontError, match="closed"):
        attached.session.stats()


def test_a_session_of_ones_own_stays_open(llama):
    model, executor = llama
    with holobiont.Session(executor.address) as session:
        holobiont.attach(model, session)
        holobiont.detach(model)
        assert session.stats().calls > 0


def test_attaching_twice_is_refused(llama):
    model, executor = llama
    holobiont.attach(model, executor.address)
    with pytest.raises(holobiont.AlreadyAttached):
        holobiont.attach(model, executor.address)


# --- What stays -------------------------------------------------------------------------------------------------------


def test_a_layer_that_the_executor_lacks_stays_and_is_reported(place):
    model = make("llama")
    with serve(model, place, skip=("model.layers.1.mlp.down_proj",)) as executor:
        with pytest.raises(holobiont.LayersStayLocal, match="down_proj"):
            holobiont.attach(model, executor.address, strict=True)
        assert not any(isinstance(m, holobiont.VirtLayer) for m in model.modules())
        with pytest.warns(holobiont.LocalLayerWarning, match="down_proj: not in the catalog"):
            attached = holobiont.attach(model, executor.address)
        assert [layer.name for layer in attached.local] == ["model.layers.1.mlp.down_proj"]
        assert "down_proj" in str(attached)
        with torch.no_grad():
            torch.testing.assert_close(model(TOKENS).logits, make("llama")(TOKENS).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("served", [True, False])
def test_a_tied_head_stays_with_its_embedding_without_a_warning(place, served):
    with (
        serve(make("gemma"), place, skip=() if served else ("lm_head",)) as executor,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", holobiont.LocalLayerWarning)
        model = make("gemma")
        attached = holobiont.attach(model, executor.address, strict=True, free=True)
        [head] = attached.local
        assert head.name == "lm_head" and head.expected and "embedding" in head.reason
        with torch.no_grad():
            torch.testing.assert_close(model(TOKENS).logits, make("gemma")(TOKENS).logits, atol=1e-4, rtol=0)


def test_a_tied_head_is_rented_by_whoever_says_so(place):
    with serve(make("gemma"), place) as executor:
        model = make("gemma")
        attached = holobiont.attach(model, executor.address, keep=[])
        assert not attached.local and "lm_head" in [layer.name for layer in attached.remote]
        with torch.no_grad():
            torch.testing.assert_close(model(TOKENS).logits, make("gemma")(TOKENS).logits, atol=1e-4, rtol=0)


def test_layers_that_are_to_be_kept_are_named_by_the_ends_of_their_names(llama):
    model, executor = llama
    with pytest.raises(holobiont.HolobiontError, match="'head'"):
        holobiont.attach(model, executor.address, keep=["head"])
    attached = holobiont.attach(model, executor.address, keep=["lm_head", "0.mlp.up_proj"], strict=True)
    assert {layer.name for layer in attached.local} == {"lm_head", "model.layers.0.mlp.up_proj"}
    same_step(with_lora(model, ["q_proj", "up_proj"]), with_lora(make("llama"), ["q_proj", "up_proj"]), 1e-4)


def test_layers_that_are_trained_stay(llama):
    model, executor = llama
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    attached = holobiont.attach(model, executor.address, strict=True)
    assert [(layer.name, layer.reason) for layer in attached.local] == [("lm_head", "is trained")]
    _, _, gradients = step(model)
    reference = make("llama")
    reference.requires_grad_(False)
    reference.lm_head.requires_grad_(True)
    torch.testing.assert_close(gradients, step(reference)[2], atol=1e-5, rtol=1e-3)


def test_what_peft_trains_as_a_whole_stays(llama):
    model, executor = llama
    config = {"targets": ["q_proj"], "modules_to_save": ["lm_head"]}
    model, reference = with_lora(model, **config), with_lora(make("llama"), **config)
    holobiont.attach(model, executor.address)
    same_step(model, reference, 1e-4)


def test_a_base_with_other_weights_is_refused(place):
    model, other = make("llama"), make("llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(torch.randn_like(parameter))
    with serve(other, place) as executor:
        with pytest.raises(holobiont.BaseChanged, match="other weights"):
            holobiont.attach(model, executor.address)
        assert not any(isinstance(m, holobiont.VirtLayer) for m in model.modules())


def test_a_model_of_another_shape_is_refused(place):
    with serve(make("gpt2"), place, skip=("lm_head",)) as executor:
        with pytest.raises(holobiont.LayersStayLocal, match="no layer"):
            holobiont.attach(make("qwen2"), executor.address)


# --- What adapters and tools do to layers -----------------------------------------------------------------------------


def test_biases_may_be_trained(place):
    reference = with_lora(make("qwen2"), ["q_proj"], bias="all")
    with serve(make("qwen2"), place) as executor:
        model = make("qwen2")
        holobiont.attach(model, executor.address)
        model = with_lora(model, ["q_proj"], bias="all")
        same_step(model, reference, 1e-4)
        assert Op.FORWARD_NO_BIAS in {call.op for call in executor.calls}


def test_ia3_over_remote_layers(place):
    config = peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    reference = peft.get_peft_model(make("llama"), config)
    with serve(make("llama"), place) as executor:
        model = make("llama")
        holobiont.attach(model, executor.address)
        same_step(peft.get_peft_model(model, config), reference, 1e-4)


def test_weights_that_are_not_there_cannot_be_trained_or_merged(llama):
    model, executor = llama
    holobiont.attach(model, executor.address)
    model.requires_grad_(True)
    with pytest.raises(holobiont.RemoteWeights, match="freeze"):
        model(input_ids=TOKENS)
    model.requires_grad_(False)
    with pytest.raises(holobiont.RemoteWeights, match="merge"):
        with_lora(model, ["q_proj"]).merge_and_unload()


def test_moving_and_copying_never_makes_the_weights(llama):
    model, executor = llama
    holobiont.attach(model, executor.address, free=True)
    moved = copy.deepcopy(model).to(torch.bfloat16)
    layer = moved.model.layers[0].mlp.up_proj
    assert layer.weight.dtype is torch.bfloat16 and layer.weight.data_ptr() == 0
    with torch.no_grad():
        logits = moved(input_ids=TOKENS).logits
    assert logits.dtype is torch.bfloat16
    torch.testing.assert_close(logits.float(), make("llama")(input_ids=TOKENS).logits, atol=0.2, rtol=0)


def test_state_dicts_hold_what_is_here(llama):
    model, executor = llama
    holobiont.attach(model, executor.address)
    state = model.state_dict()
    assert state and not any(name.endswith("_proj.weight") for name in state)
    model.load_state_dict(state)


def test_the_class_and_the_path_can_be_said(llama):
    model, executor = llama
    holobiont.attach(model, executor.address, path="fast", dtype="bf16", check_weights=False)
    with holobiont.traffic("verify"), torch.no_grad():
        model(input_ids=TOKENS)
    assert {(call.urgency, call.path) for call in executor.calls} == {(Class.VERIFY, Path.FAST)}
    executor.calls.clear()
    step(with_lora(model, ["q_proj"]))
    assert {call.path for call in executor.calls if call.op is Op.BACKWARD} == {Path.LINEAR}


def test_masked_training_is_training(llama):
    model, executor = llama
    attached = holobiont.attach(model, executor.address, masking="paper")
    assert attached.masking == "paper" and "masking paper" in str(attached)
    model = with_lora(model, ["q_proj", "down_proj"])
    same_step(model, with_lora(make("llama"), ["q_proj", "down_proj"]), 1e-3)
    assert Class.NOISE in {call.urgency for call in executor.calls}


@pytest.mark.parametrize("options", [{"path": "fast"}, {"dtype": "bf16"}])
def test_masking_is_refused_where_it_would_be_weakened(llama, options):
    model, executor = llama
    with pytest.raises(holobiont.MaskingRefused):
        holobiont.attach(model, executor.address, masking="paper", **options)


@pytest.fixture
def pair(place):
    """A tiny Llama, and two exact executors of its layers."""
    model = make("llama")
    with serve(model, place, socket="a", is_exact=True) as first, serve(model, place, socket="b", is_exact=True) as second:
        yield model, first, second


def test_two_executors_train_the_bits_of_exact_arithmetic_and_see_nothing(pair):
    model, first, second = pair
    plain, targets = make("llama"), ["q_proj", "down_proj"]
    attached = holobiont.attach(plain, first.address, path="ring")
    assert attached.path is Path.RING and attached.masking == "off"
    plain = with_lora(plain, targets)
    same_step(plain, with_lora(make("llama"), targets), 1e-3)
    logits, loss, gradients = step(plain)
    first.payloads.clear()
    attached = holobiont.attach(model, first.address, masking="shares", second=second.address)
    assert attached.path is Path.RING and "path ring" in str(attached) and "masking shares" in str(attached)
    masked = with_lora(model, targets)
    found, its, of = step(masked)
    assert torch.equal(found, logits) and its == loss
    assert all(torch.equal(of[name], gradient) for name, gradient in gradients.items())
    assert {call.op for call in second.calls} == {Op.FORWARD_NO_BIAS, Op.BACKWARD}
    assert len(set(first.payloads)) == len(first.payloads), "nothing was sent twice"
    holobiont.detach(masked)
    with pytest.raises(holobiont.HolobiontError, match="closed"):
        attached.session.stats()


def test_pads_train_the_bits_of_exact_arithmetic_and_are_closed_with_the_attachment(pair, place):
    model, first, _ = pair
    pads, targets = make_pool(place / "pads", first, 4 * TOKENS.numel()), ["q_proj", "down_proj"]
    plain = make("llama")
    holobiont.attach(plain, first.address, path="ring")
    logits, loss, gradients = step(with_lora(plain, targets))
    first.payloads.clear()
    attached = holobiont.attach(model, first.address, masking="pads", pads=pads)
    assert attached.path is Path.RING and "masking pads" in str(attached)
    masked = with_lora(model, targets)
    found, its, of = step(masked)
    assert torch.equal(found, logits) and its == loss
    assert all(torch.equal(of[name], gradient) for name, gradient in gradients.items())
    assert len(set(first.payloads)) == len(first.payloads), "nothing was sent twice"
    with pytest.raises(holobiont.MaskingRefused, match="in use"):
        holobiont.Pool(pads)
    holobiont.detach(masked)
    with holobiont.Pool(pads) as pool, pytest.raises(holobiont.MaskingRefused, match="choose one"):
        holobiont.attach(masked, first.address, masking="pads", pads=pool, second=first.address)


def test_masks_and_paths_that_do_not_go_together_are_refused_and_change_nothing(pair):
    model, first, second = pair
    for options in (
        {"masking": "shares"},
        {"masking": "shares", "second": second.address, "path": "linear"},
        {"masking": "shares", "second": second.address, "dtype": "bf16"},
        {"masking": "shares", "second": first.address},
        {"masking": "paper", "second": second.address},
        {"masking": "paper", "path": "ring"},
        {"masking": "pads", "pads": "/nowhere"},
        {"masking": "off", "pads": "/nowhere"},
    ):
        with pytest.raises(holobiont.MaskingRefused):
            holobiont.attach(model, first.address, **options)
    assert not any(isinstance(module, holobiont.VirtLayer) for module in model.modules())


def test_options_that_are_none_are_named(llama):
    model, executor = llama
    with pytest.raises(holobiont.HolobiontError, match="'linear'"):
        holobiont.attach(model, executor.address, path="quick")


def test_a_training_loop_lowers_its_loss_over_a_line_that_breaks(llama):
    model, executor = llama
    holobiont.attach(model, executor.address)
    model = with_lora(model, ["q_proj", "v_proj", "down_proj"])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for turn in range(8):
        if turn == 4:
            executor.restart()
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3


# --- What travels -----------------------------------------------------------------------------------------------------


def test_bf16_travels_as_bf16_and_loses_nothing_by_it(place):
    with serve(make("llama"), place) as executor:
        found = {}
        for wire in ("f32", None):
            model = make("llama").bfloat16()
            attached = holobiont.attach(model, executor.address, dtype=wire, check_weights=False)
            executor.calls.clear()
            before = attached.session.counters
            found[wire] = step(with_lora(model, ["q_proj", "v_proj"])), attached.session.counters - before
            assert {call.dtype for call in executor.calls} == {Dtype.F32 if wire else Dtype.BF16}
    (logits, loss, gradients), wide = found["f32"]
    (logits_b, loss_b, gradients_b), narrow = found[None]
    assert torch.equal(logits, logits_b) and loss == loss_b
    assert all(torch.equal(gradient, gradients_b[name]) for name, gradient in gradients.items())
    assert narrow.calls == wide.calls and 0.5 < narrow.bytes_out / wide.bytes_out < 0.6


@pytest.mark.parametrize("masking", ["off", "paper"])
def test_what_is_wider_or_masked_travels_with_all_its_digits(llama, masking):
    model, executor = llama
    if masking == "paper":
        model = model.bfloat16()
    attached = holobiont.attach(model, executor.address, masking=masking, check_weights=False)
    step(with_lora(model, ["q_proj"]))
    assert {call.dtype for call in executor.calls} == {Dtype.F32} and "else f32" in str(attached)


def test_autocast_halves_what_travels(llama):
    model, executor = llama
    holobiont.attach(model, executor.address, check_weights=False)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(input_ids=TOKENS)
    assert {call.dtype for call in executor.calls} == {Dtype.BF16}
