"""Answers that are checked, against a fake executor that lies. Needs no torch."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import some_sites
from fake_executor import FakeExecutor, integers
from pools import make_pool
from test_ring import PATIENT, asks, bare, rows

import holobiont
from holobiont import Checks, Class, Op, Path, Pool, Session, WrongAnswer
from holobiont.masking import evaluator
from holobiont.verification import _equal

SECRET_BITS, CHECKS = 30, 2


def make_checks(path, executor, commitments=None):
    """The file that ``holobiont-client checks`` would write, of numpy's weights."""
    random = np.random.default_rng(3)
    tensors = {}

    def add(name, weight):
        secret = random.integers(0, 1 << SECRET_BITS, (CHECKS, len(weight)))
        tensors[f"{name}.secret"] = ("U32", secret.astype("<u4"))
        tensors[f"{name}.effect"] = ("I64", (secret @ weight).astype("<i8"))

    for number, layers in enumerate(executor.sites):
        for part, layer in enumerate(layers):
            add(f"{number}.{part}", integers([layer]))
        add(f"{number}.back", integers(layers).T)
        if layers[0].bias is not None:
            tensors[f"{number}.bias"] = ("F32", layers[0].bias.astype("<f4"))
    hashes = b"".join(site.ring.commitment for site in executor.catalog.sites) if commitments is None else commitments
    header, data = {"__metadata__": {"format": "freivalds 1", "commitments": hashes.hex()}}, b""
    for name, (dtype, tensor) in tensors.items():
        raw = tensor.tobytes()
        header[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data)
    return path


class Liar(FakeExecutor):
    """Turns one bit of its exact answers."""

    turned = None

    def _exact(self, call, payload, layers):
        header, answer = super()._exact(call, payload, layers)
        if self.turned is not None:
            number, bit = self.turned
            size = self.room(call).number_bytes
            turned = bytearray(answer)
            turned[number % (len(answer) // size) * size + bit // 8] ^= 1 << bit % 8
            answer = bytes(turned)
        return header, answer


@pytest.fixture
def liar(place):
    with Liar(place / "a", some_sites(), is_exact=True, max_rows=4) as running:
        yield running


@pytest.fixture
def file(place, liar):
    return make_checks(place / "checks", liar)


def checked(executor, file, masking="off", aside=None):
    session = Session(executor.address, masking=masking, limits=PATIENT)
    return evaluator(session, Path.RING, None, aside, Checks(file))


def test_true_answers_pass_for_sites_and_parts_of_them_and_are_what_they_were(liar, file):
    plain, sure = bare(liar), checked(liar, file)
    for site, part, op, x in asks():
        wanted = plain.evaluate(site, part, op, Class.TRAINING, x)
        np.testing.assert_array_equal(sure.evaluate(site, part, op, Class.TRAINING, x), wanted)


@pytest.mark.parametrize("bit", [0, 31, 46, 47])
def test_one_wrong_bit_is_an_error_that_names_the_layers(liar, file, bit):
    for site, part, op, x in asks():
        liar.turned = (5, bit)
        with pytest.raises(WrongAnswer, match=f"site {site} .*(self_attn|lm_head)"):
            checked(liar, file).evaluate(site, part, op, Class.TRAINING, x)


def test_answers_to_pads_and_a_bias_are_checked_as_well(liar, file, place):
    with Pool(make_pool(place / "pads", liar, 40)) as held:
        hidden = checked(liar, file, "pads", held)
        wanted = bare(liar).evaluate(0, None, Op.FORWARD, Class.DECODE, rows(6, 8))
        np.testing.assert_array_equal(hidden.evaluate(0, None, Op.FORWARD, Class.DECODE, rows(6, 8)), wanted)
        liar.turned = (0, 40)
        with pytest.raises(WrongAnswer):
            hidden.evaluate(0, None, Op.FORWARD, Class.DECODE, rows(1, 8))
    liar.turned = None
    liar.sites[1][0].bias[2] += 1
    with pytest.raises(WrongAnswer, match="site 1"):
        checked(liar, file).evaluate(1, None, Op.FORWARD, Class.DECODE, rows(1, 6))


def test_sums_are_whole_numbers_whatever_their_size():
    random = np.random.default_rng(4)
    x, secret = (random.integers(-(1 << 30), 1 << 30, (2, 9)) for _ in range(2))
    weights = random.integers(-(1 << 28), 1 << 28, (9, 9))
    effect = (secret.astype(object) @ weights).astype(np.int64)
    answer = (x.astype(object) @ weights.T).astype(np.int64)
    assert _equal(x, effect, answer, secret)
    # What a check modulo 2^64 would let pass.
    wrong = answer.copy()
    wrong[1, :2] ^= np.int64(-1) << 63
    assert not _equal(x, effect, wrong, secret)
    # More terms than a float adds up exactly.
    many = np.full((1, 70_001), (1 << 30) - 1)
    assert _equal(many, many + 1, many + 1, many)
    assert not _equal(many, many + 1, many, many)


def refused(why, call, *given):
    with pytest.raises(holobiont.MaskingRefused, match=why):
        call(*given)


def test_what_cannot_be_checked_is_refused_before_anything_is_sent(liar, file, place):
    refused("holds no checks .*'holobiont-client checks", Checks, place / "none")
    (place / "short").write_bytes(file.read_bytes()[:100])
    refused("holds no checks", Checks, place / "short")
    other = make_checks(place / "other", liar, bytes(64))
    refused("of other weights", checked, liar, other)
    session = Session(liar.address, limits=PATIENT)
    refused("only exact answers", evaluator, session, Path.LINEAR, None, None, Checks(file))
    assert not liar.calls
