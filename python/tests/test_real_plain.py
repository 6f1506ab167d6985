"""The package against the real executor, without torch: rows through sites, forward and backward, beside numpy.

HOLOBIONT_BASE_EXECUTOR is the program (`target/debug/base-executor`); without one these tests are skipped by name.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import time

import numpy as np
import pytest

import holobiont
from holobiont.fixed_point import from_whole, pack, room_of, to_whole, unpack
from holobiont.masking import evaluator
from holobiont.protocol import Class, Op, Path, Source
from holobiont.session import Ask

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
EXECUTOR = pathlib.Path(os.environ.get("HOLOBIONT_BASE_EXECUTOR") or TARGET / "debug" / "base-executor")
START_S = 120

pytestmark = pytest.mark.skipif(not EXECUTOR.is_file(), reason=f"there is no executor at {EXECUTOR}; cargo build")


def save(folder, tensors, config):
    """A safetensors directory: a length, a header that says where each tensor lies, the tensors."""
    folder.mkdir()
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    head = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data)
    (folder / "config.json").write_text(json.dumps(config))


@contextlib.contextmanager
def executor(model, place, *arguments):
    """A running executor that serves nothing but layers; gives the address of its private socket."""
    run = place / "run"
    run.mkdir(mode=0o700)
    command = [EXECUTOR, "--engine", "none", "--model", model, "--layers", run / "layers.sock", "--exit-with-stdin"]
    command += arguments
    with open(place / "log", "wb") as log, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log) as it:
        try:
            deadline = time.monotonic() + START_S
            while not (run / "layers.zmq").exists():
                assert it.poll() is None and time.monotonic() < deadline, (place / "log").read_text()
                time.sleep(0.05)
            yield f"ipc://{run}/layers.zmq"
        finally:
            it.kill()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A GPT-2 of one block, whose matrices are stored the other way round: its folder and its tensors."""
    place, random = tmp_path_factory.mktemp("base"), np.random.default_rng(5)
    shapes = {"attn.c_attn": (32, 96), "attn.c_proj": (32, 32), "mlp.c_fc": (32, 128), "mlp.c_proj": (128, 32)}
    weights = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    tensors = {"wte.weight": random.normal(size=(64, 32)).astype(np.float32), "wpe.weight": np.zeros((16, 32), np.float32)}
    for name, weight in weights.items():
        tensors[f"h.0.{name}.weight"] = weight
        tensors[f"h.0.{name}.bias"] = random.normal(size=weight.shape[1]).astype(np.float32)
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64}
    save(place / "model", tensors, config)
    return place / "model", tensors


@pytest.fixture(scope="module")
def base(model, tmp_path_factory):
    """An executor that serves it, and its tensors."""
    folder, tensors = model
    with executor(folder, tmp_path_factory.mktemp("base")) as address:
        yield address, tensors


@pytest.fixture(scope="module")
def exact(model, tmp_path_factory):
    """Two that serve it exactly."""
    folder, _ = model
    places = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    with executor(folder, places[0], "--layer-exact") as first, executor(folder, places[1], "--layer-exact") as second:
        yield first, second


def sites(session):
    """Site and part by the name of the module."""
    places = {}
    for number, site in enumerate(session.catalog.sites):
        for part, layer in enumerate(site.parts):
            places[layer.name] = (number, part)
    return places


def test_rows_through_every_layer_are_those_of_numpy_forward_and_backward(base):
    address, tensors = base
    random = np.random.default_rng(6)
    with holobiont.Session(address) as session:
        places = sites(session)
        layers = {name.removesuffix(".weight") for name in tensors if ".c_" in name and name.endswith(".weight")}
        assert set(places) == layers | {"lm_head"}, "the head is the embedding's"
        for name, (site, part) in places.items():
            weight = tensors["wte.weight"].T if name == "lm_head" else tensors[f"{name}.weight"]
            bias = tensors.get(f"{name}.bias", np.zeros(weight.shape[1], np.float32))
            x = random.normal(size=(7, weight.shape[0])).astype(np.float32)
            g = random.normal(size=(7, weight.shape[1])).astype(np.float32)
            for path in (Path.FAST, Path.LINEAR):
                np.testing.assert_allclose(session.call(site, x, part=part, path=path), x @ weight + bias, atol=1e-4)
            np.testing.assert_allclose(session.call(site, x, part=part, op=Op.FORWARD_NO_BIAS), x @ weight, atol=1e-4)
            np.testing.assert_allclose(session.call(site, g, part=part, op=Op.BACKWARD), g @ weight.T, atol=1e-4)


def test_a_row_has_the_same_bits_alone_and_among_others_and_what_is_wrong_is_refused_by_name(base):
    address, _ = base
    with holobiont.Session(address, name="tester") as session:
        rows = np.random.default_rng(7).normal(size=(33, session.catalog.sites[0].columns)).astype(np.float32)
        together = session.call(0, rows)
        for row in (0, 16, 32):
            assert np.array_equal(session.call(0, rows[row : row + 1])[0], together[row])
        with pytest.raises(holobiont.HolobiontError, match="no site"):
            session.call(10_000, rows)
        assert session.stats().calls == 4


# --- Exact arithmetic -------------------------------------------------------------------------------------------------


def rented(address, second=None, pads=None):
    """Exact arithmetic over one executor, or two, or one and pads."""
    masking = "shares" if second else "pads" if pads else "off"
    sessions = [at and holobiont.Session(at, masking=masking) for at in (address, second)]
    return evaluator(sessions[0], Path.RING, None, sessions[1] or pads)


def directions(session):
    """Every site, and single layers of it, forward and backward, with rows for them."""
    random = np.random.default_rng(8)
    for number, site in enumerate(session.catalog.sites):
        for part in (None, *range(len(site.parts))):
            for op in (Op.FORWARD, Op.FORWARD_NO_BIAS, Op.BACKWARD):
                width, _ = site.widths(part, op)
                scale = np.float32(10.0) ** random.integers(-6, 6, size=(5, 1))
                yield number, part, op, (random.normal(size=(5, width)) * scale).astype(np.float32)


def test_the_ring_path_is_what_integers_make_of_the_rows(exact):
    """The weights' own integers, seen through rows that have a single 1; all else in Python's integers, which have no end."""
    first = rented(exact[0])
    session = first.session
    for number, part, op, x in directions(session):
        site = session.catalog.sites[number]
        ring = Op.BACKWARD if op is Op.BACKWARD else Op.FORWARD_NO_BIAS
        ones = np.eye(x.shape[1], dtype=np.uint64)
        room = room_of(site, op)
        weights = unpack(session.ask(Ask(number, part, ring, Path.RING, Class.TRAINING), pack(ones, room)), room)
        weights = weights.view(np.int64).astype(object)
        sums = max(abs(weights).sum(axis=0))
        assert sums <= site.ring.l1[op is Op.BACKWARD], "what bounds answers"
        whole, exponents = to_whole(x, room.bits)
        products = (whole.view(np.int64).astype(object) @ weights).astype(np.int64).view(np.uint64)
        wanted = from_whole(products, exponents + site.ring.weight_exponent)
        if op is Op.FORWARD:
            wanted += session.call(number, np.zeros((1, site.columns), np.float32), part=part)
        found = first.evaluate(number, part, op, Class.TRAINING, x)
        np.testing.assert_array_equal(found, wanted)
        near = session.call(number, x, part=part, op=op)
        assert np.abs(found - near).max() <= 1e-5 * np.abs(near).max()


def test_two_real_executors_that_see_nothing_give_the_bits_of_one_that_sees_everything(exact):
    first, both = rented(exact[0]), rented(*exact)
    for number, part, op, x in directions(first.session):
        wanted = first.evaluate(number, part, op, Class.TRAINING, x)
        np.testing.assert_array_equal(both.evaluate(number, part, op, Class.TRAINING, x), wanted)
    assert both.session.stats().refused == 0


def test_pads_that_the_real_client_made_hide_rows_and_leave_the_bits(exact, model, tmp_path):
    folder, _ = model
    prepare = [EXECUTOR.with_name("holobiont-client"), "pads", "prepare", "--model", folder, "--pads", tmp_path / "pads"]
    for what in ([], ["--gradients"]):
        subprocess.run([*prepare, "--tokens", "60", *what], check=True, capture_output=True)
    with holobiont.Pool(tmp_path / "pads") as pads:
        plain, masked = rented(exact[0]), rented(exact[0], pads=pads)
        for number, part, op, x in directions(plain.session):
            wanted = plain.evaluate(number, part, op, Class.TRAINING, x)
            np.testing.assert_array_equal(masked.evaluate(number, part, op, Class.TRAINING, x), wanted)
        left = [min(pads.left(site, backward) for site in range(len(pads.shapes))) for backward in (False, True)]
    show = [EXECUTOR.with_name("holobiont-client"), "pads", "show", "--pads", tmp_path / "pads", "--json"]
    shown = json.loads(subprocess.run(show, check=True, capture_output=True).stdout)
    assert 0 < shown["tokens"] <= left[0] < 120 and shown["gradient_tokens"] <= left[1] < 60, "the real client goes on where it ended"


def test_what_does_not_go_together_is_refused_by_the_real_executor_and_one_without_a_ring_path_is_named(exact, base):
    with pytest.raises(holobiont.MaskingRefused, match="--layer-exact"):
        rented(base[0])
    with pytest.raises(holobiont.MaskingRefused, match="same process"):
        rented(exact[0], exact[0])
    session = holobiont.Session(exact[0])
    ring = Ask(0, None, Op.FORWARD, Path.RING, Class.DECODE)
    row = np.zeros((1, session.widths(ring)[0]), np.float32)
    with pytest.raises(holobiont.CallRefused, match="do not go together"):
        session.ask(ring, row)
    linear = Ask(0, None, Op.FORWARD, Path.LINEAR, Class.DECODE)
    with pytest.raises(holobiont.CallRefused, match="do not go together"):
        session.attempt(linear, 1, bytes(40), session.backoff(), source=Source.DRAW)


def test_checks_that_the_real_client_made_let_true_answers_pass_and_no_other_weights(exact, model, tmp_path):
    folder, _ = model
    make = [EXECUTOR.with_name("holobiont-client"), "checks", "--model", folder, tmp_path / "checks"]
    subprocess.run(make, check=True, capture_output=True)
    assert (tmp_path / "checks").stat().st_mode & 0o777 == 0o600
    again = subprocess.run(make, check=False, capture_output=True, text=True)
    assert again.returncode != 0 and "cannot write" in again.stderr, "nothing is written over"
    checks = holobiont.Checks(tmp_path / "checks")
    plain = rented(exact[0])
    with holobiont.Session(exact[0]) as session:
        sure = evaluator(session, Path.RING, None, None, checks)
        for number, part, op, x in directions(session):
            wanted = plain.evaluate(number, part, op, Class.TRAINING, x)
            np.testing.assert_array_equal(sure.evaluate(number, part, op, Class.TRAINING, x), wanted)
