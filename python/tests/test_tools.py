"""What trainers and tools do to a model whose layers are remote: it works as with the local model, or says why it cannot.

Needs torch, transformers and peft; the tests of `SFTTrainer` need TRL.
"""

from __future__ import annotations

import pickle

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from compare import TOKENS, step, with_lora  # noqa: E402
from models import MAKERS, VOCABULARY, make, serve  # noqa: E402
from sft import SENTENCES, fine_tune, same_fine_tuning, words  # noqa: E402

import holobiont  # noqa: E402
from holobiont import Op  # noqa: E402


@pytest.fixture
def llama(place):
    """A tiny Llama, and a fake executor of its layers."""
    with serve(make("llama"), place) as executor:
        yield make("llama"), executor


# --- TRL --------------------------------------------------------------------------------------------------------------


def test_sft_trainer_trains_as_over_the_local_model(place, tmp_path):
    pytest.importorskip("trl")
    with serve(make("gemma"), place) as executor:
        model = make("gemma")
        holobiont.attach(model, executor.address)
        same_fine_tuning(model, make("gemma"), words(), SENTENCES, tmp_path)
        assert {Op.FORWARD, Op.BACKWARD} <= {call.op for call in executor.calls}


def test_sft_trainer_says_that_it_needs_a_head_that_was_rented_and_trains_with_one_that_is_kept(llama, tmp_path):
    pytest.importorskip("trl")
    model, executor = llama
    holobiont.attach(model, executor.address)
    with pytest.raises(holobiont.RemoteWeights, match="keep"):
        fine_tune(model, words(), SENTENCES, tmp_path / "rented")
    kept = make("llama")
    holobiont.attach(kept, executor.address, keep=["lm_head"])
    same_fine_tuning(kept, make("llama"), words(), SENTENCES, tmp_path)


# --- What a trainer's steps cost --------------------------------------------------------------------------------------


def test_a_trainer_logs_what_each_step_sent_and_what_connected_again(llama, tmp_path):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    model, executor = llama
    holobiont.attach(model, executor.address, check_weights=False)

    class BreaksTheSecondStep(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 1:
                executor.restart()

    traffic = holobiont.TrafficCallback()
    trainer = Trainer(
        model=with_lora(model, ["q_proj", "v_proj"]),
        args=TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in TOKENS] * 3,
        callbacks=[traffic, BreaksTheSecondStep()],
    )
    trainer.train()
    assert [step.reconnects for step in traffic.steps] == [0, 1, 0]
    first, _, last = traffic.steps
    # Nine sites forward, and back all but the first block's, whose input nobody learns from.
    assert first == last and first.calls == 9 + 8 and first.bytes_out > 2 * 8 * 64 * 4 * 9
    shown = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["reconnects"] for entry in shown] == [0, 1, 0]
    assert shown[0]["bytes_out"] == first.bytes_out and shown[0]["bytes_in"] == first.bytes_in


# --- Autocast ---------------------------------------------------------------------------------------------------------


def test_autocast_asks_no_more_often(llama):
    model, executor = llama
    holobiont.attach(model, executor.address, check_weights=False)
    model = with_lora(model, ["q_proj", "v_proj"])
    step(model)
    plain = [(call.site, call.part, call.op) for call in executor.calls]
    executor.calls.clear()
    with torch.autocast("cpu", torch.bfloat16):
        _, loss, gradients = step(model)
    assert [(call.site, call.part, call.op) for call in executor.calls] == plain
    with torch.autocast("cpu", torch.bfloat16):
        _, loss_l, gradients_l = step(with_lora(make("llama"), ["q_proj", "v_proj"]))
    assert abs(loss - loss_l) < 0.02
    for name, gradient in gradients_l.items():
        torch.testing.assert_close(gradients[name], gradient, atol=0.1 * float(gradient.abs().max()), rtol=0)


# --- What needs the weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "compute",
    [
        lambda weight, x: torch.nn.functional.linear(x, weight),
        lambda weight, x: x @ weight.T,
        lambda weight, x: weight.float().norm(),
        lambda weight, x: weight.data.add_(1),
        lambda weight, x: weight.data.clone(),
        lambda weight, x: torch.nn.init.zeros_(weight),
    ],
)
def test_whoever_computes_with_weights_that_are_elsewhere_is_told(llama, compute):
    model, executor = llama
    holobiont.attach(model, executor.address)
    with pytest.raises(holobiont.RemoteWeights, match=r"keep=\[\.\.\.\]"), torch.no_grad():
        compute(model.lm_head.weight, torch.randn(2, 64))


def test_a_placeholder_answers_what_tools_ask_of_weights(llama):
    model, executor = llama
    local = make("llama").lm_head.weight
    holobiont.attach(model, executor.address)
    weight = model.lm_head.weight
    assert isinstance(weight, torch.nn.Parameter) and "executor" in repr(weight)
    assert (weight.shape, weight.dtype, weight.device) == (local.shape, local.dtype, local.device)
    assert weight.numel() == local.numel() and weight.is_floating_point()
    # As PEFT prepares a quantized model for training.
    weight.data = weight.data.to(torch.bfloat16)
    assert weight.dtype is torch.bfloat16 and weight.data_ptr() == 0


def test_a_vocabulary_is_resized_before_attaching_or_with_its_head_kept(llama):
    model, executor = llama
    holobiont.attach(model, executor.address)
    with pytest.raises(holobiont.RemoteWeights, match="resize"):
        model.resize_token_embeddings(VOCABULARY + 8)
    for attach_first in (True, False):
        model, reference = make("llama"), make("llama")
        torch.manual_seed(1)
        reference.resize_token_embeddings(VOCABULARY + 8)
        torch.manual_seed(1)
        if attach_first:
            holobiont.attach(model, executor.address, keep=["lm_head"])
            model.resize_token_embeddings(VOCABULARY + 8)
        else:
            model.resize_token_embeddings(VOCABULARY + 8)
            with pytest.warns(holobiont.LocalLayerWarning, match="lm_head"):
                holobiont.attach(model, executor.address)
        with torch.no_grad():
            torch.testing.assert_close(model(TOKENS).logits, reference(TOKENS).logits, atol=1e-4, rtol=0)


def test_a_tied_vocabulary_is_resized_at_any_time(place):
    with serve(make("gemma"), place) as executor:
        model = make("gemma")
        holobiont.attach(model, executor.address)
        model.resize_token_embeddings(VOCABULARY + 8)
        with torch.no_grad():
            logits = model(TOKENS).logits
            assert logits.shape[-1] == VOCABULARY + 8
            torch.testing.assert_close(logits[..., :VOCABULARY], make("gemma")(TOKENS).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("pack", [pickle.dumps, lambda model: torch.save(model, "/dev/null")])
def test_models_and_sessions_are_not_pickled_and_say_what_is_instead(llama, pack):
    model, executor = llama
    attached = holobiont.attach(model, executor.address)
    with pytest.raises(holobiont.RemoteWeights, match="state_dict"):
        pack(model)
    with pytest.raises(holobiont.HolobiontError, match="open one"):
        pack(attached.session)
    pack(model.state_dict())


@pytest.mark.parametrize("kind", [torch.complex64, torch.int64])
def test_rows_that_are_no_real_numbers_are_refused(llama, kind):
    model, executor = llama
    holobiont.attach(model, executor.address, check_weights=False)
    with pytest.raises(holobiont.CallRefused, match="real"):
        model.lm_head(torch.ones(2, 64, dtype=kind))
    assert not executor.calls


def test_models_of_every_kind_move_between_types_without_their_weights(place):
    for architecture in MAKERS:
        with serve(make(architecture), place) as executor:
            model = make(architecture)
            attached = holobiont.attach(model, executor.address, free=True)
            model.half().float().to("meta")
            weights = [model.get_submodule(layer.name).weight for layer in attached.remote]
            assert all(weight.device.type == "meta" and weight.dtype is torch.float32 for weight in weights)
