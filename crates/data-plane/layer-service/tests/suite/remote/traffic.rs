//! Service of a well-behaved client.

use std::time::Duration;

use layer_service::{remote::RemoteSettings, settings::Quotas};
use shmproto::{
    codec::Wire as _,
    layer::{
        CallStatus,
        control::{CATALOG, Catalog, Fetch, FromLayers, RefusalCode, ToLayers},
    },
    zmtp::ZmtpEvent,
};

use super::support::{ALICE, BOB, FACTOR, RemoteServerFixture, RemoteServerSetup, WIDTH, ZmtpPeer};

#[test]
fn a_call_is_answered_over_tls_and_over_the_private_socket() {
    let house = RemoteServerFixture::open(RemoteServerSetup { keys: None, ..RemoteServerSetup::default() });
    let mut remote = ZmtpPeer::null(house.tls(None));
    assert_eq!(remote.open(0).unwrap().tenant, "public");
    let mut neighbour = house.neighbour();
    assert_eq!(neighbour.open(0).unwrap().tenant, "public");
    for rows in [1, 7, 3000] {
        remote.call(rows, 2.0).unwrap();
        neighbour.call(rows, 0.5).unwrap();
    }
    house.await_sessions(2);
    remote.send_message(&ToLayers::Close).unwrap();
    assert!(remote.is_hung_up_on());
    house.await_sessions(1);
    neighbour.call(1, 1.0).unwrap();
}

#[test]
fn calls_may_be_sent_ahead_and_are_answered_by_their_numbers() {
    let house = RemoteServerFixture::open(RemoteServerSetup::default());
    let mut client = house.client(ALICE);
    let headers: Vec<_> = (1..=40).map(|rows| client.next_header(rows)).collect();
    for header in &headers {
        client.send(header, &vec![header.rows as f32; header.rows as usize * WIDTH]).unwrap();
    }
    let mut answered = Vec::new();
    for _ in &headers {
        let (reply, rows) = client.reply().unwrap();
        assert_eq!(reply.status, CallStatus::Done);
        assert_eq!(rows, vec![reply.rows as f32 * FACTOR; reply.rows as usize * WIDTH]);
        answered.push(reply.sequence);
    }
    answered.sort_unstable();
    assert!(answered.iter().eq(headers.iter().map(|header| &header.sequence)));
}

#[test]
fn a_client_that_writes_everything_before_it_reads_anything_is_answered() {
    let quotas = Quotas { tenant_rows: 1 << 20, ..Quotas::default() };
    let house = RemoteServerFixture::open(RemoteServerSetup { quotas, ..RemoteServerSetup::default() });
    let mut client = house.client(ALICE);
    // More in both directions than sockets and TLS buffer.
    let headers: Vec<_> = (0..40).map(|_| client.next_header(10_000)).collect();
    let rows = vec![1.0; 10_000 * WIDTH];
    headers.iter().for_each(|header| client.send(header, &rows).unwrap());
    for _ in headers {
        assert_eq!(client.reply().unwrap().0.status, CallStatus::Done);
    }
}

#[test]
fn the_catalog_and_the_files_ranges_are_fetched_in_parts() {
    let house = RemoteServerFixture::open(RemoteServerSetup::default());
    let mut client = ZmtpPeer::with_key(house.tls(None), ALICE);
    let bytes = client.open(0).unwrap().catalog_bytes;
    let mut fetch = |blob, offset, bytes| {
        client.send_message(&ToLayers::Fetch(Fetch { blob, offset, bytes })).unwrap();
        client.hear().unwrap()
    };
    let mut catalog = Vec::new();
    while catalog.len() < bytes as usize {
        let FromLayers::Fetched(part) = fetch(CATALOG, catalog.len() as u64, 50) else { panic!("no part") };
        catalog.extend(part.bytes);
    }
    assert_eq!(Catalog::from_bytes(&catalog).unwrap().sites.len(), 1);
    assert!(matches!(fetch(1, 250, 500), FromLayers::Fetched(part) if part.bytes == [7; 50]));
    let refused = |answer| matches!(answer, FromLayers::Refused(no) if no.code == RefusalCode::NoSuchBlob);
    assert!(refused(fetch(1, 300, 1)) && refused(fetch(2, 0, 1)));
    client.call(1, 1.0).unwrap();
}

#[test]
fn a_session_says_what_it_used_and_refuses_what_makes_no_sense_in_it() {
    let house = RemoteServerFixture::open(RemoteServerSetup::default());
    let mut client = house.client(ALICE);
    client.call(3, 1.0).unwrap();
    client.send_message(&ToLayers::GetStats).unwrap();
    let FromLayers::Stats(stats) = client.hear().unwrap() else { panic!("no stats") };
    assert_eq!((stats.calls, stats.rows[0]), (1, 3));
    client.send_message(&ToLayers::Channel(4096)).unwrap();
    let refused = client.hear().unwrap();
    assert!(matches!(refused, FromLayers::Refused(no) if no.code == RefusalCode::Malformed));
    client.call(1, 1.0).unwrap();
}

#[test]
fn a_lost_connections_session_is_taken_over_by_its_tenant_alone() {
    let house = RemoteServerFixture::open(RemoteServerSetup::default());
    let mut first = ZmtpPeer::with_key(house.tls(None), ALICE);
    let session = first.open(0).unwrap().session;
    let mut thief = ZmtpPeer::with_key(house.tls(None), BOB);
    assert!(thief.open(session).unwrap_err().to_string().contains("NoSuchSession"));
    first.call(1, 1.0).unwrap();
    let mut second = ZmtpPeer::with_key(house.tls(None), ALICE);
    assert_eq!(second.open(session).unwrap().session, session);
    assert!(first.is_hung_up_on());
    second.call(1, 1.0).unwrap();
    house.await_sessions(1);
}

#[test]
fn a_silent_client_is_asked_and_one_that_answers_may_be_silent_for_ever() {
    let (ping_every, silence) = (Duration::from_millis(50), Duration::from_millis(200));
    let settings = RemoteSettings { ping_every, silence, ..RemoteSettings::default() };
    let house = RemoteServerFixture::open(RemoteServerSetup { settings, ..RemoteServerSetup::default() });
    let mut quiet = house.client(ALICE);
    let deaf = house.client(BOB);
    house.await_sessions(2);
    quiet.stream.sock.set_read_timeout(Some(10 * silence)).unwrap();
    // Answers pings while it waits for an event that never comes.
    let reader = std::thread::spawn(move || {
        let until = std::time::Instant::now() + 5 * silence;
        quiet.stream.sock.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        while std::time::Instant::now() < until {
            let heard = quiet.event();
            assert!(heard.as_ref().is_err_and(super::support::is_late), "{heard:?}");
        }
        quiet.stream.sock.set_read_timeout(Some(super::support::WATCHDOG)).unwrap();
        quiet.call(1, 1.0).unwrap();
        quiet
    });
    house.await_sessions(1);
    let _quiet = reader.join().unwrap();
    drop(deaf);
}

#[test]
fn clients_are_told_once_that_the_executor_is_about_to_end() {
    let house = RemoteServerFixture::open(RemoteServerSetup::default());
    let mut client = house.client(ALICE);
    house.registry.drain();
    assert_eq!(client.hear().unwrap(), FromLayers::Draining);
    let header = client.next_header(1);
    client.send(&header, &[1.0; WIDTH]).unwrap();
    assert_eq!(client.reply().unwrap().0.status, CallStatus::Draining);
    let mut late = ZmtpPeer::with_key(house.tls(None), ALICE);
    assert!(late.open(0).unwrap_err().to_string().contains("Draining"));
}

#[test]
fn when_the_door_closes_its_sessions_and_its_socket_are_gone() {
    let house = RemoteServerFixture::open(RemoteServerSetup::default());
    let (socket, registry) = (house.private_socket(), house.registry.clone());
    let mut client = house.client(ALICE);
    drop(house);
    assert!(client.is_hung_up_on() && !socket.exists());
    assert_eq!(registry.stats().open, 0);
    assert!(!matches!(client.event(), Ok(ZmtpEvent::Message(_))));
}
