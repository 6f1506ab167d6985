//! Regions reach a worker complete, and no message of a peer does harm.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs::{self, Permissions},
    io::{IoSlice, PipeReader},
    mem::MaybeUninit,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::{fs::PermissionsExt as _, net::UnixListener},
    },
    path::PathBuf,
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use proptest::prelude::*;
use rustix::{
    event::{PollFd, PollFlags, poll},
    net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
        sendmsg, socketpair,
    },
};
use shmproto::{
    codec::{DecodeError, Wire},
    fd_passing::{
        Accepted, AdapterOffered, AdapterRejected, BoardListener, ConnectError, Connection, ExecutorEnd,
        FdMessage, FromWorker, HelloError, LAYOUT_HASH, ListenError, MAX_MESSAGE_BYTES, MAX_TEXT_BYTES,
        ReceiveError, SendError, SlotGranted, ToWorker, WorkerEnd, WorkerHello, bounded_text, connect,
        layout_hash,
    },
    image::{Image, ImageEntry, ImageError},
    region::{Access, PeerAccess, Region, RegionError},
};

fn pair(flags: SocketFlags) -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | flags;
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
}

/// Both ends of a connection, non-blocking.
fn ends() -> (ExecutorEnd, WorkerEnd) {
    let (executor, worker) = pair(SocketFlags::NONBLOCK);
    (Connection::over(executor), Connection::over(worker))
}

/// A raw socket of a peer, and the worker that reads it.
fn hostile_executor() -> (OwnedFd, WorkerEnd) {
    let (hostile, worker) = pair(SocketFlags::NONBLOCK);
    (hostile, Connection::over(worker))
}

/// A raw socket of a peer, and the executor that reads it.
fn hostile_worker() -> (OwnedFd, ExecutorEnd) {
    let (hostile, executor) = pair(SocketFlags::NONBLOCK);
    (hostile, Connection::over(executor))
}

fn throw(socket: &OwnedFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(descriptors.is_empty() || control.push(SendAncillaryMessage::ScmRights(descriptors)));
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).unwrap();
}

/// A pipe that shows whether all copies of its other end are closed.
fn telltale() -> (PipeReader, OwnedFd) {
    let (reader, writer) = std::io::pipe().unwrap();
    (reader, writer.into())
}

fn is_closed(reader: &PipeReader) -> bool {
    let mut fds = [PollFd::new(reader, PollFlags::IN)];
    poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
    fds[0].revents().contains(PollFlags::HUP)
}

fn offered() -> ToWorker {
    ToWorker::AdapterOffered(AdapterOffered { image: 5, bytes: 64 })
}

fn image() -> Image {
    let entry = ImageEntry {
        module: 1,
        rank: 1,
        columns: 2,
        rows: 2,
        scale: 1.0,
        b_offset: 64,
        ..ImageEntry::default()
    };
    Image::build(&[entry], &[1; 72]).unwrap()
}

#[test]
fn a_worker_says_hello_and_is_given_its_regions_and_adapters() {
    let (executor, worker) = ends();
    worker.send(&FromWorker::Hello(WorkerHello::new(7, 1)), &[]).unwrap();
    let Ok(Some((FromWorker::Hello(hello), fds))) = executor.receive() else { panic!("no hello") };
    assert_eq!((hello.check(), hello.instance, hello.core, fds.len()), (Ok(()), 7, 1, 0));

    let control = Region::create("test-control", 128, PeerAccess::ReadWrite).unwrap();
    let x = Region::create("test-x", 64, PeerAccess::ReadOnly).unwrap();
    let sums = Region::create("test-sums", 192, PeerAccess::ReadWrite).unwrap();
    let seated = SlotGranted { seat: 3, worker: 9, control_bytes: 128, x_bytes: 64, sums_bytes: 192 };
    executor.send(&ToWorker::Seated(seated.clone()), &[control.fd(), x.fd(), sums.fd()]).unwrap();
    let image = image();
    executor.send(&offered(), &[image.fd()]).unwrap();

    let Ok(Some((message, fds))) = worker.receive() else { panic!("no seat") };
    assert_eq!(message, ToWorker::Seated(seated));
    let accesses = [(128, Access::ReadWrite), (64, Access::ReadOnly), (192, Access::ReadWrite)];
    let mut regions = fds.into_iter().zip(accesses).map(|(fd, (bytes, access))| {
        assert!(rustix::io::fcntl_getfd(&fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        Region::map(fd, bytes..=bytes, access).unwrap()
    });
    regions.next().unwrap().words()[1].store(42, Ordering::Release);
    assert_eq!(control.read_words()[1].acquire(), 42, "the first descriptor is the control region's");
    assert_eq!(regions.count(), 2);
    let Ok(Some((_, mut fds))) = worker.receive() else { panic!("no adapter") };
    assert_eq!(Image::map(fds.remove(0), 4096).unwrap().entries(), image.entries());
    worker.send(&FromWorker::AdapterMapped(5), &[]).unwrap();
    assert!(matches!(executor.receive(), Ok(Some((FromWorker::AdapterMapped(5), _)))));
}

#[test]
fn a_worker_of_another_version_or_layout_is_told_so() {
    let hello = WorkerHello::new(1, 0);
    assert_eq!(hello.check(), Ok(()));
    assert_eq!(WorkerHello { version: 9, ..hello.clone() }.check(), Err(HelloError::Version { worker: 9 }));
    assert_eq!(WorkerHello { layout_hash: LAYOUT_HASH ^ 1, ..hello }.check(), Err(HelloError::Layout));
    assert_ne!(layout_hash(&[&[1, 2]]), layout_hash(&[&[2, 1]]));
    assert_ne!(layout_hash(&[&[1, 2]]), layout_hash(&[&[1]]));
}

#[test]
fn nothing_there_and_nobody_there_are_told_apart() {
    let (executor, worker) = ends();
    assert!(matches!(executor.receive(), Ok(None)));
    worker.send(&FromWorker::AdapterMapped(1), &[]).unwrap();
    drop(worker);
    assert!(
        matches!(executor.receive(), Ok(Some((FromWorker::AdapterMapped(1), _)))),
        "what was sent arrives"
    );
    assert!(matches!(executor.receive(), Err(ReceiveError::Closed)));
    assert!(matches!(executor.send(&ToWorker::Closing, &[]), Err(SendError::Closed)));
}

#[test]
fn a_worker_that_takes_nothing_never_holds_the_executor_up() {
    let (executor, worker) = ends();
    let image = image();
    let mut sent = 0;
    let full = loop {
        match executor.send(&offered(), &[image.fd()]) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
        assert!(sent < 100_000, "a socket holds no end of messages");
    };
    assert!(matches!(full, SendError::Full), "{full}");
    for _ in 0..sent {
        assert!(matches!(worker.receive(), Ok(Some((message, _))) if message == offered()));
    }
    assert!(matches!(worker.receive(), Ok(None)), "what was not sent does not come in parts");
    executor.send(&offered(), &[image.fd()]).unwrap();
}

#[test]
fn a_message_is_not_sent_with_the_wrong_descriptors_or_too_long() {
    let (executor, worker) = ends();
    let image = image();
    for fds in [&[][..], &[image.fd(), image.fd()]] {
        let refused = executor.send(&offered(), fds);
        assert!(matches!(refused, Err(SendError::Descriptors { wanted: 1, given }) if given == fds.len()));
    }
    for bytes in [MAX_TEXT_BYTES + 1, MAX_MESSAGE_BYTES] {
        let refused = executor.send(&ToWorker::Refused("x".repeat(bytes)), &[]);
        assert!(matches!(refused, Err(SendError::TooLong(_))), "{refused:?}");
    }
    let text = "ü".repeat(MAX_TEXT_BYTES);
    assert_eq!(bounded_text(&text).len(), MAX_TEXT_BYTES);
    assert_eq!(bounded_text(&format!("x{text}")).len(), MAX_TEXT_BYTES - 1, "no half letter");
    assert_eq!(bounded_text("short"), "short");
    executor.send(&ToWorker::Refused(bounded_text(&text).to_owned()), &[]).unwrap();
    assert!(matches!(worker.receive(), Ok(Some((ToWorker::Refused(_), _)))));
}

#[test]
fn a_datagram_that_is_no_message_is_refused() {
    let (hostile, worker) = hostile_executor();
    let refused = |bytes: &[u8]| {
        throw(&hostile, bytes, &[]);
        worker.receive().unwrap_err()
    };
    assert!(matches!(refused(&[200]), ReceiveError::Decode(DecodeError::UnknownTag { tag: 200, .. })));
    assert!(matches!(refused(&[4, 0]), ReceiveError::Decode(DecodeError::Trailing(1))));
    assert!(matches!(refused(&[3, 1, 2]), ReceiveError::Decode(DecodeError::Truncated { .. })));
    let claims = [&[1][..], &u32::MAX.to_le_bytes(), b"x"].concat();
    assert!(matches!(refused(&claims), ReceiveError::Decode(DecodeError::Truncated { .. })));
    let no_text = [&[1][..], &2u32.to_le_bytes(), &[0xff, 0xfe]].concat();
    assert!(matches!(refused(&no_text), ReceiveError::Decode(DecodeError::NotUtf8)));
    let long = ToWorker::Refused("x".repeat(MAX_TEXT_BYTES + 1)).to_bytes();
    assert!(matches!(refused(&long), ReceiveError::Text(bytes) if bytes == MAX_TEXT_BYTES + 1));
    assert!(matches!(refused(&vec![1; MAX_MESSAGE_BYTES + 1]), ReceiveError::TooLong));
    assert!(matches!(refused(&[]), ReceiveError::Closed), "an empty datagram looks like the end");
    throw(&hostile, &ToWorker::Closing.to_bytes(), &[]);
    assert!(matches!(worker.receive(), Ok(Some((ToWorker::Closing, _)))), "one datagram spoils no other");
}

#[test]
fn descriptors_that_no_message_calls_for_are_closed() {
    let mapped = FromWorker::AdapterMapped(1).to_bytes();
    for count in [1, 2, 3, 4, 16] {
        let (hostile, executor) = hostile_worker();
        let (reader, writer) = telltale();
        throw(&hostile, &mapped, &vec![writer.as_fd(); count]);
        drop(writer);
        let refused = executor.receive();
        match count {
            16 => assert!(matches!(refused, Err(ReceiveError::Control)), "{refused:?}"),
            got => assert!(
                matches!(refused, Err(ReceiveError::Descriptors { wanted: 0, got: came }) if came == got),
                "{refused:?}"
            ),
        }
        assert!(is_closed(&reader), "{count} descriptors stay open");
    }
}

#[test]
fn descriptors_that_come_with_garbage_or_with_the_end_are_closed() {
    let long = vec![0; MAX_MESSAGE_BYTES + 1];
    for bytes in [&[200][..], &[], &long, &[4, 4]] {
        let (hostile, worker) = hostile_executor();
        let (reader, writer) = telltale();
        throw(&hostile, bytes, &[writer.as_fd()]);
        drop(writer);
        assert!(worker.receive().is_err());
        assert!(is_closed(&reader), "{} bytes", bytes.len());
    }
}

#[test]
fn a_message_without_its_descriptors_is_refused() {
    let seated = SlotGranted { seat: 0, worker: 1, control_bytes: 64, x_bytes: 64, sums_bytes: 64 };
    for (message, given) in [(offered(), 0), (offered(), 2), (ToWorker::Seated(seated), 2)] {
        let (hostile, worker) = hostile_executor();
        let (reader, writer) = telltale();
        throw(&hostile, &message.to_bytes(), &vec![writer.as_fd(); given]);
        drop(writer);
        let refused = worker.receive();
        let wanted = message.descriptors();
        assert!(
            matches!(refused, Err(ReceiveError::Descriptors { wanted: w, got }) if (w, got) == (wanted, given)),
            "{refused:?}"
        );
        assert!(is_closed(&reader));
    }
}

#[test]
fn what_is_handed_over_instead_of_an_image_is_refused_when_it_is_mapped() {
    let (hostile, worker) = hostile_executor();
    let handed = |fd: BorrowedFd<'_>| {
        throw(&hostile, &offered().to_bytes(), &[fd]);
        let Ok(Some((_, mut fds))) = worker.receive() else { panic!("one descriptor came with it") };
        Image::map(fds.remove(0), 1 << 20).unwrap_err()
    };
    let (_reader, pipe) = telltale();
    assert!(matches!(handed(pipe.as_fd()), ImageError::Region(RegionError::NotMemory(_))));
    let unsealed = rustix::fs::memfd_create("unsealed", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&unsealed, 4096).unwrap();
    assert!(matches!(handed(unsealed.as_fd()), ImageError::Region(RegionError::Unsealed(_))));
    let region = Region::create("test-region", 4096, PeerAccess::ReadOnly).unwrap();
    assert!(matches!(handed(region.fd()), ImageError::Region(RegionError::Unsealed(_))));
}

fn place() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::Builder::new().permissions(Permissions::from_mode(0o700)).tempdir().unwrap();
    let path = directory.path().join("workers.sock");
    (directory, path)
}

fn accept(listener: &BoardListener) -> Accepted {
    let end = Instant::now() + Duration::from_secs(60);
    while Instant::now() < end {
        if let Some(accepted) = listener.accept().unwrap() {
            return accepted;
        }
        thread::sleep(Duration::from_millis(1));
    }
    panic!("nobody calls");
}

#[test]
fn a_listener_knows_who_calls_and_never_waits() {
    let (_directory, path) = place();
    assert!(matches!(connect(&path), Err(ConnectError::Absent(_))));
    let listener = BoardListener::bind(&path).unwrap();
    assert!(listener.accept().unwrap().is_none());
    let worker = connect(&path).unwrap();
    let Accepted { connection, pid } = accept(&listener);
    assert_eq!(pid, std::process::id());
    assert!(matches!(connection.receive(), Ok(None)), "the executor's end does not block");
    worker.send(&FromWorker::Hello(WorkerHello::new(1, 0)), &[]).unwrap();
    assert!(matches!(connection.receive(), Ok(Some((FromWorker::Hello(_), _)))));
    for fd in [listener.as_fd(), connection.as_fd(), worker.as_fd()] {
        assert!(rustix::io::fcntl_getfd(fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    }
    drop(listener);
    assert!(!path.exists());
    assert!(matches!(connect(&path), Err(ConnectError::Absent(_))));
}

#[test]
fn a_worker_waits_for_a_message_and_can_be_woken_to_end() {
    let (_directory, path) = place();
    let listener = BoardListener::bind(&path).unwrap();
    let worker = Arc::new(connect(&path).unwrap());
    let Accepted { connection, .. } = accept(&listener);
    let receiver = thread::spawn({
        let worker = Arc::clone(&worker);
        move || (worker.receive(), worker.receive())
    });
    connection.send(&ToWorker::AdapterWithdrawn(4), &[]).unwrap();
    while !receiver.is_finished() {
        worker.shut_down();
        thread::sleep(Duration::from_millis(1));
    }
    let (first, second) = receiver.join().unwrap();
    // The wake-up may come before the message was read.
    assert!(
        matches!(first, Ok(Some((ToWorker::AdapterWithdrawn(4), _))) | Err(ReceiveError::Closed)),
        "{first:?}"
    );
    assert!(matches!(second, Err(ReceiveError::Closed)), "{second:?}");
}

#[test]
fn the_socket_is_in_a_directory_of_our_own_and_replaces_only_a_dead_one() {
    let (directory, path) = place();
    let _first = BoardListener::bind(&path).unwrap();
    assert!(matches!(BoardListener::bind(&path), Err(ListenError::InUse(_))));
    assert!(connect(&path).is_ok(), "the living one is still there");

    let dead = directory.path().join("dead.sock");
    drop(UnixListener::bind(&dead).unwrap());
    let replaced = BoardListener::bind(&dead).unwrap();
    assert!(connect(&dead).is_ok());
    fs::remove_file(&dead).unwrap();
    fs::write(&dead, "somebody else's").unwrap();
    drop(replaced);
    assert!(dead.exists(), "only its own file is removed");
    assert!(matches!(BoardListener::bind(&dead), Err(ListenError::NotASocket(_))));

    let other = directory.path().join("stream.sock");
    let _stream = UnixListener::bind(&other).unwrap();
    assert!(
        matches!(BoardListener::bind(&other), Err(ListenError::InUse(_))),
        "another kind of socket is alive"
    );

    for path in [PathBuf::from("/"), directory.path().join("x".repeat(120))] {
        assert!(matches!(BoardListener::bind(&path), Err(ListenError::Path(_))), "{path:?}");
    }
    fs::set_permissions(directory.path(), Permissions::from_mode(0o750)).unwrap();
    assert!(matches!(
        BoardListener::bind(&directory.path().join("open.sock")),
        Err(ListenError::DirectoryOpen(_))
    ));
}

fn to_worker() -> impl Strategy<Value = ToWorker> {
    prop_oneof![
        (any::<u16>(), any::<u32>(), any::<[u64; 3]>()).prop_map(|(seat, worker, bytes)| {
            let [control_bytes, x_bytes, sums_bytes] = bytes;
            ToWorker::Seated(SlotGranted { seat, worker, control_bytes, x_bytes, sums_bytes })
        }),
        ".{0,200}".prop_map(ToWorker::Refused),
        any::<[u64; 2]>()
            .prop_map(|[image, bytes]| ToWorker::AdapterOffered(AdapterOffered { image, bytes })),
        any::<u64>().prop_map(ToWorker::AdapterWithdrawn),
        Just(ToWorker::Closing),
    ]
}

fn from_worker() -> impl Strategy<Value = FromWorker> {
    prop_oneof![
        (any::<[u32; 2]>(), any::<[u64; 2]>()).prop_map(|([version, core], [layout_hash, instance])| {
            FromWorker::Hello(WorkerHello { version, layout_hash, instance, core })
        }),
        any::<u64>().prop_map(FromWorker::AdapterMapped),
        (any::<u64>(), ".{0,200}")
            .prop_map(|(image, reason)| FromWorker::AdapterRejected(AdapterRejected { image, reason })),
    ]
}

proptest! {
    #[test]
    fn messages_arrive_as_they_were_sent_and_in_order(
        to in prop::collection::vec(to_worker(), 1..8),
        from in prop::collection::vec(from_worker(), 1..8),
    ) {
        let (executor, worker) = ends();
        let image = image();
        for message in &to {
            executor.send(message, &vec![image.fd(); message.descriptors()]).unwrap();
        }
        for message in &from {
            worker.send(message, &[]).unwrap();
        }
        for message in to {
            let (received, fds) = worker.receive().unwrap().unwrap();
            prop_assert_eq!(fds.len(), message.descriptors());
            prop_assert_eq!(received, message);
        }
        for message in from {
            prop_assert_eq!(executor.receive().unwrap().unwrap().0, message);
        }
    }

    #[test]
    fn arbitrary_datagrams_are_messages_or_errors(bytes in prop::collection::vec(any::<u8>(), 1..300)) {
        let (hostile, executor) = hostile_worker();
        throw(&hostile, &bytes, &[]);
        match executor.receive() {
            Ok(message) => prop_assert_eq!(message.unwrap().0.to_bytes(), bytes),
            Err(error) => prop_assert!(matches!(error, ReceiveError::Decode(_)), "{}", error),
        }
    }
}

#[test]
fn the_document_gives_each_message_the_descriptors_it_has() {
    let document = include_str!("../../docs/PROTOCOL.md");
    let seated = SlotGranted { seat: 0, worker: 0, control_bytes: 0, x_bytes: 0, sums_bytes: 0 };
    let offer = AdapterOffered { image: 0, bytes: 0 };
    let rejected = AdapterRejected { image: 0, reason: String::new() };
    let rows = [
        (ToWorker::Seated(seated).descriptors(), "| 0 | `Seated` |"),
        (ToWorker::Refused(String::new()).descriptors(), "| 1 | `Refused` |"),
        (ToWorker::AdapterOffered(offer).descriptors(), "| 2 | `AdapterOffered` |"),
        (ToWorker::AdapterWithdrawn(0).descriptors(), "| 3 | `AdapterWithdrawn` |"),
        (ToWorker::Closing.descriptors(), "| 4 | `Closing` |"),
        (FromWorker::Hello(WorkerHello::new(0, 0)).descriptors(), "| 0 | `Hello` |"),
        (FromWorker::AdapterMapped(0).descriptors(), "| 1 | `AdapterMapped` |"),
        (FromWorker::AdapterRejected(rejected).descriptors(), "| 2 | `AdapterRejected` |"),
    ];
    let (_, handover) = document.split_once("## Handover").expect("the section");
    for (descriptors, row) in rows {
        assert!(handover.contains(&format!("{row} {descriptors} |")), "{row}");
    }
}
