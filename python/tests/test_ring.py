"""Exact arithmetic and the two executors of `shares`, against fake executors. Needs no torch."""

from __future__ import annotations

import json
import pathlib
import struct
import threading

import numpy as np
import pytest
from conftest import some_sites
from fake_executor import WEIGHT_EXPONENT, FakeExecutor, integers

import holobiont
from holobiont import Class, Dtype, Limits, Op, Path, Session, seeded_rows
from holobiont.fixed_point import Room, from_whole, less, pack, room_for, room_of, to_whole, unpack
from holobiont.masking import evaluator
from holobiont.protocol import Source, Status
from holobiont.seeded_rows import Draw

GOLDEN = json.loads((pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden" / "ring.json").read_text())
PATIENT = Limits(connect_s=5, answer_s=20, retry_s=20)


def rows(count, width, seed=1):
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


@pytest.fixture
def pair(place):
    """Two executors of the same weights, exact."""
    with FakeExecutor(place / "a", some_sites(), is_exact=True) as first:
        with FakeExecutor(place / "b", some_sites(), is_exact=True) as second:
            yield first, second


def bare(executor):
    return evaluator(Session(executor.address, limits=PATIENT), Path.RING, None)


def shares(first, second):
    sessions = [Session(executor.address, masking="shares", limits=PATIENT) for executor in (first, second)]
    return evaluator(sessions[0], Path.RING, None, sessions[1])


def asks():
    """Sites, parts, operations and rows."""
    for part, outputs in ((None, 14), (1, 4)):
        yield 0, part, Op.FORWARD, rows(3, 8)
        yield 0, part, Op.BACKWARD, rows(2, outputs, seed=2)
    yield 1, None, Op.FORWARD, rows(3, 6)
    yield 1, 0, Op.FORWARD_NO_BIAS, rows(1, 6, seed=3)
    yield 2, None, Op.FORWARD, rows(2, 8, seed=4)
    yield 2, 0, Op.BACKWARD, rows(2, 5, seed=5)


# --- Numbers ----------------------------------------------------------------------------------------------------------


def test_rows_become_the_whole_numbers_that_exact_fractions_become_and_back():
    for golden in GOLDEN["conversions"]:
        row = np.array([golden["row"]], np.uint32).view(np.float32)
        whole, exponents = to_whole(row, golden["bits"])
        assert (int(exponents[0]), whole.view(np.int64)[0].tolist()) == (golden["exponent"], golden["whole"])
        answers = np.array([golden["answers"]], np.int64).view(np.uint64)
        back = from_whole(answers, exponents + golden["weight_exponent"])
        assert back.view(np.uint32)[0].tolist() == golden["back"]


def test_each_row_has_an_exponent_of_its_own():
    tall = np.array([[1.0, -3.0], [1e-30, 2e-30], [0.0, 0.0], [3e38, 1e30]], np.float32)
    together, exponents = to_whole(tall, 30)
    for row in range(4):
        alone, exponent = to_whole(tall[row : row + 1], 30)
        assert exponent[0] == exponents[row] and np.array_equal(alone[0], together[row])


def test_bits_are_those_that_an_answer_leaves_room_for():
    narrow = {0: 30, 1: 30, 1 << 16: 30, (1 << 16) + 1: 29, 1 << 28: 18}
    assert {l1: room_for(l1, True) for l1 in narrow} == {l1: Room(6, bits) for l1, bits in narrow.items()}
    assert all(room_for(l1, False) == Room(8, 30) for l1 in narrow), "rows that are no whole words otherwise"
    wide = {(1 << 28) + 1: 30, 1 << 32: 30, (1 << 32) + 1: 29, 1 << 50: 12}
    for is_even in (True, False):
        assert {l1: room_for(l1, is_even) for l1 in wide} == {l1: Room(8, bits) for l1, bits in wide.items()}
        assert room_for((1 << 50) + 1, is_even) is None


def test_numbers_travel_as_their_lower_bytes_one_behind_the_other():
    numbers = np.array([[0, -1, 1, (1 << 46) - 1], [-(1 << 46), 0x123456789ABC, 5, -7]], np.int64).view(np.uint64)
    for room in (Room(6, 20), Room(8, 30)):
        packed = pack(numbers, room)
        lower = [b"".join(struct.pack("<Q", number)[: room.number_bytes] for number in row) for row in numbers.tolist()]
        assert (packed.dtype, packed.tobytes()) == (np.float32, b"".join(lower))
        np.testing.assert_array_equal(unpack(packed, room), numbers)


def test_rows_of_a_key_are_those_of_the_published_cipher():
    for golden in GOLDEN["draws"]:
        draw = Draw(bytes.fromhex(golden["key"]), golden["first"])
        assert draw.rows(2, len(golden["rows"][0]), Room(8, 30)).tolist() == golden["rows"]
        assert Draw.from_bytes(draw.to_bytes()) == draw
    # RFC 8439, A.1, test vector 1.
    assert Draw(bytes(32), 0).rows(1, 1, Room(8, 30))[0, 0] == 0x903DF1A0_ADE0B876
    published = bytes.fromhex("76b8e0ada0f13d90405d6ae5")
    assert pack(Draw(bytes(32), 0).rows(1, 2, Room(6, 20)), Room(6, 20)).tobytes() == published
    assert "key" not in repr(Draw(b"secret" * 5 + b"..", 3))


# --- Calls ------------------------------------------------------------------------------------------------------------


def exactly(executor, site, part, op, x):
    """What exact integers make of rows."""
    layers = executor.sites[site] if part is None else [executor.sites[site][part]]
    weight = integers(layers).astype(object)
    whole, exponents = to_whole(x, room_of(executor.catalog.sites[site], op).bits)
    answer = whole.view(np.int64).astype(object) @ (weight if op is Op.BACKWARD else weight.T)
    out = from_whole(answer.astype(np.int64).view(np.uint64), exponents + WEIGHT_EXPONENT)
    bias = np.concatenate([np.zeros(len(layer.weight), np.float32) if layer.bias is None else layer.bias for layer in layers])
    return out + bias if op is Op.FORWARD else out


def test_exact_answers_are_those_of_integers_and_near_those_of_floats(pair):
    first, _ = pair
    rented = bare(first)
    for site, part, op, x in asks():
        found = rented.evaluate(site, part, op, Class.PREFILL, x)
        np.testing.assert_array_equal(found, exactly(first, site, part, op, x))
        np.testing.assert_allclose(found, rented.session.call(site, x, part=part, op=op), atol=1e-4)


def test_with_shares_answers_have_the_bits_of_the_ring_path(pair):
    first, second = pair
    plain, masked = bare(first), shares(first, second)
    for site, part, op, x in asks():
        wanted = plain.evaluate(site, part, op, Class.TRAINING, x)
        np.testing.assert_array_equal(masked.evaluate(site, part, op, Class.TRAINING, x), wanted)


def test_more_rows_than_a_call_takes_go_in_several(place):
    with FakeExecutor(place / "a", some_sites(), is_exact=True, max_rows=4) as first:
        with FakeExecutor(place / "b", some_sites(), is_exact=True, max_rows=3) as second:
            x = rows(10, 8)
            wanted = bare(first).evaluate(0, None, Op.FORWARD, Class.PREFILL, x)
            assert [call.rows for call in first.calls] == [4, 4, 2]
            np.testing.assert_array_equal(shares(first, second).evaluate(0, None, Op.FORWARD, Class.PREFILL, x), wanted)
            assert [call.rows for call in second.calls] == [3, 3, 3, 1]


def test_the_first_executor_sees_other_rows_each_time_and_the_second_one_none(pair):
    first, second = pair
    masked = shares(first, second)
    x = np.ones((3, 8), np.float32)
    for _ in range(4):
        masked.evaluate(0, None, Op.FORWARD, Class.DECODE, x)
    sent = np.concatenate(first.rows)
    assert len(np.unique(sent)) == sent.size == 4 * 3 * 8, "equal rows look different"
    assert {call.source for call in second.calls} == {Source.DRAW}
    # Both together see everything.
    bare(first).evaluate(0, None, Op.FORWARD, Class.DECODE, x)
    room = first.room(second.calls[0])
    np.testing.assert_array_equal(less(sent, np.concatenate(second.rows), room), np.tile(first.rows[-1], (4, 1)))


def covered(first, second):
    """Asserts that no row was drawn twice, or covers two rows; says how many rows are known to be covered."""
    room = first.room(second.calls[0])
    draws = [Draw.from_bytes(payload).rows(call.rows, 8, room) for call, payload in zip(second.calls, second.payloads)]
    rows = [unpack(np.frombuffer(payload, "<f4").reshape(-1, room.words(8)), room) for payload in first.payloads]
    drawn, sent = np.concatenate(draws), np.concatenate(rows)
    assert len(np.unique(drawn, axis=0)) == len(drawn), "a row was drawn twice"
    # What a row's own pad leaves is small.
    small = np.abs(less(sent[:, None], drawn[None], room).view(np.int64)).max(axis=2) < 1 << 30
    assert (small.sum(axis=0) <= 1).all(), "a pad covers two rows"
    # A draw that was lost on its way is known to nobody.
    return int(small.sum())


def test_no_pad_covers_two_rows_whatever_is_lost_or_refused(pair):
    first, second = pair
    masked, x = shares(first, second), rows(2, 8)
    wanted = bare(first).evaluate(0, None, Op.FORWARD, Class.DECODE, x)
    first.payloads.clear()

    def lose(executor):
        executor.faults.swallow = 2

    def refuse(executor):
        executor.faults.refuse.extend([(Status.BUSY, 1), (Status.QUOTA, 1), (Status.DRAINING, 1), (Status.SEQUENCE, 1)])

    for harmed in pair:
        for harm in (lose, refuse, FakeExecutor.restart):
            harm(harmed)
            np.testing.assert_array_equal(masked.evaluate(0, None, Op.FORWARD, Class.DECODE, x), wanted)
    # Six answers; what was lost, or answered by one executor alone, was asked again under other pads.
    assert covered(first, second) > 6 * 2


def test_threads_share_a_key_and_no_pad(pair):
    first, second = pair
    masked, x = shares(first, second), rows(1, 8)
    wanted, wrong = bare(first).evaluate(0, None, Op.FORWARD, Class.DECODE, x), []
    first.payloads.clear()

    def ask():
        for _ in range(10):
            if not np.array_equal(masked.evaluate(0, None, Op.FORWARD, Class.DECODE, x), wanted):
                wrong.append(x)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and covered(first, second) == 30


def test_a_bias_is_asked_for_once_by_zeros(pair):
    first, second = pair
    masked = shares(first, second)
    for _ in range(3):
        masked.evaluate(1, None, Op.FORWARD, Class.DECODE, rows(2, 6))
    asked = [given for call, given in zip(first.calls, first.rows) if call.path is Path.LINEAR]
    assert len(asked) == 1 and not asked[0].any()


# --- Refusals ---------------------------------------------------------------------------------------------------------


def test_what_is_not_sound_or_not_exact_is_refused_by_name(place, pair, executor):
    first, second = pair

    def session(at, masking="shares"):
        return Session(at.address, masking=masking, limits=PATIENT)

    def refused(why, *given):
        with pytest.raises(holobiont.MaskingRefused, match=why):
            evaluator(*given)

    other = some_sites()
    other[1][0].weight[0, 0] += 1
    with FakeExecutor(place / "c", other, is_exact=True) as stranger:
        refused(r"other weights .* site 1 \(model.layers.0.self_attn.o_proj\)", session(first), Path.RING, None, session(stranger))
    with FakeExecutor(place / "d", some_sites()[:1], is_exact=True) as short:
        refused("another number of sites", session(first), Path.RING, None, session(short))
    refused("same process", session(first), Path.RING, None, session(first))
    refused("--layer-exact", session(executor, "off"), Path.RING, None)
    refused("--layer-exact", session(first), Path.RING, None, session(executor))
    refused("takes second=", session(first), Path.RING, None)
    refused("leave path out", session(first), Path.LINEAR, None, session(second))
    refused("bf16 would round", session(first), Path.RING, Dtype.BF16, session(second))
    refused("bf16 would round", session(first, "off"), Path.RING, Dtype.BF16)
    refused("is nothing for masking='off'", session(first, "off"), Path.RING, None, session(second))
    refused("opened with masking='shares'", session(first), Path.RING, None, session(second, "off"))
    refused("takes pads=", session(first, "pads"), Path.RING, None)
    refused("takes pads=", session(first, "pads"), Path.RING, None, session(second))
    assert not first.calls and not second.calls


def test_executors_that_become_one_are_refused_when_they_do(pair):
    first, second = pair
    masked = shares(first, second)
    second.restart()
    second.instance = first.instance
    with pytest.raises(holobiont.MaskingRefused, match="same process"):
        masked.evaluate(0, None, Op.FORWARD, Class.DECODE, rows(1, 8))


def test_a_row_that_is_no_number_is_named_and_not_sent(pair):
    first, _ = pair
    x = rows(3, 8)
    x[2, 5] = np.inf
    with pytest.raises(holobiont.CallRefused, match="row 2 for site 0"):
        bare(first).evaluate(0, None, Op.FORWARD, Class.DECODE, x)
    with pytest.raises(holobiont.CallRefused, match="rows of 8 numbers"):
        bare(first).evaluate(0, None, Op.FORWARD, Class.DECODE, rows(1, 9))
    with pytest.raises(holobiont.CallRefused, match="no whole numbers"):
        bare(first).session.call(0, rows(1, 8), path=Path.RING)
    assert not first.calls


def test_without_the_cipher_the_package_that_has_it_is_named(pair, monkeypatch):
    monkeypatch.setattr(seeded_rows, "ChaCha20", None)
    with pytest.raises(holobiont.MaskingRefused, match=r"holobiont\[privacy\]"):
        shares(*pair)
