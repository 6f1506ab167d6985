"""Bytes, written down by hand from the executor's definition of the protocol. Needs no torch and no executor."""

from __future__ import annotations

import numpy as np
import pytest

from holobiont import protocol as p
from holobiont.errors import ProtocolError
from holobiont.wire_dtype import decode_rows, encode_rows

CALL = p.CallHeader(p.Op.BACKWARD, p.Path.LINEAR, p.Class.TRAINING, p.Dtype.BF16, 0x01020304, 2, 0x1122334455667788, 3, 64, 128)
CALL_BYTES = bytes.fromhex(
    "484c4331"  # "HLC1"
    "02010301"  # backward, linear, training, bf16
    "04030201"  # site
    "02000000"  # part, rows follow, zero
    "8877665544332211"  # sequence
    "03000000"  # rows
    "00000000"  # zero
    "4000000000000000"  # input
    "8000000000000000"  # output
    "00000000000000000000000000000000"
)
REPLY = p.ReplyHeader(p.Status.BUSY, p.Dtype.F32, 250, 0, 7, 1000, 12)
REPLY_BYTES = bytes.fromhex(
    "484c5231"  # "HLR1"
    "03000000"  # busy, f32, zero
    "fa000000"  # retry_after_ms
    "00000000"  # rows
    "0700000000000000"  # sequence
    "e8030000"  # waited_us
    "0c000000"  # batch_rows
    + "00" * 32
)

TO_LAYERS = [
    (
        p.Open(1, 0, "k", "né", "off", 5),
        "00 01000000 0000000000000000 01000000 6b 03000000 6ec3a9 03000000 6f6666 0500000000000000",
    ),
    (p.Fetch(1, 0x30, 0xC000), "01 01000000 3000000000000000 00c00000"),
    (p.Channel(4096), "02 0010000000000000"),
    (p.GetStats(), "03"),
    (p.Close(), "04"),
]
FROM_LAYERS = [
    (
        p.Opened(9, 2, "t", 300, 256, 16384, 1 << 28),
        "00 0900000000000000 0200000000000000 01000000 74 2c010000 00010000 00400000 0000001000000000",
    ),
    (p.Refused(p.RefusalCode.MASKING, "no", 0), "01 07 02000000 6e6f 00000000"),
    (p.Fetched(0, 16, b"\xff\x00"), "02 00000000 1000000000000000 02000000 ff00"),
    (p.ChannelReady(3, 2, 1), "03 0300000000000000 0200000000000000 01000000"),
    (
        p.SessionStats(1, 2, (3, 4, 5, 6, 7), 8, 9, 10, 11, 12),
        "04" + "".join(f"{number:02x}00000000000000" for number in range(1, 13)),
    ),
    (p.Draining(), "05"),
]
CATALOG = p.Catalog(
    model="m",
    architecture="gpt2",
    base_hash=bytes(range(32)),
    context_length=1024,
    kv_dtype=1,
    adapter_dtype=2,
    sites=(
        p.Site(4, 6, (p.Part("h.0.q", 8, 1), p.Part("h.0.k", 2, 0))),
        p.Site(2, 15, (p.Part("o", 1, 0),), p.Ring(-24, (7, 1 << 40), b"\xab" * 32)),
    ),
    files=(p.SkeletonFile("a", 100, ((0, 8), (16, 4))),),
)
CATALOG_BYTES = bytes.fromhex(
    "01000000 6d 04000000 67707432"
    + bytes(range(32)).hex()
    + "00040000 01 02"
    + "02000000 04000000 06 02000000 05000000 682e302e71 08000000 01 05000000 682e302e6b 02000000 00 00"
    + "02000000 0f 01000000 01000000 6f 01000000 00 01 e8ffffff 0700000000000000 0000000000010000"
    + "ab" * 32
    + "01000000 01000000 61 6400000000000000 02000000"
    + "0000000000000000 0800000000000000 1000000000000000 0400000000000000"
)


def test_headers_have_the_bytes_that_the_protocol_draws():
    assert CALL.to_bytes() == CALL_BYTES
    assert p.CallHeader.from_bytes(CALL_BYTES) == CALL
    assert REPLY.to_bytes() == REPLY_BYTES
    assert p.ReplyHeader.from_bytes(REPLY_BYTES) == REPLY


def test_all_parts_of_a_site_are_one_byte_of_ones():
    whole = p.CallHeader(p.Op.FORWARD, p.Path.FAST, p.Class.DECODE, p.Dtype.F32, 0, None, 1, 1)
    assert whole.to_bytes()[12:16] == b"\xff\0\0\0"
    assert p.CallHeader.from_bytes(whole.to_bytes()).part is None


def test_a_draw_through_the_ring_path_says_so():
    drawn = p.CallHeader(
        p.Op.FORWARD_NO_BIAS, p.Path.RING, p.Class.DECODE, p.Dtype.F32, 0, None, 1, 1, source=p.Source.DRAW
    )
    assert drawn.to_bytes()[4:8] == b"\1\2\0\0" and drawn.to_bytes()[12:16] == b"\xff\1\0\0"
    assert p.CallHeader.from_bytes(drawn.to_bytes()) == drawn


@pytest.mark.parametrize(("message", "data"), TO_LAYERS, ids=lambda x: type(x).__name__)
def test_a_clients_messages_have_their_bytes(message, data):
    assert p.encode_to_layers(message) == bytes.fromhex(data)
    assert p.decode_to_layers(bytes.fromhex(data)) == message


@pytest.mark.parametrize(("message", "data"), FROM_LAYERS, ids=lambda x: type(x).__name__)
def test_an_executors_messages_have_their_bytes(message, data):
    assert p.encode_from_layers(message) == bytes.fromhex(data)
    assert p.decode_from_layers(bytes.fromhex(data)) == message


def test_a_catalog_has_its_bytes():
    assert p.encode_catalog(CATALOG) == CATALOG_BYTES
    assert p.decode_catalog(CATALOG_BYTES) == CATALOG


def test_a_key_is_not_shown():
    assert "secret" not in repr(p.Open(1, 0, "secret", "n", "off", 0))


def test_every_message_that_is_cut_or_longer_is_refused():
    whole = [p.encode_to_layers(m) for m, _ in TO_LAYERS]
    for data in whole:
        for end in range(len(data)):
            with pytest.raises(ProtocolError):
                p.decode_to_layers(data[:end])
        with pytest.raises(ProtocolError, match="follow the end"):
            p.decode_to_layers(data + b"\0")
    for end in range(len(CATALOG_BYTES)):
        with pytest.raises(ProtocolError):
            p.decode_catalog(CATALOG_BYTES[:end])


def test_a_hostile_count_costs_nothing():
    count_at = 4 + 1 + 4 + 4 + 32 + 4 + 1
    hostile = CATALOG_BYTES[:count_at] + b"\xff\xff\xff\xff" + CATALOG_BYTES[count_at + 4 :]
    with pytest.raises(ProtocolError, match="ends early"):
        p.decode_catalog(hostile)


@pytest.mark.parametrize(
    ("at", "byte", "why"),
    [(0, 0x49, "begins with"), (4, 9, "Op"), (5, 3, "Path"), (6, 5, "Class"), (7, 2, "Dtype"), (13, 2, "Source"), (14, 1, "reserved"), (50, 1, "reserved")],
)
def test_a_header_that_is_none_says_why(at, byte, why):
    data = bytearray(CALL_BYTES)
    data[at] = byte
    with pytest.raises(ProtocolError, match=why):
        p.CallHeader.from_bytes(bytes(data))


def test_rows_have_limits():
    for rows in (0, p.MAX_ROWS + 1):
        data = bytearray(CALL_BYTES)
        data[24:28] = rows.to_bytes(4, "little")
        with pytest.raises(ProtocolError, match="rows"):
            p.CallHeader.from_bytes(bytes(data))


def test_numbers_that_do_not_fit_are_refused_and_not_cut():
    with pytest.raises(ProtocolError):
        p.encode_to_layers(p.Fetch(1 << 32, 0, 1))
    with pytest.raises(ProtocolError):
        p.CallHeader(p.Op.FORWARD, p.Path.FAST, p.Class.DECODE, p.Dtype.F32, -1, None, 1, 1).to_bytes()


def test_unknown_tags_are_refused():
    with pytest.raises(ProtocolError, match="variant 9"):
        p.decode_from_layers(b"\x09")
    with pytest.raises(ProtocolError, match="RefusalCode"):
        p.decode_from_layers(bytes.fromhex("01 63 00000000 00000000"))


def test_f32_travels_unchanged():
    rows = np.array([[1.5, -2.0, np.inf], [0.0, -0.0, 1e-40]], np.float32)
    data = bytes(encode_rows(rows, p.Dtype.F32))
    assert data == rows.tobytes()
    assert decode_rows(data, p.Dtype.F32, 2, 3).tobytes() == rows.tobytes()


def test_bf16_rounds_to_the_nearest_even():
    # 1 + 2^-8 lies halfway between 0x3f80 and 0x3f81, 1 + 3 * 2^-8 between 0x3f81 and 0x3f82.
    rows = np.array([[1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1.0, np.nan, np.inf, 3.4e38]], np.float32)
    words = np.frombuffer(encode_rows(rows, p.Dtype.BF16), "<u2")
    assert [hex(w) for w in words[:5]] == ["0x3f80", "0x3f80", "0x3f82", "0x3f81", "0xbf80"]
    back = decode_rows(words.tobytes(), p.Dtype.BF16, 1, 8)
    assert np.isnan(back[0, 5]) and back[0, 6] == np.inf and back[0, 7] == np.inf


def test_rows_of_another_length_are_refused():
    with pytest.raises(ProtocolError, match="24 bytes"):
        decode_rows(b"\0" * 20, p.Dtype.F32, 2, 3)
