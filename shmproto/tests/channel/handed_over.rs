//! Setup of a channel between executor and client: the socket, control messages, and the region's descriptor.

use std::{
    fs::Permissions,
    os::unix::fs::PermissionsExt as _,
    thread,
    time::{Duration, Instant},
};

use shmproto::{
    channel::{ClientChannel, ExecutorChannel, Geometry, LAYOUT_HASH},
    fd_passing::{ConnectedPeer, ReceiveError, SendError},
    layer::{
        Dtype, LAYER_VERSION,
        control::{ChannelReady, ClientEnd, FromLayers, LayersEnd, LayersListener, SessionOpen, ToLayers},
    },
};

use super::{GEOMETRY, LONG, WATCHDOG, call, serve};

fn open() -> SessionOpen {
    SessionOpen {
        version: LAYER_VERSION,
        layout_hash: LAYOUT_HASH,
        key: String::new(),
        name: "test".to_owned(),
        masking: "off".to_owned(),
        session: 0,
    }
}

fn accept(listener: &LayersListener) -> LayersEnd {
    let end = Instant::now() + WATCHDOG;
    while Instant::now() < end {
        if let Some(ConnectedPeer { connection, .. }) = listener.accept().unwrap() {
            return connection;
        }
        thread::sleep(Duration::from_millis(1));
    }
    panic!("nobody calls");
}

fn next(connection: &LayersEnd) -> ToLayers {
    let end = Instant::now() + WATCHDOG;
    while Instant::now() < end {
        if let Some((message, _)) = connection.receive().unwrap() {
            return message;
        }
        thread::sleep(Duration::from_millis(1));
    }
    panic!("nothing comes");
}

fn ready(channel: &ExecutorChannel) -> FromLayers {
    let Geometry { slab_bytes, depth } = channel.geometry();
    FromLayers::ChannelReady(ChannelReady { region_bytes: channel.region_bytes(), slab_bytes, depth })
}

#[test]
fn a_client_is_handed_its_channel_and_calls_over_it() {
    let directory = tempfile::Builder::new().permissions(Permissions::from_mode(0o700)).tempdir().unwrap();
    let path = directory.path().join("layers.sock");
    let listener = LayersListener::bind(&path).unwrap();
    let executor = thread::spawn(move || {
        let connection = accept(&listener);
        assert_eq!(next(&connection), ToLayers::Open(open()));
        let ToLayers::Channel(bytes) = next(&connection) else { panic!("a slab was asked for") };
        let mut channel = ExecutorChannel::create(Geometry::rounded(bytes, 4).unwrap()).unwrap();
        let bare = connection.send(&ready(&channel), &[]);
        assert!(matches!(bare, Err(SendError::Descriptors { wanted: 1, given: 0 })), "{bare:?}");
        connection.send(&ready(&channel), &[channel.fd().unwrap()]).unwrap();
        serve(&mut channel, 6, Duration::ZERO);
        assert_eq!(next(&connection), ToLayers::Close);
        connection
    });
    let client = ClientEnd::to(&path).unwrap();
    client.send(&ToLayers::Open(open()), &[]).unwrap();
    client.send(&ToLayers::Channel(GEOMETRY.slab_bytes), &[]).unwrap();
    let (message, mut fds) = client.receive().unwrap().unwrap();
    let FromLayers::ChannelReady(ChannelReady { region_bytes, slab_bytes, depth }) = message else {
        panic!("{message:?}")
    };
    let mut channel =
        ClientChannel::join(fds.remove(0), region_bytes, Geometry { slab_bytes, depth }).unwrap();
    channel.write_rows(128, Dtype::F32, &[1.5; 6]).unwrap();
    channel.submit(&call(1)).unwrap();
    assert_eq!(channel.wait(Duration::ZERO, LONG).unwrap().expect("a reply").sequence, 1);
    let mut rows = [0.0; 6];
    channel.read_rows(1024, Dtype::F32, &mut rows).unwrap();
    assert_eq!(rows, [3.0; 6]);
    channel.submit(&call(0)).unwrap();
    client.send(&ToLayers::Close, &[]).unwrap();
    drop(executor.join().unwrap());
    assert!(matches!(client.receive(), Err(ReceiveError::Closed)));
}
