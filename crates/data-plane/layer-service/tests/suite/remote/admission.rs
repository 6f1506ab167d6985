//! Admission of clients.

use std::{
    io::{Read as _, Write as _},
    time::Instant,
};

use layer_service::{auth::REFUSED, remote::RemoteListenError};
use shmproto::layer::control::{FromLayers, RefusalCode};

use super::support::{ALICE, Authority, BOB, RemoteServerFixture, RemoteServerSetup, ZmtpPeer};

fn with_certificates() -> RemoteServerFixture {
    RemoteServerFixture::open(RemoteServerSetup {
        keys: None,
        asks_for_certificates: true,
        ..RemoteServerSetup::default()
    })
}

#[test]
fn a_key_names_the_tenant_and_a_wrong_key_hears_what_no_key_hears() {
    let house = RemoteServerFixture::open(RemoteServerSetup::default());
    let mut alice = ZmtpPeer::with_key(house.tls(None), ALICE);
    assert_eq!(alice.open(0).unwrap().tenant, "alice");
    for wrong in ["", "hb-mallory", "key"] {
        let refused = ZmtpPeer::with_key(house.tls(None), wrong).open_as(0, "").unwrap();
        let FromLayers::Refused(refused) = refused else { panic!("{wrong:?} opens") };
        assert_eq!((refused.code, &*refused.message), (RefusalCode::Unauthenticated, REFUSED));
    }
    alice.call(1, 1.0).unwrap();
    house.await_sessions(1);
}

#[test]
fn without_plain_the_key_is_looked_for_in_the_first_message() {
    let house = RemoteServerFixture::open(RemoteServerSetup::default());
    let mut alice = ZmtpPeer::null(house.tls(None));
    assert!(matches!(alice.open_as(0, ALICE), Ok(FromLayers::Opened(opened)) if opened.tenant == "alice"));
    for wrong in ["", "hb-mallory"] {
        let refused = ZmtpPeer::null(house.tls(None)).open_as(0, wrong).unwrap();
        let FromLayers::Refused(refused) = refused else { panic!("{wrong:?} opens") };
        assert_eq!((refused.code, &*refused.message), (RefusalCode::Unauthenticated, REFUSED));
    }
    let mut neighbour = house.neighbour();
    assert!(matches!(neighbour.open_as(0, BOB), Ok(FromLayers::Opened(opened)) if opened.tenant == "bob"));
}

#[test]
fn a_key_that_is_taken_out_closes_its_sessions_and_no_other() {
    let house = RemoteServerFixture::open(RemoteServerSetup::default());
    let (mut alice, mut bob) = (house.client(ALICE), house.client(BOB));
    alice.call(1, 1.0).unwrap();
    house.write_keys(&security::keys::line_of("user", "bob", BOB));
    let written = Instant::now();
    let refused = alice.hear().unwrap();
    assert!(matches!(refused, FromLayers::Refused(no) if no.code == RefusalCode::Unauthenticated));
    assert!(alice.is_hung_up_on());
    // The service checks four times per second; the rest is the machine's delay.
    eprintln!("closed after {:?}", written.elapsed());
    house.await_sessions(1);
    bob.call(1, 1.0).unwrap();
    assert!(ZmtpPeer::with_key(house.tls(None), ALICE).open(0).is_err());
}

#[test]
fn a_certificate_of_the_client_ca_names_the_tenant() {
    let house = with_certificates();
    let alice = house.authority.client("alice", 2100);
    let mut alice = ZmtpPeer::null(house.tls(Some(&alice)));
    assert_eq!(alice.open(0).unwrap().tenant, "alice");
    alice.call(2, 1.0).unwrap();
    // Without a key file, keys are ignored.
    let bob = house.authority.client("bob", 2100);
    assert_eq!(ZmtpPeer::with_key(house.tls(Some(&bob)), ALICE).open(0).unwrap().tenant, "bob");
}

#[test]
fn certificates_that_have_expired_or_are_anothers_or_missing_open_nothing() {
    let house = with_certificates();
    let expired = house.authority.client("alice", 2001);
    let foreign = Authority::new().client("alice", 2100);
    let nameless = house.authority.client("not a tenant", 2100);
    for certified in [None, Some(&expired), Some(&foreign), Some(&nameless)] {
        let mut peer = ZmtpPeer::null(house.tls(certified));
        assert!(peer.open(0).is_err() && peer.is_hung_up_on());
    }
    house.await_sessions(0);
    let alice = house.authority.client("alice", 2100);
    ZmtpPeer::null(house.tls(Some(&alice))).open(0).unwrap();
}

#[test]
fn where_both_are_taken_a_certificate_does_and_a_key_beside_it_must_be_of_the_same_tenant() {
    let house = RemoteServerFixture::open(RemoteServerSetup {
        asks_for_certificates: true,
        ..RemoteServerSetup::default()
    });
    let alice = house.authority.client("alice", 2100);
    assert_eq!(ZmtpPeer::null(house.tls(Some(&alice))).open(0).unwrap().tenant, "alice");
    assert_eq!(ZmtpPeer::with_key(house.tls(Some(&alice)), ALICE).open(0).unwrap().tenant, "alice");
    assert_eq!(ZmtpPeer::with_key(house.tls(None), BOB).open(0).unwrap().tenant, "bob");
    for key in [BOB, "hb-mallory"] {
        assert!(ZmtpPeer::with_key(house.tls(Some(&alice)), key).open(0).is_err(), "{key}");
    }
}

#[test]
fn a_client_that_trusts_another_authority_does_not_send_its_key() {
    let house = RemoteServerFixture::open(RemoteServerSetup::default());
    let other = RemoteServerFixture::open(RemoteServerSetup::default());
    let name = rustls_pki_types::ServerName::try_from("localhost").unwrap();
    let connection = rustls::ClientConnection::new(other.client_config(None), name).unwrap();
    let mut peer = ZmtpPeer::with_key(rustls::StreamOwned::new(connection, house.tcp()), ALICE);
    assert!(peer.open(0).unwrap_err().to_string().contains("invalid peer certificate"));
    house.await_sessions(0);
}

#[test]
fn tls_1_2_is_not_spoken() {
    let house = RemoteServerFixture::open(RemoteServerSetup::default());
    let mut tcp = house.tcp();
    // A TLS 1.2 hello with a cipher suite of that version only, and without extensions.
    let mut hello = vec![0x03, 0x03];
    hello.extend([9; 32]);
    hello.extend([0, 0, 2, 0xc0, 0x2f, 1, 0]);
    let mut record = vec![0x16, 0x03, 0x01, 0, hello.len() as u8 + 4, 1, 0, 0, hello.len() as u8];
    record.extend(hello);
    tcp.write_all(&record).unwrap();
    let mut answer = Vec::new();
    tcp.read_to_end(&mut answer).unwrap();
    assert_eq!(answer.first(), Some(&0x15), "an alert, not a hello: {answer:?}");
    ZmtpPeer::with_key(house.tls(None), ALICE).open(0).unwrap();
}

#[test]
fn an_address_that_others_reach_needs_keys_or_certificates() {
    let open = |keys, asks_for_certificates| {
        let address = "0.0.0.0:0";
        RemoteServerFixture::try_open(RemoteServerSetup {
            keys,
            asks_for_certificates,
            address,
            ..RemoteServerSetup::default()
        })
    };
    let error = open(None, false).err().unwrap();
    assert!(matches!(error, RemoteListenError::Unguarded(_)));
    assert!(error.to_string().contains("--layer-key-file"), "{error}");
    open(None, true).unwrap();
    open(Some(security::keys::line_of("user", "alice", ALICE)), false).unwrap();
}

#[test]
fn two_peers_that_call_themselves_the_same_get_each_their_own_answers() {
    let house = RemoteServerFixture::open(RemoteServerSetup::default());
    let mut peers = [(ALICE, 1.0), (BOB, 2.0)].map(|(key, value)| (named_peer(&house, key), value));
    for _ in 0..20 {
        for (peer, value) in &mut peers {
            let header = peer.next_header(1);
            peer.send(&header, &[*value; super::support::WIDTH]).unwrap();
        }
        for (peer, value) in &mut peers {
            let (_, rows) = peer.reply().unwrap();
            assert_eq!(rows, [*value * super::support::FACTOR; super::support::WIDTH]);
        }
    }
}

fn named_peer(house: &RemoteServerFixture, key: &str) -> ZmtpPeer<IdentityStream> {
    let stream = IdentityStream { stream: house.tls(None), is_named: false };
    let mut peer = ZmtpPeer::null(stream);
    assert!(matches!(peer.open_as(0, key), Ok(FromLayers::Opened(_))));
    assert!(peer.stream.is_named);
    peer
}

/// Inserts an identity into the READY command of the stream.
struct IdentityStream {
    stream: super::support::Tls,
    is_named: bool,
}

impl std::io::Read for IdentityStream {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.stream.read(buffer)
    }
}

impl std::io::Write for IdentityStream {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        const READY: &[u8] = b"\x05READY";
        let at = bytes.windows(READY.len()).position(|window| window == READY);
        match at.filter(|_| !self.is_named) {
            None => self.stream.write_all(bytes)?,
            Some(at) => {
                let property = b"\x08Identity\x00\x00\x00\x04same";
                let length = usize::from(bytes[at - 1]);
                let mut named = bytes[..at + length].to_vec();
                named[at - 1] += property.len() as u8;
                // A repeated property would be another error.
                assert!(!named.windows(9).any(|window| window == b"\x08Identity"));
                named.extend(property);
                named.extend(&bytes[at + length..]);
                self.stream.write_all(&named)?;
                self.is_named = true;
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.stream.flush()
    }
}
