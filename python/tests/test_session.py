"""Sessions against a fake executor: answers, refusals, lost connections. Needs no torch."""

from __future__ import annotations

import gc
import logging
import socket
import ssl
import threading

import numpy as np
import pytest
from conftest import TlsDoor, some_sites
from fake_executor import FakeExecutor

import holobiont
from holobiont import Class, Dtype, Limits, Op, Path, Session
from holobiont.masking import Paper
from holobiont.protocol import RefusalCode, Refused, Status

HASTY = Limits(connect_s=2, answer_s=5, retry_s=2)


def rows(count, width=8, seed=1):
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


@pytest.fixture
def session(executor):
    with Session(executor.address, limits=Limits(connect_s=5, answer_s=20, retry_s=20)) as opened:
        yield opened


def weights(executor, site, part=None):
    layers = executor.sites[site] if part is None else [executor.sites[site][part]]
    return np.concatenate([layer.weight for layer in layers])


def test_a_session_knows_tenant_limits_and_catalog(executor, session):
    assert session.opened.tenant == "tester"
    assert session.catalog == executor.catalog
    assert "tester" in repr(session)
    assert executor.opens[0].masking == "off"


def test_forward_backward_and_parts_are_what_the_weights_say(executor, session):
    x, g = rows(3), rows(3, 14)
    w, o = weights(executor, 0), executor.sites[1][0]
    np.testing.assert_array_equal(session.call(0, x), x @ w.T)
    np.testing.assert_array_equal(session.call(0, x, part=1), x @ weights(executor, 0, 1).T)
    np.testing.assert_array_equal(session.call(0, g, op=Op.BACKWARD), g @ w)
    np.testing.assert_allclose(session.call(1, rows(2, 6)), rows(2, 6) @ o.weight.T + o.bias, rtol=1e-6)
    np.testing.assert_array_equal(session.call(1, rows(2, 6), op=Op.FORWARD_NO_BIAS), rows(2, 6) @ o.weight.T)


def test_a_call_says_what_it_is_for(executor, session):
    session.call(0, rows(1), path=Path.FAST, urgency=Class.DECODE, dtype=Dtype.BF16)
    last = executor.calls[-1]
    assert (last.path, last.urgency, last.dtype) == (Path.FAST, Class.DECODE, Dtype.BF16)


def test_sixteen_bits_cost_what_they_round(executor, session):
    x = rows(5)
    near = session.call(0, x, dtype=Dtype.BF16)
    exact = x @ weights(executor, 0).T
    assert 0 < np.abs(near - exact).max() < 0.1


def test_large_calls_are_cut(place):
    with FakeExecutor(place / "e", some_sites(), max_rows=7) as executor, Session(executor.address) as session:
        x = rows(20)
        np.testing.assert_allclose(session.call(0, x), x @ weights(executor, 0).T, rtol=1e-5)
        assert [call.rows for call in executor.calls] == [7, 7, 6]


def test_sequence_numbers_ascend(executor, session):
    for _ in range(3):
        session.call(0, rows(1))
    assert [call.sequence for call in executor.calls] == [1, 2, 3]


def test_busy_is_tried_again_under_a_new_number(executor, session):
    executor.faults.refuse.extend([(Status.BUSY, 10), (Status.QUOTA, 20), (Status.FAILED, 0)])
    np.testing.assert_array_equal(session.call(0, rows(2)), rows(2) @ weights(executor, 0).T)
    assert [call.sequence for call in executor.calls] == [1, 2, 3, 4]


def test_a_quota_that_stays_used_up_is_typed(place):
    with FakeExecutor(place / "e", some_sites()) as executor, Session(executor.address, limits=HASTY) as session:
        executor.faults.refuse.extend([(Status.QUOTA, 900)] * 5)
        with pytest.raises(holobiont.QuotaExceeded, match="tester"):
            session.call(0, rows(1))
        executor.faults.refuse.clear()
        assert session.call(0, rows(1)).shape == (1, 14)


@pytest.mark.parametrize("status", [Status.SHAPE, Status.NONLINEAR, Status.UNKNOWN_SITE])
def test_refusals_that_stay_are_not_repeated(executor, session, status):
    executor.faults.refuse.append((status, 0))
    with pytest.raises(holobiont.CallRefused, match="site 0"):
        session.call(0, rows(1))
    assert len(executor.calls) == 1


def test_a_call_that_fits_nothing_is_not_sent(executor, session):
    wrong = [(9, rows(1), None), (-1, rows(1), None), (0, rows(1), 5), (0, rows(1), -1), (0, rows(1, 3), None)]
    for site, x, part in [*wrong, (0, rows(1) * 1j, None)]:
        with pytest.raises(holobiont.CallRefused):
            session.call(site, x, part=part)
    assert not executor.calls


def test_an_answer_lost_with_the_connection_is_asked_for_again_with_its_number(executor, session):
    first = session.opened.session
    executor.faults.swallow = 2
    np.testing.assert_array_equal(session.call(0, rows(2)), rows(2) @ weights(executor, 0).T)
    assert [call.sequence for call in executor.calls] == [1, 1, 1]
    assert executor.opens[-1].session == first


def test_a_successor_gets_a_new_session(executor, session):
    session.call(0, rows(1))
    executor.restart()
    np.testing.assert_array_equal(session.call(0, rows(1)), rows(1) @ weights(executor, 0).T)
    assert [opened.session for opened in executor.opens][-1] == 0
    assert session.opened.instance == executor.instance


def test_a_successor_with_another_base_is_refused(executor, session):
    session.call(0, rows(1))
    executor.catalog = holobiont.protocol.Catalog(**{**executor.catalog.__dict__, "model": "other"})
    executor.restart()
    with pytest.raises(holobiont.BaseChanged, match="other"):
        session.call(0, rows(1))


def test_answers_that_come_twice_or_after_news_do_not_confuse(executor, session):
    executor.faults.echo_twice = executor.faults.draining = 3
    for seed in range(5):
        np.testing.assert_array_equal(session.call(0, rows(1, seed=seed)), rows(1, seed=seed) @ weights(executor, 0).T)
    assert session.stats().calls == 5


def test_nobody_there_is_said_at_once_with_what_to_do(place):
    for limits in (Limits(), Limits(retry_s=1e9)):
        with pytest.raises(holobiont.ConnectionLost, match="nobody.*holobiont up"):
            Session(f"ipc://{place}/nothing", limits=limits)
    with pytest.raises(holobiont.ConnectionLost, match="--layer-listen"):
        Session("tls://localhost:1")


def test_every_way_to_name_a_local_executor_leads_to_it(place):
    with FakeExecutor(place / "layers.zmq", some_sites()):
        for named in (f"ipc://{place}/layers.zmq", f"{place}", f"ipc://{place}", f"{place}/layers.sock", place):
            with Session(named, limits=HASTY) as session:
                assert str(session.endpoint) == f"ipc://{place}/layers.zmq"


def test_an_executor_in_the_home_directory_is_found(place, monkeypatch):
    monkeypatch.setenv("HOME", str(place))
    with FakeExecutor(place / "layers.zmq", some_sites()), Session("~", limits=HASTY) as session:
        assert session.call(0, rows(1)).shape == (1, 14)


def test_an_outage_shows_in_the_log(executor, caplog):
    with Session(executor.address, limits=Limits(5, 20, 20)) as session:
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        executor.restart()
        session.call(0, rows(1))
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any("connecting again" in line for line in said) and any("session" in line for line in said)


def test_an_executor_that_dies_for_good_ends_in_one_error(place):
    with FakeExecutor(place / "e", some_sites()) as executor, Session(executor.address, limits=HASTY) as session:
        executor.stop()
        with pytest.raises(holobiont.ConnectionLost):
            session.call(0, rows(1))


def test_a_refused_session_says_why(executor):
    executor.faults.refuse_open.append(Refused(RefusalCode.VERSION, "speak version 2", 0))
    with pytest.raises(holobiont.SessionRefused, match="speak version 2"):
        Session(executor.address, limits=HASTY)
    with pytest.raises(holobiont.MaskingRefused):
        Session(executor.address, masking="perfect", limits=HASTY)


def test_a_busy_executor_is_asked_again_for_a_session(executor):
    executor.faults.refuse_open.append(Refused(RefusalCode.BUSY, "full", 20))
    with Session(executor.address, limits=HASTY) as session:
        assert session.call(0, rows(1)).shape == (1, 14)


def test_threads_share_a_session(executor, session):
    wrong = []

    def ask(seed):
        for turn in range(20):
            x = rows(2, seed=100 * seed + turn)
            if not np.array_equal(session.call(0, x), x @ weights(executor, 0).T):
                wrong.append(seed)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and len(executor.calls) == 80


def test_a_closed_session_says_so(executor):
    session = Session(executor.address)
    session.close()
    session.close()
    with pytest.raises(holobiont.HolobiontError, match="closed"):
        session.call(0, rows(1))


# --- Masking ----------------------------------------------------------------------------------------------------------


def test_masked_answers_are_right_and_rows_are_not_shown(executor):
    with Session(executor.address, masking="paper") as session:
        masked = Paper(session, noises=4)
        x = rows(9)
        for op, given, wanted in [
            (Op.FORWARD, x, x @ weights(executor, 0).T),
            (Op.BACKWARD, rows(9, 14), rows(9, 14) @ weights(executor, 0)),
        ]:
            executor.rows.clear()
            answer = masked.evaluate(0, None, op, Class.TRAINING, given)
            np.testing.assert_allclose(answer, wanted, atol=1e-4)
            assert np.abs(executor.rows[-1] - given).min(axis=1).max() > 0.01
        with_bias = executor.sites[1][0]
        answer = masked.evaluate(1, 0, Op.FORWARD, Class.PREFILL, rows(3, 6))
        np.testing.assert_allclose(answer, rows(3, 6) @ with_bias.weight.T + with_bias.bias, atol=1e-4)
    assert executor.opens[-1].masking == "paper"


def test_effects_of_noise_are_computed_once_and_noises_take_turns(executor):
    with Session(executor.address, masking="paper") as session:
        masked = Paper(session, noises=3)
        x = np.ones((7, 8), np.float32)
        masked.evaluate(0, 0, Op.FORWARD, Class.TRAINING, x)
        masked.evaluate(0, 0, Op.FORWARD, Class.TRAINING, x)
    noise = [call for call in executor.calls if call.urgency is Class.NOISE]
    assert len(noise) == 1 and noise[0].op is Op.FORWARD_NO_BIAS and noise[0].rows == 3
    sent = np.concatenate(executor.rows[1:])
    assert len(np.unique(sent.round(4), axis=0)) == 3
    np.testing.assert_array_equal(sent[0], sent[3])
    np.testing.assert_array_equal(sent[7], sent[1])


def test_the_paper_s_noise_has_been_seen_by_the_executor(executor):
    """Why the mode is called obfuscation: what was sent as noise unmasks what is sent later."""
    with Session(executor.address, masking="paper") as session:
        x = rows(4)
        Paper(session, noises=2).evaluate(0, None, Op.FORWARD, Class.TRAINING, x)
    noise, masked = executor.rows
    np.testing.assert_allclose(masked - noise[np.arange(4) % 2], x, atol=1e-5)


def test_tiny_gradients_get_tiny_noise(executor):
    with Session(executor.address, masking="paper") as session:
        masked = Paper(session)
        masked.evaluate(0, None, Op.BACKWARD, Class.TRAINING, rows(4, 14))
        g = rows(4, 14) * np.float32(1e-7)
        answer = masked.evaluate(0, None, Op.BACKWARD, Class.TRAINING, g)
    np.testing.assert_allclose(answer, g @ weights(executor, 0), atol=1e-11)


def test_masking_needs_the_linear_path(place):
    with FakeExecutor(place / "e", some_sites(), paths=1) as executor, Session(executor.address) as session:
        with pytest.raises(holobiont.MaskingRefused, match="linear path"):
            Paper(session)


# --- Skeleton ---------------------------------------------------------------------------------------------------------


def test_a_skeleton_has_holes_where_nothing_is_given_out(place):
    data = bytes(range(256)) * 1000
    files = [("config.json", b"{}", ((0, 2),)), ("weights", data, ((0, 100), (120_000, 100_000)))]
    with FakeExecutor(place / "e", some_sites(), files=files) as executor, Session(executor.address) as session:
        config, sparse = holobiont.skeleton(session, place / "skeleton")
        assert config.read_bytes() == b"{}"
        wanted = data[:100] + bytes(119_900) + data[120_000:220_000] + bytes(len(data) - 220_000)
        assert sparse.read_bytes() == wanted
        assert sorted(p.name for p in (place / "skeleton").iterdir()) == ["config.json", "weights"]


def test_a_skeleton_stays_in_its_folder(place):
    files = [("../outside", b"x", ((0, 1),))]
    with FakeExecutor(place / "e", some_sites(), files=files) as executor, Session(executor.address) as session:
        with pytest.raises(holobiont.ProtocolError, match="plain file name"):
            holobiont.skeleton(session, place / "skeleton")
    assert not (place / "outside").exists()


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def guarded(place, certificates):
    """A fake executor that wants a key, behind TLS."""
    with FakeExecutor(place / "layers.zmq", some_sites(), key="sesame") as executor:
        door = TlsDoor(certificates, place / "layers.zmq")
        yield executor, door
        door.close()


def tls_session(door, certificates, **options):
    options = {"api_key": "sesame", "ca": certificates / "server.pem", "limits": HASTY, **options}
    return Session(f"tls://localhost:{door.port}", **options)


def test_calls_travel_through_tls_with_a_key(guarded, certificates):
    executor, door = guarded
    with tls_session(door, certificates) as session:
        x = rows(200)
        for _ in range(3):
            np.testing.assert_allclose(session.call(0, x), x @ weights(executor, 0).T, rtol=1e-5)
    assert executor.opens[0].key == ""


def test_large_messages_travel_through_tls(place, certificates):
    wide = np.random.default_rng(0).standard_normal((3000, 2000)).astype(np.float32)
    from fake_executor import Weights

    with FakeExecutor(place / "e", [[Weights("wide", wide)]], max_rows=2000, key="sesame") as executor:
        door = TlsDoor(certificates, place / "e")
        with tls_session(door, certificates, limits=Limits()) as session:
            x = rows(1000, 2000)
            np.testing.assert_allclose(session.call(0, x), x @ wide.T, atol=1e-2)
            assert executor.calls[0].rows == 1000
        door.close()


def test_a_wrong_key_is_typed_and_not_retried(guarded, certificates):
    _, door = guarded
    with pytest.raises(holobiont.AuthenticationFailed, match="API key"):
        tls_session(door, certificates, api_key="wrong", limits=Limits())
    assert len(door.connections) == 1


def test_the_executors_own_words_about_a_key_are_passed_on(certificates):
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"PLAIN".ljust(20, b"\0") + b"\x01" + bytes(31)
    reason = b"no valid key; ask for one"
    error = b"\x05ERROR" + bytes([len(reason)]) + reason
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")

    def serve(listener):
        plain, _ = listener.accept()
        with context.wrap_socket(plain, server_side=True) as peer:
            peer.sendall(greeting)
            heard = b""
            while b"\x05HELLO" not in heard:
                heard += peer.recv(4096)
            assert b"\x03key\x06sesame" in heard
            peer.sendall(b"\x04" + bytes([len(error)]) + error)
            peer.recv(4096)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        address = f"tls://localhost:{listener.getsockname()[1]}"
        with pytest.raises(holobiont.AuthenticationFailed, match="no valid key; ask for one"):
            Session(address, api_key="sesame", ca=certificates / "server.pem", limits=Limits())


def test_another_certificate_is_not_trusted(guarded, certificates):
    executor, door = guarded
    with pytest.raises(holobiont.UntrustedExecutor, match="ca="):
        tls_session(door, certificates, ca=certificates / "stranger.pem", limits=Limits())
    assert not executor.opens


def test_another_host_name_is_not_trusted(guarded, certificates):
    _, door = guarded
    with pytest.raises(holobiont.UntrustedExecutor):
        Session(f"tls://127.0.0.1:{door.port}", ca=certificates / "server.pem", limits=Limits())


def test_a_cut_line_is_mended(guarded, certificates):
    executor, door = guarded
    with tls_session(door, certificates, limits=Limits()) as session:
        for _ in range(3):
            np.testing.assert_array_equal(session.call(0, rows(1)), rows(1) @ weights(executor, 0).T)
            door.cut()
    assert len(executor.opens) == 3


def test_a_client_certificate_is_shown(place, certificates):
    with FakeExecutor(place / "e", some_sites()) as executor:
        door = TlsDoor(certificates, place / "e", client_ca=certificates / "stranger.pem")
        mine = {"certificate": certificates / "stranger.pem", "certificate_key": certificates / "stranger.key"}
        with tls_session(door, certificates, api_key=None, **mine) as session:
            assert session.call(0, rows(1)).shape == (1, 14)
        with pytest.raises(holobiont.ConnectionLost):
            tls_session(door, certificates, api_key=None, limits=Limits(retry_s=0.3))
        assert len(executor.opens) == 1
        door.close()


def test_a_ca_file_that_is_missing_is_named(guarded, certificates):
    _, door = guarded
    with pytest.raises(holobiont.EndpointError, match="nowhere.pem|No such file"):
        tls_session(door, certificates, ca=certificates / "nowhere.pem")


def test_sessions_that_nobody_closes_leave_the_others_alone(executor):
    def forgotten():
        Session(executor.address).call(0, rows(1))

    for _ in range(20):
        forgotten()
    gc.collect()
    executor.restart()
    with Session(executor.address, limits=HASTY) as session:
        assert session.call(0, rows(1)).shape == (1, 14)
