"""A session that a process was forked with: the child opens one of its own, and the parent keeps its own."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
from conftest import TlsDoor, some_sites
from fake_executor import FakeExecutor

import holobiont
from holobiont import Class, Limits, Op, Path
from holobiont.masking import Paper, evaluator

# For hangs.
WATCHDOG_S = 300


def in_a_fork(work):
    """Whether `work`, run in a forked process, gives true; a child that hangs is ended."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    deadline = time.monotonic() + WATCHDOG_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")


def right(session, executor):
    x = np.random.default_rng(3).standard_normal((3, 8)).astype(np.float32)
    weight = np.concatenate([layer.weight for layer in executor.sites[0]])
    return np.array_equal(session.call(0, x), x @ weight.T)


def test_a_forked_process_has_a_session_of_its_own(executor):
    with holobiont.Session(executor.address, limits=Limits(5, 20, 20)) as session:
        assert right(session, executor)
        assert in_a_fork(lambda: right(session, executor))
        assert right(session, executor)
        assert [opened.session for opened in executor.opens] == [0, 0], "the child did not take the parent's session"


def test_a_fork_while_another_thread_calls_does_not_wait_for_it(executor):
    with holobiont.Session(executor.address, limits=Limits(5, 20, 20)) as session:
        session._lock.acquire()
        thread = threading.Thread(target=lambda: right(session, executor))
        thread.start()
        outcome = []
        forker = threading.Thread(target=lambda: outcome.append(in_a_fork(lambda: right(session, executor))))
        forker.start()
        forker.join(2 * WATCHDOG_S)
        session._lock.release()
        thread.join(WATCHDOG_S)
        assert outcome == [True]


def test_a_forked_process_may_end_without_closing_what_it_was_given(executor):
    with holobiont.Session(executor.address, limits=Limits(5, 20, 20)) as session:
        assert in_a_fork(lambda: session.close() is None)
        assert right(session, executor)


def test_a_session_behind_tls_survives_a_fork_on_both_sides(place, certificates):
    with FakeExecutor(place / "e", some_sites(), key="sesame") as executor:
        door = TlsDoor(certificates, place / "e")
        options = {"api_key": "sesame", "ca": certificates / "server.pem", "limits": Limits(5, 20, 20)}
        with holobiont.Session(f"tls://localhost:{door.port}", **options) as session:
            assert right(session, executor)
            assert in_a_fork(lambda: right(session, executor))
            assert right(session, executor)
        door.close()


def test_noise_of_a_forked_process_is_not_its_parents(executor):
    with holobiont.Session(executor.address, masking="paper", limits=Limits(5, 20, 20)) as session:
        masked = Paper(session, noises=2)
        x = np.ones((2, 8), np.float32)

        def ask():
            return bool(masked.evaluate(0, None, Op.FORWARD, Class.TRAINING, x).shape == (2, 14))

        assert ask() and in_a_fork(ask)
    noises = [rows for call, rows in zip(executor.calls, executor.rows, strict=True) if call.urgency is Class.NOISE]
    assert len(noises) == 2 and not np.array_equal(*noises)


def test_pads_of_a_forked_process_are_not_its_parents(place):
    with FakeExecutor(place / "a", some_sites(), is_exact=True) as first:
        with FakeExecutor(place / "b", some_sites(), is_exact=True) as second:
            sessions = [holobiont.Session(of.address, masking="shares", limits=Limits(5, 20, 20)) for of in (first, second)]
            masked, x = evaluator(sessions[0], Path.RING, None, sessions[1]), np.ones((2, 8), np.float32)

            def ask():
                return bool(masked.evaluate(0, None, Op.FORWARD, Class.TRAINING, x).shape == (2, 14))

            assert ask() and in_a_fork(ask)
            keys = {payload[:32] for payload in second.payloads}
            assert len(second.payloads) == 2 == len(keys)
