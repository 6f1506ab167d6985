"""Pads out of a pool: each of them once, whatever happens. Against a fake executor; needs no torch."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import some_sites
from fake_executor import FakeExecutor
from pools import GENERATION, make_pool, slot
from test_ring import PATIENT, asks, bare, rows

import holobiont
from holobiont import Class, Dtype, Op, Path, Pool, Session, pool
from holobiont.masking import evaluator
from holobiont.protocol import Status


@pytest.fixture
def exact(place):
    """An executor with the ring path."""
    with FakeExecutor(place / "a", some_sites(), is_exact=True, max_rows=4) as running:
        yield running


@pytest.fixture
def pads(place, exact):
    """Forty pads for each of its sites, in a directory."""
    return make_pool(place / "pads", exact, 40)


def padded(executor, pool):
    return evaluator(Session(executor.address, masking="pads", limits=PATIENT), Path.RING, None, pool)


def refused(why, call, *given):
    with pytest.raises(holobiont.MaskingRefused, match=why):
        call(*given)


def test_answers_have_the_bits_of_the_ring_path_for_sites_and_for_parts_of_them(exact, pads):
    plain, masked = bare(exact), padded(exact, Pool(pads))
    for site, part, op, x in asks():
        wanted = plain.evaluate(site, part, op, Class.TRAINING, x)
        np.testing.assert_array_equal(masked.evaluate(site, part, op, Class.TRAINING, x), wanted)


def test_more_rows_than_a_call_takes_go_in_several_and_equal_rows_look_different(exact, pads):
    held = Pool(pads)
    masked, x = padded(exact, held), np.ones((10, 8), np.float32)
    wanted = bare(exact).evaluate(0, None, Op.FORWARD, Class.PREFILL, x)
    exact.calls.clear(), exact.rows.clear()
    np.testing.assert_array_equal(masked.evaluate(0, None, Op.FORWARD, Class.PREFILL, x), wanted)
    assert [call.rows for call in exact.calls] == [4, 4, 2]
    sent = np.concatenate(exact.rows)
    assert len(np.unique(sent)) == sent.size, "nothing comes twice"
    assert (held.left(0, False), held.left(0, True)) == (30, 40)


def test_every_attempt_takes_pads_of_its_own(exact, pads):
    held = Pool(pads)
    masked, x = padded(exact, held), rows(2, 8)
    wanted = bare(exact).evaluate(0, None, Op.FORWARD, Class.DECODE, x)
    exact.payloads.clear()

    def lose():
        exact.faults.swallow = 2

    def refuse():
        exact.faults.refuse.extend([(Status.BUSY, 1), (Status.SEQUENCE, 1)])

    for harm in (lose, refuse):
        harm()
        np.testing.assert_array_equal(masked.evaluate(0, None, Op.FORWARD, Class.DECODE, x), wanted)
    sent = np.concatenate([np.frombuffer(payload, "V6") for payload in exact.payloads])
    assert len(np.unique(sent)) == sent.size >= 4 * 2 * 8, "two answers, and two at least that were lost"
    assert held.left(0, False) == 40 - 6 * 2, "two were lost, two refused, two answered"


def test_a_pool_that_is_let_go_loses_no_pad_and_gives_none_twice(exact, pads):
    taken = set()
    for number in range(13):
        with Pool(pads) as held:
            assert (held.left(0, False), held.left(1, False)) == (40 - 3 * number, 40)
            taken |= {pad.draw.key for pad in held.take(0, False, 3)}
    assert len(taken) == 39
    held = Pool(pads)
    refused("2 pads are wanted for site 0, forward, and 1 are left .* prepare", held.take, 0, False, 2)


def test_a_process_that_ends_in_order_gives_back_what_it_did_not_take(exact, pads):
    code = f"import os; from holobiont import Pool; held = Pool({str(pads)!r}); held.take(0, False, 1); os.fork()"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert left(pads) == 39


def test_a_pad_that_was_used_is_zeros_on_the_disk(exact, pads):
    held = Pool(pads)
    before = (pads / "00000.forward").read_bytes()
    for pad in held.take(0, False, 2):
        assert pad.draw.key in before and pad.draw.key not in (pads / "00000.forward").read_bytes()
        assert "key" not in repr(pad)


def test_the_journal_is_on_the_disk_before_a_pad_is_read(exact, pads, monkeypatch):
    said = []
    monkeypatch.setattr(os, "fdatasync", lambda file: said.append("on the disk"))
    read = os.pread
    monkeypatch.setattr(os, "pread", lambda *given: said.append("read") or read(*given))
    held = Pool(pads)
    said.clear()
    held.take(1, True, 1)
    assert said == ["on the disk", "read", "read"], "its key, and what the site makes of it"


def test_a_process_that_dies_amid_a_pad_leaves_none_to_use_twice(exact, pads):
    """Killed after the pad was read and before it was erased: the worst there is."""
    code = f"""
import os
from holobiont import Pool
os.pwrite = lambda file, data, at: real(file, data, at) if any(data) else os._exit(9)
"""
    code = code.replace("os.pwrite =", "real = os.pwrite\nos.pwrite =") + f"Pool({str(pads)!r}).take(0, False, 1)\n"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert Pool(pads).left(0, False) == 0, "burnt together with the one that it read"


def left(folder):
    with Pool(folder) as held:
        return held.left(0, False)


def test_a_torn_journal_gives_up_what_it_may_have_burnt(exact, place):
    folder = make_pool(place / "many", exact, 300)
    with open(folder / "journal", "r+b") as journal:
        journal.write(b"torn")
        journal.seek(4096)
        journal.write(slot(GENERATION - 1, [(1, 300)] * 6))
    assert left(folder) == 300 - 1 - 256
    assert left(folder) == 300 - 1 - 256, "and no more the next time"
    with open(folder / "journal", "r+b") as journal:
        journal.write(bytes(8192))
    refused("neither of its two halves", Pool, folder)


def test_a_pad_that_is_not_whole_is_not_used(exact, pads):
    with open(pads / "00001.forward", "r+b") as file:
        file.seek(40)
        byte = file.read(1)
        file.seek(40)
        file.write(bytes([byte[0] ^ 1]))
    with Pool(pads) as held:
        refused("00001.forward: a pad does not fit its hash", held.take, 1, False, 1)
        assert held.left(1, False) == 39, "nor ever again"


def test_a_child_process_takes_nothing_of_its_parents(exact, pads):
    held = Pool(pads)

    def in_the_child():
        refused("forked from", held.take, 0, False, 1)
        refused("in use", Pool, pads)

    child = multiprocessing.get_context("fork").Process(target=in_the_child)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert len(held.take(0, False, 1)) == 1


def test_a_pool_is_closed_behind_a_take_that_runs(pads, monkeypatch):
    held, taken = Pool(pads), []
    entered, may_read, parts = threading.Event(), threading.Event(), held._parts

    def slow(*given, **named):
        entered.set()
        assert may_read.wait(60)
        return parts(*given, **named)

    monkeypatch.setattr(held, "_parts", slow)
    taker = threading.Thread(target=lambda: taken.extend(held.take(0, False, 1)))
    closer = threading.Thread(target=held.close)
    taker.start()
    assert entered.wait(60)
    closer.start()
    closer.join(0.2)
    assert closer.is_alive(), "files are open as long as somebody reads and erases in them"
    may_read.set()
    taker.join(60), closer.join(60)
    assert len(taken) == 1
    refused("are closed", held.take, 0, False, 1)


def test_a_pool_of_another_machine_is_refused_as_a_copy(pads, place, monkeypatch):
    # The same numbers stand in client/src/masking/one_time_pads/journal.rs.
    assert pool.identity_of(7, b"0123456789abcdef0123456789abcdef") == 6534307493119828681
    (place / "machine-id").write_text("fedcba9876543210fedcba9876543210\n")
    monkeypatch.setattr(pool, "_MACHINE", place / "machine-id")
    refused("is a copy", Pool, pads)


def test_a_pool_that_cannot_be_used_is_refused_by_name(exact, pads, place, monkeypatch):
    refused("no pads in .* prepare", Pool, place / "none")
    with Pool(pads) as held:
        refused("in use", Pool, pads)
        refused("leave path out", evaluator, Session(exact.address, masking="pads"), Path.LINEAR, None, held)
        refused("bf16 would round", evaluator, Session(exact.address, masking="pads"), Path.RING, Dtype.BF16, held)
        refused("pads are nothing for masking='off'", evaluator, Session(exact.address), Path.RING, None, held)
    refused("are closed", held.take, 0, False, 1)
    shutil.copytree(pads, place / "copy")
    refused("is a copy", Pool, place / "copy")
    other = make_pool(place / "other", exact, 1, commitment=bytes(32))
    with Pool(other) as held:
        refused("of other weights", padded, exact, held)
    os.truncate(other / "00000.backward", 3)
    refused("shorter than the journal says", Pool, other)
    (other / "manifest").write_bytes(b"HOLOPAD1")
    refused("manifest: it does not fit its hash", Pool, other)
    monkeypatch.setattr(pool, "blake3", None)
    refused(r"holobiont\[privacy\]", Pool, pads)
    assert not exact.calls
