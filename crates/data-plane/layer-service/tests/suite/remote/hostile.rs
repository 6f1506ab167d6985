//! Clients that lie, stall or flood have no effect on others.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, TcpStream},
    thread,
    time::{Duration, Instant},
};

use layer_service::{remote::RemoteSettings, settings::Quotas};
use shmproto::layer::{CallStatus, HEADER_BYTES};

use super::support::{ALICE, BOB, RemoteServerFixture, RemoteServerSetup, WATCHDOG, WIDTH, ZmtpPeer, header};

/// Whether the peer closes before the timeout.
fn is_hung_up_on(tcp: &mut TcpStream) -> bool {
    let mut sink = [0; 4096];
    loop {
        match tcp.read(&mut sink) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return !super::support::is_late(&error),
        }
    }
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn await_files(count: usize) {
    let until = Instant::now() + WATCHDOG;
    while open_files() > count {
        assert!(Instant::now() < until, "{} files are open, not {count}", open_files());
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn lengths_and_bytes_that_mean_nothing_end_their_own_connection_alone() {
    let house = RemoteServerFixture::open(RemoteServerSetup::default());
    let mut bob = house.client(BOB);
    let files = open_files();
    let long = |flags: u8, bytes: u64| [&[flags][..], &bytes.to_be_bytes()].concat();
    let mut text = b"\x00\x40".to_vec();
    text.extend([7; HEADER_BYTES]);
    for bytes in [
        long(2, 1 << 62),
        long(2, u64::MAX),
        long(6, 1 << 40),
        long(3, (1 << 20) + 1),
        vec![0xff; 100],
        b"\x08\x00".to_vec(),
        b"\x00\x00".to_vec(),
        b"\x01\x00\x01\x00\x00\x00".to_vec(),
        b"\x01\x04HLM1\x00\x03abc".to_vec(),
        b"\x04\x05\x04PING".to_vec(),
        text,
    ] {
        let mut liar = house.client(ALICE);
        liar.stream.write_all(&bytes).unwrap();
        assert!(liar.is_hung_up_on(), "{bytes:?}");
        bob.call(5, 1.0).unwrap();
    }
    house.await_sessions(1);
    await_files(files);
}

#[test]
fn rows_that_do_not_fit_their_header_are_refused_by_name() {
    let house = RemoteServerFixture::open(RemoteServerSetup::default());
    let mut client = house.client(ALICE);
    let unknown = |header| shmproto::layer::CallHeader { site: 9, ..header };
    let header = client.next_header(2);
    for (header, rows, status) in [
        (header, WIDTH, CallStatus::Shape),
        (header, 0, CallStatus::Shape),
        (unknown(header), WIDTH, CallStatus::UnknownSite),
    ] {
        client.send(&header, &vec![1.0; rows]).unwrap();
        assert_eq!(client.reply().unwrap().0.status, status);
    }
    client.call(1, 1.0).unwrap();
}

#[test]
fn a_number_that_was_answered_is_not_computed_again() {
    let house = RemoteServerFixture::open(RemoteServerSetup::default());
    let mut client = house.client(ALICE);
    client.call(1, 1.0).unwrap();
    client.call(1, 1.0).unwrap();
    for old in [1, 2] {
        client.send(&header(old, 1), &[1.0; WIDTH]).unwrap();
        let (reply, rows) = client.reply().unwrap();
        assert_eq!((reply.status, reply.sequence, rows.len()), (CallStatus::Sequence, old, 0));
    }
    client.call(1, 1.0).unwrap();
}

#[test]
fn a_handshake_in_drops_is_ended_at_its_deadline() {
    let handshake = Duration::from_millis(500);
    let settings = RemoteSettings { handshake, ..RemoteSettings::default() };
    let house = RemoteServerFixture::open(RemoteServerSetup { settings, ..RemoteServerSetup::default() });
    let mut bob = house.client(BOB);
    // A trickle below TLS, a trickle within, silence, and a handshake without a session.
    let mut below = house.tcp();
    let mut within = house.tls(None);
    within.flush().unwrap();
    let mut silent = house.tcp();
    let mut idle = ZmtpPeer::with_key(house.tls(None), ALICE);
    idle.shake_hands().unwrap();
    let begin = Instant::now();
    let mut is_open = [true, true];
    while is_open != [false, false] {
        assert!(begin.elapsed() < WATCHDOG);
        is_open = [below.write_all(&[0x16]).is_ok(), within.write_all(&[0xff]).is_ok()];
        bob.call(1, 1.0).unwrap();
        thread::sleep(Duration::from_millis(20));
    }
    assert!(begin.elapsed() >= handshake / 2);
    assert!(is_hung_up_on(&mut silent) && idle.is_hung_up_on());
    house.await_sessions(1);
}

#[test]
fn hundreds_that_say_nothing_keep_nobody_out() {
    let settings = RemoteSettings { handshake: WATCHDOG, handshakes: 100, ..RemoteSettings::default() };
    let house = RemoteServerFixture::open(RemoteServerSetup { settings, ..RemoteServerSetup::default() });
    let mut bob = house.client(BOB);
    let files = open_files();
    let mut idle: Vec<_> = (0..300).map(|_| house.tcp()).collect();
    bob.call(3, 1.0).unwrap();
    let mut alice = house.client(ALICE);
    alice.call(3, 1.0).unwrap();
    // The oldest connections were closed to admit the new one.
    assert!(idle.iter_mut().take(100).all(is_hung_up_on));
    drop((idle, alice));
    house.await_sessions(1);
    await_files(files);
    bob.call(3, 1.0).unwrap();
}

#[test]
fn other_protocols_are_hung_up_on() {
    let house = RemoteServerFixture::open(RemoteServerSetup::default());
    let mut bob = house.client(BOB);
    let files = open_files();
    let noise: Vec<u8> = (0..5000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    for bytes in
        [&b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..], &noise, &[0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 1]]
    {
        let mut raw = house.tcp();
        // The server may disconnect before it has read everything.
        let _ = raw.write_all(bytes);
        assert!(is_hung_up_on(&mut raw));
        let mut tls = ZmtpPeer::null(house.tls(None));
        let _ = tls.stream.write_all(bytes);
        let _ = tls.stream.write_all(bytes);
        assert!(tls.is_hung_up_on() || bytes[0] == 0xff);
    }
    bob.call(1, 1.0).unwrap();
    house.await_sessions(1);
    await_files(files);
}

#[test]
fn who_takes_no_answers_is_let_go_and_nobody_waits_for_it() {
    let settings = RemoteSettings { stuck: Duration::from_millis(300), ..RemoteSettings::default() };
    let quotas = Quotas { tenant_rows: 1 << 20, ..Quotas::default() };
    let house =
        RemoteServerFixture::open(RemoteServerSetup { settings, quotas, ..RemoteServerSetup::default() });
    let mut bob = house.client(BOB);
    let mut slow = house.client(ALICE);
    let writer = thread::spawn(move || {
        let rows = vec![1.0; 20_000 * WIDTH];
        // Sends until the executor disconnects.
        for sequence in 1.. {
            if slow.send(&header(sequence, 20_000), &rows).is_err() {
                return;
            }
        }
    });
    while house.registry.stats().open == 2 {
        bob.call(4, 1.0).unwrap();
    }
    writer.join().unwrap();
    bob.call(4, 1.0).unwrap();
    // All its memory is released.
    house.client(ALICE).call(20_000, 1.0).unwrap();
}

#[test]
fn a_flood_of_calls_is_refused_by_name_and_the_flooder_served_afterwards() {
    let house = RemoteServerFixture::open(RemoteServerSetup::default());
    let mut bob = house.client(BOB);
    let mut flooder = house.client(ALICE);
    let rows = vec![1.0; 4096 * WIDTH];
    let mut statuses = Vec::new();
    for _ in 0..5 {
        let headers: Vec<_> = (0..30).map(|_| flooder.next_header(4096)).collect();
        headers.iter().for_each(|header| flooder.send(header, &rows).unwrap());
        bob.call(1, 1.0).unwrap();
        statuses.extend(headers.iter().map(|_| flooder.reply().unwrap().0.status));
    }
    assert!(statuses.contains(&CallStatus::Quota) && statuses.contains(&CallStatus::Done), "{statuses:?}");
    assert!(
        statuses
            .iter()
            .all(|status| matches!(status, CallStatus::Quota | CallStatus::Busy | CallStatus::Done))
    );
    flooder.call(1, 1.0).unwrap();
    bob.call(1, 1.0).unwrap();
}

#[test]
fn a_tenants_bytes_are_its_own() {
    let quotas = Quotas { tenant_bytes: 300_000, ..Quotas::default() };
    let house = RemoteServerFixture::open(RemoteServerSetup { quotas, ..RemoteServerSetup::default() });
    let (mut alice, mut bob) = (house.client(ALICE), house.client(BOB));
    let header = alice.next_header(10_000);
    alice.send(&header, &vec![1.0; 10_000 * WIDTH]).unwrap();
    assert_eq!(alice.reply().unwrap().0.status, CallStatus::Quota);
    bob.call(2000, 1.0).unwrap();
    alice.call(2000, 1.0).unwrap();
}

#[test]
fn half_closed_and_vanished_clients_leave_nothing_behind() {
    let house = RemoteServerFixture::open(RemoteServerSetup::default());
    let mut bob = house.client(BOB);
    let files = open_files();
    for _ in 0..5 {
        let mut half = house.client(ALICE);
        let header = half.next_header(4096);
        half.send(&header, &vec![1.0; 4096 * WIDTH]).unwrap();
        half.stream.sock.shutdown(Shutdown::Write).unwrap();
        let vanished = house.client(ALICE);
        drop(vanished);
        house.await_sessions(1);
        bob.call(2, 1.0).unwrap();
    }
    await_files(files);
}

#[test]
fn sessions_beyond_the_tenants_number_are_refused_and_others_not() {
    let quotas = Quotas { tenant_sessions: 2, ..Quotas::default() };
    let house = RemoteServerFixture::open(RemoteServerSetup { quotas, ..RemoteServerSetup::default() });
    let alices = [house.client(ALICE), house.client(ALICE)];
    let mut third = ZmtpPeer::with_key(house.tls(None), ALICE);
    assert!(third.open(0).unwrap_err().to_string().contains("Quota"));
    house.client(BOB).call(1, 1.0).unwrap();
    drop(alices);
    house.await_sessions(0);
    house.client(ALICE).call(1, 1.0).unwrap();
}
