//! The bounded ZMTP codec: whole conversations, transcripts of real peers, and hostile peers.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use proptest::prelude::*;
use shmproto::zmtp::{
    AcceptedMechanisms, Login, Mechanism, ZmtpClient, ZmtpError, ZmtpEvent, ZmtpLimits, ZmtpServer,
    put_message, put_two_frames_head,
};

const LIMITS: ZmtpLimits =
    ZmtpLimits { max_frame_bytes: 1 << 20, max_frames: 2, max_command_bytes: 512, max_handshake_bytes: 1024 };

trait ZmtpEnd {
    fn feed(&mut self, bytes: &mut &[u8]);
    fn next_event(&mut self) -> Result<Option<ZmtpEvent>, ZmtpError>;
    fn outgoing(&self) -> &[u8];
    fn sent(&mut self, count: usize);

    fn drain(&mut self) -> Vec<u8> {
        let bytes = self.outgoing().to_vec();
        self.sent(bytes.len());
        bytes
    }

    /// Feeds `bytes`, at most `step` at a time; the caller checks the login events.
    fn take(&mut self, mut bytes: &[u8], step: usize) -> Result<Vec<ZmtpEvent>, ZmtpError> {
        let mut events = Vec::new();
        while !bytes.is_empty() {
            let mut some = &bytes[..step.min(bytes.len())];
            let before = some.len();
            self.feed(&mut some);
            bytes = &bytes[before - some.len()..];
            while let Some(event) = self.next_event()? {
                events.push(event);
            }
        }
        Ok(events)
    }
}

macro_rules! end {
    ($type:ty) => {
        impl ZmtpEnd for $type {
            fn feed(&mut self, bytes: &mut &[u8]) {
                self.feed(bytes);
            }
            fn next_event(&mut self) -> Result<Option<ZmtpEvent>, ZmtpError> {
                self.next_event()
            }
            fn outgoing(&self) -> &[u8] {
                self.outgoing()
            }
            fn sent(&mut self, count: usize) {
                self.sent(count);
            }
        }
    };
}
end!(ZmtpServer);
end!(ZmtpClient);

fn login() -> Login {
    Login { username: "key".to_owned(), password: "secret".to_owned() }
}

fn client(mechanism: Mechanism) -> ZmtpClient {
    match mechanism {
        Mechanism::Null => ZmtpClient::null(LIMITS),
        Mechanism::Plain => ZmtpClient::plain(LIMITS, "key", "secret").unwrap(),
    }
}

/// A server and a client after their handshake, `step` bytes at a time.
fn ready(mechanism: Mechanism, step: usize) -> (ZmtpServer, ZmtpClient) {
    let (mut server, mut client) = (ZmtpServer::new(LIMITS, AcceptedMechanisms::Either), client(mechanism));
    let (mut heard, mut told) = (Vec::new(), Vec::new());
    while heard.last() != Some(&ZmtpEvent::Ready(mechanism))
        || told.last() != Some(&ZmtpEvent::Ready(mechanism))
    {
        let bytes = client.drain();
        let events = server.take(&bytes, step).unwrap();
        if events.contains(&ZmtpEvent::Login(login())) {
            server.accept();
        }
        let answer = server.drain();
        told.extend(client.take(&answer, step).unwrap());
        assert!(!bytes.is_empty() || !answer.is_empty(), "neither says anything: {heard:?} {told:?}");
        heard.extend(events);
    }
    let wanted = match mechanism {
        Mechanism::Null => vec![ZmtpEvent::Ready(mechanism)],
        Mechanism::Plain => vec![ZmtpEvent::Login(login()), ZmtpEvent::Ready(mechanism)],
    };
    assert_eq!((heard, told), (wanted, vec![ZmtpEvent::Ready(mechanism)]));
    assert_eq!(server.mechanism(), Some(mechanism));
    (server, client)
}

#[test]
fn both_ends_shake_hands_and_exchange_messages_however_the_bytes_come() {
    for mechanism in [Mechanism::Null, Mechanism::Plain] {
        for step in [1, 7, 64, 100_000] {
            let (mut server, mut client) = ready(mechanism, step);
            for length in [0, 1, 255, 256, 16 << 10, (16 << 10) + 1, 200_000] {
                let tensor: Vec<u8> = (0..length).map(|byte| byte as u8).collect();
                let (mut there, mut back) = (Vec::new(), Vec::new());
                put_two_frames_head(&mut there, b"header", length);
                there.extend_from_slice(&tensor);
                put_message(&mut back, &[b"", &tensor]);
                let wanted = |first: &[u8]| vec![ZmtpEvent::Message(vec![first.to_vec(), tensor.clone()])];
                assert_eq!(server.take(&there, step), Ok(wanted(b"header")), "{length} by {step}");
                assert_eq!(client.take(&back, step), Ok(wanted(b"")), "{length} by {step}");
            }
        }
    }
}

#[test]
fn what_comes_at_once_is_handed_out_one_by_one() {
    let (mut server, _) = ready(Mechanism::Null, 64);
    let mut bytes = Vec::new();
    (0..1000_u16).for_each(|number| put_message(&mut bytes, &[&number.to_le_bytes()]));
    let events = server.take(&bytes, usize::MAX).unwrap();
    let wanted: Vec<ZmtpEvent> =
        (0..1000_u16).map(|number| ZmtpEvent::Message(vec![number.to_le_bytes().to_vec()])).collect();
    assert_eq!(events, wanted);
}

#[test]
fn a_ping_is_answered_with_its_context_and_its_patience_is_known() {
    let (mut server, mut client) = ready(Mechanism::Null, 64);
    assert_eq!(server.take(b"\x04\x0b\x04PING\x00\x1ectxt", 1), Ok(vec![]));
    assert_eq!(server.drain(), b"\x04\x09\x04PONGctxt");
    assert_eq!(server.peer_ttl(), Some(Duration::from_secs(3)));
    client.ping(Duration::from_millis(2500));
    let ping = client.drain();
    assert_eq!(ping, b"\x04\x07\x04PING\x00\x19");
    assert_eq!(server.take(&ping, 64), Ok(vec![]));
    let pong = server.drain();
    assert_eq!(client.take(&pong, 64), Ok(vec![ZmtpEvent::Pong]));
    assert_eq!(server.peer_ttl(), Some(Duration::from_millis(2500)));
    server.take(b"\x04\x07\x04PING\x00\x00", 64).unwrap();
    assert_eq!(server.peer_ttl(), None, "it has all the patience there is");
}

#[test]
fn a_ping_between_the_frames_of_a_message_spoils_neither() {
    // libzmq sends a PING on a timer, at any time.
    let (mut server, _) = ready(Mechanism::Null, 64);
    let events = server.take(b"\x01\x01a\x04\x07\x04PING\x00\x00\x00\x01b", 64).unwrap();
    assert_eq!(events, [ZmtpEvent::Message(vec![b"a".to_vec(), b"b".to_vec()])]);
    assert_eq!(server.drain(), b"\x04\x05\x04PONG");
}

#[test]
fn a_rejected_client_is_told_why_and_hears_no_more() {
    let (mut server, mut client) =
        (ZmtpServer::new(LIMITS, AcceptedMechanisms::Plain), client(Mechanism::Plain));
    server.take(&client.drain(), 64).unwrap();
    assert_eq!(client.take(&server.drain(), 64), Ok(vec![]));
    assert_eq!(server.take(&client.drain(), 64), Ok(vec![ZmtpEvent::Login(login())]));
    server.reject(&"ü".repeat(200));
    client.feed(&mut &server.drain()[..]);
    assert_eq!(client.next_event(), Ok(Some(ZmtpEvent::Refused("ü".repeat(127)))), "cut between letters");
    server.accept();
    assert!(server.drain().is_empty(), "there is no second thought");
    let mut bytes: &[u8] = b"\x00\x01a";
    server.feed(&mut bytes);
    assert_eq!(server.next_event(), Err(ZmtpError::Rejected));
    assert_eq!(client.next_event(), Err(ZmtpError::Rejected));
}

/// A greeting of version 3.`minor` for a mechanism.
fn greeting(minor: u8, mechanism: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 64];
    bytes[..12].copy_from_slice(&[0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, minor]);
    bytes[12..12 + mechanism.len()].copy_from_slice(mechanism);
    bytes
}

/// READY of a socket type, with an identity as libzmq sends it.
fn properties(kind: &str) -> Vec<u8> {
    let length = u8::try_from(kind.len()).unwrap();
    let body =
        [b"\x05READY\x0bSocket-Type\0\0\0", &[length][..], kind.as_bytes(), b"\x08Identity\0\0\0\0"].concat();
    [&[4, u8::try_from(body.len()).unwrap()][..], &body].concat()
}

fn refused(accepts: AcceptedMechanisms, bytes: &[u8]) -> ZmtpError {
    let mut server = ZmtpServer::new(LIMITS, accepts);
    let error = server.take(bytes, usize::MAX).unwrap_err();
    assert_eq!(server.next_event(), Err(error.clone()), "it stands");
    for step in [1, 3] {
        assert_eq!(
            ZmtpServer::new(LIMITS, accepts).take(bytes, step),
            Err(error.clone()),
            "however it comes"
        );
    }
    error
}

#[test]
fn a_peer_of_version_3_0_is_served_and_an_identity_means_nothing() {
    for minor in [0, 1, 2] {
        let mut server = ZmtpServer::new(LIMITS, AcceptedMechanisms::Null);
        let bytes = [greeting(minor, b"NULL"), properties("DEALER")].concat();
        assert_eq!(server.take(&bytes, 64), Ok(vec![ZmtpEvent::Ready(Mechanism::Null)]));
        let answer = server.drain();
        assert_eq!(answer[..12], [0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 1]);
        assert_eq!(answer[12..17], *b"NULL\0");
        assert_eq!(answer[64..], *b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06ROUTER");
    }
}

#[test]
fn a_recorded_conversation_of_libzmq_is_understood_word_for_word() {
    // Transcript of a DEALER of libzmq 4.3.5 with PLAIN, step by step.
    let mut server = ZmtpServer::new(LIMITS, AcceptedMechanisms::Plain);
    server.drain();
    assert_eq!(server.take(b"\xff\0\0\0\0\0\0\0\x01\x7f", 64), Ok(vec![]));
    assert_eq!(server.drain(), b"", "it has heard enough to go on");
    assert_eq!(server.take(&greeting(1, b"PLAIN")[10..], 64), Ok(vec![]));
    assert_eq!(server.drain(), [&b"PLAIN"[..], &[0; 15], &[1], &[0; 31]].concat());
    let events = server.take(b"\x04\x0f\x05HELLO\x03key\x04good", 64);
    let login = Login { username: "key".to_owned(), password: "good".to_owned() };
    assert_eq!(events, Ok(vec![ZmtpEvent::Login(login)]));
    server.accept();
    assert_eq!(server.drain(), b"\x04\x08\x07WELCOME");
    let initiate = b"\x04,\x08INITIATE\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0";
    assert_eq!(server.take(initiate, 64), Ok(vec![ZmtpEvent::Ready(Mechanism::Plain)]));
    assert_eq!(server.drain(), b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06ROUTER");
    let message = vec![ZmtpEvent::Message(vec![b"h".to_vec(), vec![]])];
    assert_eq!(server.take(b"\x01\x01h\0\0", 64), Ok(message));
}

#[test]
fn signature_and_version_are_said_before_the_peer_has_said_anything() {
    // libzmq sends its mechanism only after the peer's.
    let server = ZmtpServer::new(LIMITS, AcceptedMechanisms::Either);
    assert_eq!(server.outgoing(), [0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 1]);
}

#[test]
fn other_protocols_are_refused_at_their_first_bytes() {
    let http = b"GET / HTTP/1.1\r\n";
    assert_eq!(refused(AcceptedMechanisms::Either, &http[..1]), ZmtpError::Signature);
    assert_eq!(refused(AcceptedMechanisms::Either, b"\xff\0\0\0\0\0\0\0\x01\0"), ZmtpError::Signature);
    assert_eq!(refused(AcceptedMechanisms::Either, b"\xff\0\0\0\0\0\0\0\x01\x7f\x01"), ZmtpError::Version(1));
    let curve = greeting(1, b"CURVE");
    assert_eq!(refused(AcceptedMechanisms::Either, &curve), ZmtpError::Mechanism("CURVE".to_owned()));
    let padded = greeting(1, b"NULL\0x");
    assert_eq!(refused(AcceptedMechanisms::Either, &padded), ZmtpError::Mechanism("NULL".to_owned()));
    assert_eq!(
        refused(AcceptedMechanisms::Plain, &greeting(1, b"NULL")),
        ZmtpError::Mechanism("NULL".to_owned())
    );
    assert_eq!(
        refused(AcceptedMechanisms::Null, &greeting(1, b"PLAIN")),
        ZmtpError::Mechanism("PLAIN".to_owned())
    );
    for kind in ["REQ", "ROUTER", "SUB", "", "dealer"] {
        let bytes = [greeting(1, b"NULL"), properties(kind)].concat();
        assert_eq!(refused(AcceptedMechanisms::Null, &bytes), ZmtpError::SocketType(kind.to_owned()));
    }
}

#[test]
fn a_handshake_out_of_turn_or_out_of_bounds_is_refused() {
    let null = |rest: &[u8]| refused(AcceptedMechanisms::Either, &[&greeting(1, b"NULL"), rest].concat());
    let plain = |rest: &[u8]| refused(AcceptedMechanisms::Either, &[&greeting(1, b"PLAIN"), rest].concat());
    assert_eq!(null(b"\x00\x01a"), ZmtpError::Early);
    assert_eq!(null(b"\x04\x06\x05HELLO"), ZmtpError::Malformed("HELLO"));
    assert_eq!(null(b"\x04\x08\x07WELCOME"), ZmtpError::Unexpected("WELCOME".to_owned()));
    assert_eq!(null(b"\x04\x06\x05OTHER"), ZmtpError::Unexpected("OTHER".to_owned()));
    assert_eq!(null(b"\x04\x0a\x05ERROR\x03400"), ZmtpError::Peer("400".to_owned()));
    assert_eq!(null(b"\x04\x06\x05READY"), ZmtpError::Malformed("READY"), "no kind of socket");
    assert_eq!(null(b"\x04\x00"), ZmtpError::Malformed("name"));
    assert_eq!(null(b"\x04\x03\x05RE"), ZmtpError::Malformed("name"));
    assert_eq!(
        null(b"\x04\x0b\x05READY\0\0\0\0\0"),
        ZmtpError::Malformed("READY"),
        "a property without a name"
    );
    assert_eq!(null(b"\x04\x0c\x05READY\x01X\xff\xff\xff\xff"), ZmtpError::Malformed("READY"));
    let twice = b"\x0bSocket-Type\0\0\0\x01A";
    let body = [&b"\x05READY"[..], twice, twice].concat();
    assert_eq!(null(&[&[4, 40][..], &body].concat()), ZmtpError::Malformed("READY"));
    assert_eq!(plain(b"\x04\x0c\x05HELLO\x03key\xffx"), ZmtpError::Malformed("HELLO"));
    assert_eq!(plain(b"\x04\x0a\x05HELLO\x01k\x00x"), ZmtpError::Malformed("HELLO"), "bytes to spare");
    assert_eq!(plain(b"\x04\x09\x05HELLO\x01\xff\x00"), ZmtpError::Malformed("HELLO"), "no text");
    assert_eq!(plain(&properties("DEALER")), ZmtpError::Unexpected("READY".to_owned()));
    assert_eq!(null(b"\x06\0\0\0\0\0\0\x02\x01"), ZmtpError::CommandTooLong { bytes: 513, most: 512 });
    let long = ZmtpLimits { max_command_bytes: 4096, ..LIMITS };
    let command = [&b"\x06\0\0\0\0\0\0\x04\0\x05READY"[..], &[0; 1018]].concat();
    let mut server = ZmtpServer::new(long, AcceptedMechanisms::Null);
    let bytes = [greeting(1, b"NULL"), command].concat();
    assert_eq!(server.take(&bytes, usize::MAX), Err(ZmtpError::HandshakeTooLong(1024)));
}

/// The server's error for a ready client that sends `bytes`.
fn refused_later(bytes: &[u8]) -> ZmtpError {
    let (mut server, _) = ready(Mechanism::Null, 64);
    server.take(bytes, usize::MAX).unwrap_err()
}

#[test]
fn messages_out_of_bounds_are_refused_before_memory_is_taken() {
    for (length, bytes) in [([0x40, 0, 0, 0, 0, 0, 0, 0], 1 << 62), ([255; 8], u64::MAX)] {
        for flags in [2, 3] {
            let error = refused_later(&[&[flags][..], &length].concat());
            assert_eq!(error, ZmtpError::FrameTooLong { bytes, most: 1 << 20 });
        }
    }
    assert_eq!(refused_later(&b"\x01\x00".repeat(3)), ZmtpError::TooManyFrames(2));
    for flags in [5, 7, 8, 0x80, 0xff] {
        assert_eq!(refused_later(&[flags, 0]), ZmtpError::Flags(flags));
    }
    assert_eq!(refused_later(b"\x04\x04\x03xyz"), ZmtpError::Unexpected("xyz".to_owned()));
    assert_eq!(refused_later(b"\x04\x0a\x09SUBSCRIBE"), ZmtpError::Unexpected("SUBSCRIBE".to_owned()));
    assert_eq!(refused_later(b"\x01\x00\x04\x07\x06CANCEL"), ZmtpError::Unexpected("CANCEL".to_owned()));
    assert_eq!(refused_later(b"\x04\x06\x04PING\0"), ZmtpError::Malformed("PING"));
    let long = [&b"\x04\x18\x04PING\0\0"[..], &[7; 17]].concat();
    assert_eq!(refused_later(&long), ZmtpError::Malformed("PING"), "a context of 17 bytes");
    assert_eq!(refused_later(b"\x04\x0a\x05ERROR\x03bye"), ZmtpError::Peer("bye".to_owned()));
}

#[test]
fn who_pings_and_does_not_listen_is_given_up() {
    assert_eq!(refused_later(&b"\x04\x07\x04PING\x00\x00".repeat(5000)), ZmtpError::Slow);
}

#[test]
fn memory_grows_with_the_bytes_that_come_and_not_with_what_is_announced() {
    let limits = ZmtpLimits::new(1 << 30);
    let mut server = ZmtpServer::new(limits, AcceptedMechanisms::Null);
    server.take(&[greeting(1, b"NULL"), properties("DEALER")].concat(), 64).unwrap();
    let idle = server.held_bytes();
    server.take(b"\x02\0\0\0\0\x40\0\0\0", 9).unwrap();
    assert!(server.held_bytes() <= idle, "a gibibyte was announced, and nothing came");
    for come in 1..=64_usize {
        server.take(&[5; 4096], 4096).unwrap();
        let held = server.held_bytes() - idle;
        assert!(held <= (2 * come * 4096).max(64 << 10) + (16 << 10), "{held} for {}", come * 4096);
    }
}

#[test]
fn a_large_frame_is_read_where_it_is_handed_out() {
    let (mut server, _) = ready(Mechanism::Null, 64);
    server.take(&[&b"\x02\0\0\0\0\0\x08\0\0"[..], &[1; 300_000]].concat(), usize::MAX).unwrap();
    let (mut left, mut first) = ((8 << 16) - 300_000, None);
    while left > 0 {
        let space = server.space();
        let count = space.len().min(left);
        space[..count].fill(2);
        if left > 100_000 {
            first.get_or_insert(space.as_ptr().addr());
        }
        server.advance(count);
        left -= count;
        if left > 0 {
            assert_eq!(server.next_event(), Ok(None));
        }
    }
    let Ok(Some(ZmtpEvent::Message(frames))) = server.next_event() else { panic!("a message") };
    assert_eq!(frames[0].len(), 8 << 16);
    assert!(frames[0][..300_000].iter().all(|&byte| byte == 1));
    assert!(frames[0][300_000..].iter().all(|&byte| byte == 2));
}

#[test]
fn names_and_passwords_have_room_for_255_bytes() {
    let long = "x".repeat(256);
    assert_eq!(ZmtpClient::plain(LIMITS, &long, "").unwrap_err().what, "name");
    assert_eq!(ZmtpClient::plain(LIMITS, "", &long).unwrap_err().what, "password");
    let mut client = ZmtpClient::plain(LIMITS, "", &long[..255]).unwrap();
    let mut server = ZmtpServer::new(LIMITS, AcceptedMechanisms::Plain);
    server.take(&client.drain(), 64).unwrap();
    client.take(&server.drain(), 64).unwrap();
    let Ok(events) = server.take(&client.drain(), 64) else { panic!("a login") };
    let [ZmtpEvent::Login(login)] = &events[..] else { panic!("{events:?}") };
    assert_eq!((login.username.as_str(), login.password.len()), ("", 255));
    assert!(!format!("{events:?}").contains("xxx"), "a password is not shown");
}

#[test]
fn a_client_refuses_a_server_that_is_none() {
    let refused = |bytes: &[u8]| client(Mechanism::Null).take(bytes, usize::MAX).unwrap_err();
    assert_eq!(refused(b"HTTP"), ZmtpError::Signature);
    assert_eq!(refused(&greeting(1, b"PLAIN")), ZmtpError::Mechanism("PLAIN".to_owned()));
    let dealer = [greeting(1, b"NULL"), properties("DEALER")].concat();
    assert_eq!(refused(&dealer), ZmtpError::SocketType("DEALER".to_owned()));
    let early = [greeting(1, b"NULL"), b"\x00\x00".to_vec()].concat();
    assert_eq!(refused(&early), ZmtpError::Early);
    let mut client = client(Mechanism::Plain);
    let bytes = [greeting(1, b"PLAIN"), b"\x04\x0a\x05ERROR\x03400".to_vec()].concat();
    client.feed(&mut &bytes[..]);
    assert_eq!(client.next_event(), Ok(Some(ZmtpEvent::Refused("400".to_owned()))));
}

proptest! {
    #[test]
    fn arbitrary_bytes_are_events_or_errors_and_the_same_however_they_come(
        beginning in prop::sample::select(vec![vec![], greeting(1, b"NULL"), greeting(0, b"PLAIN"),
            [greeting(1, b"NULL"), properties("DEALER")].concat()]),
        bytes in prop::collection::vec(prop_oneof![any::<u8>(), 0..8_u8], 0..300),
        step in 1..80_usize,
    ) {
        let bytes = [beginning, bytes].concat();
        let come = |step: usize| {
            let (mut server, mut rest) = (ZmtpServer::new(LIMITS, AcceptedMechanisms::Either), &bytes[..]);
            let mut events = Vec::new();
            while !rest.is_empty() {
                let mut some = &rest[..step.min(rest.len())];
                let before = some.len();
                server.feed(&mut some);
                rest = &rest[before - some.len()..];
                loop {
                    match server.next_event() {
                        Ok(None) => break,
                        Ok(Some(event)) => {
                            if let ZmtpEvent::Login(_) = event {
                                server.accept();
                            }
                            events.push(Ok(event));
                        }
                        Err(error) => {
                            events.push(Err(error));
                            return events;
                        }
                    }
                }
            }
            events
        };
        prop_assert_eq!(come(step), come(usize::MAX));
    }
}

#[test]
fn a_frame_that_is_skipped_keeps_no_memory_and_what_follows_is_whole() {
    let (mut server, _) = ready(Mechanism::Null, usize::MAX);
    let mut bytes = Vec::new();
    put_message(&mut bytes, &[b"head", &[7; 500_000]]);
    put_message(&mut bytes, &[b"next", &[8; 100_000]]);
    let (begin, rest) = bytes.split_at(100_000);
    assert_eq!(server.take(begin, 5000).unwrap(), []);
    let head: &[Vec<u8>] = &[b"head".to_vec()];
    assert_eq!(server.under_way(), Some((head, 500_000)));
    let idle = ZmtpServer::new(LIMITS, AcceptedMechanisms::Either).held_bytes();
    server.skip();
    assert_eq!(server.under_way(), None);
    assert!(server.held_bytes() < idle + 1000);
    let messages = server.take(rest, 5000).unwrap();
    let wanted = [vec![b"head".to_vec(), Vec::new()], vec![b"next".to_vec(), vec![8; 100_000]]];
    assert_eq!(messages, wanted.map(ZmtpEvent::Message));
}
