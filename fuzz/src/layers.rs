//! Targets of the layer service: calls, control messages, ZeroMQ's wire protocol, and a channel's whole
//! region.

use std::sync::atomic::Ordering::SeqCst;

use shmproto::{
    channel::{ClientChannel, ExecutorChannel, Geometry, Violation},
    codec::Wire,
    layer::{
        CallHeader, CallStatus, Dtype, HEADER_BYTES, ReplyHeader, RowSource,
        control::{Catalog, FromLayers, ToLayers},
        seeded_rows::{DRAW_WORDS, SeededRows},
    },
    region::{Access, Region},
    zmtp::{AcceptedMechanisms, ZmtpEvent, ZmtpLimits, ZmtpServer},
};

use crate::{Outcome, targets::refused};

pub(crate) const GEOMETRY: Geometry = Geometry { slab_bytes: 512, depth: 4 };

/// Maximum frame size in bytes that the server accepts.
pub(crate) const MAX_FRAME_BYTES: usize = 1 << 30;

fn header(input: &[u8]) -> Result<&[u8; HEADER_BYTES], String> {
    input.try_into().map_err(|_| "a header has 64 bytes".to_owned())
}

pub(crate) fn call(input: &[u8]) -> Outcome {
    let header = header(input)?;
    let call = CallHeader::from_bytes(header).map_err(refused)?;
    assert_eq!(call.to_bytes(), *header, "a call has one encoding");
    Ok(())
}

pub(crate) fn reply(input: &[u8]) -> Outcome {
    let header = header(input)?;
    let reply = ReplyHeader::from_bytes(header).map_err(refused)?;
    assert_eq!(reply.to_bytes(), *header, "a reply has one encoding");
    Ok(())
}

pub(crate) fn to_layers(input: &[u8]) -> Outcome {
    one_encoding::<ToLayers>(input)
}

pub(crate) fn from_layers(input: &[u8]) -> Outcome {
    match one_encoding::<FromLayers>(input) {
        // Data that a client builds from `Fetched` is equally untrusted.
        Err(_) if one_encoding::<Catalog>(input).is_ok() => Ok(()),
        outcome => outcome,
    }
}

fn one_encoding<T: Wire>(input: &[u8]) -> Outcome {
    let message = T::from_bytes(input).map_err(refused)?;
    assert_eq!(message.to_bytes(), input, "a message has one encoding");
    Ok(())
}

/// Reads everything that a client sends on one connection. The first byte is the number of bytes per read.
pub(crate) fn zmtp(input: &[u8]) -> Outcome {
    let Some((&step, mut rest)) = input.split_first() else { return Ok(()) };
    let mut server = ZmtpServer::new(ZmtpLimits::new(MAX_FRAME_BYTES), AcceptedMechanisms::Either);
    while !rest.is_empty() {
        let mut some = &rest[..usize::from(step).max(1).min(rest.len())];
        let before = some.len();
        server.feed(&mut some);
        assert!(some.len() < before, "there is space once everything was looked at");
        rest = &rest[before - some.len()..];
        while let Some(event) = server.next_event().map_err(refused)? {
            if let ZmtpEvent::Login(_) = event {
                server.accept();
            }
        }
        // A client that only pings must receive its answers.
        server.sent(server.outgoing().len());
    }
    Ok(())
}

/// Uses a region that begins with the input from both ends of the channel.
pub(crate) fn channel(input: &[u8]) -> Outcome {
    let made = || -> Option<(ExecutorChannel, ClientChannel, Region)> {
        let executor = ExecutorChannel::create(GEOMETRY).ok()?;
        let fd = || executor.fd()?.try_clone_to_owned().ok();
        let client = ClientChannel::join(fd()?, executor.region_bytes(), GEOMETRY).ok()?;
        let region = Region::map(fd()?, 1..=1 << 20, Access::ReadWrite).ok()?;
        Some((executor, client, region))
    };
    let Some((mut executor, mut client, region)) = made() else { panic!("no channel could be made") };
    for (word, bytes) in region.words().iter().zip(input.as_chunks::<4>().0) {
        word.store(u32::from_le_bytes(*bytes), SeqCst);
    }
    let served = serve(&mut executor);
    let collected = (0..GEOMETRY.depth).try_for_each(|_| client.try_take().map(drop));
    served.and(collected).map_err(refused)
}

/// Serves calls like the executor, at most as often as an honest ring allows.
fn serve(executor: &mut ExecutorChannel) -> Result<(), Violation> {
    let mut rows = [0.0; 16];
    for _ in 0..GEOMETRY.depth {
        let Some(call) = executor.take()? else { break };
        match call.source {
            RowSource::Rows => executor.read_rows(call.input, call.dtype, &mut rows)?,
            RowSource::Draw => {
                let mut words = [0.0; DRAW_WORDS];
                executor.read_rows(call.input, Dtype::F32, &mut words)?;
                SeededRows::from_words(&words).fill(call.rows.into(), 8, &mut rows);
            }
        }
        executor.write_rows(call.output, call.dtype, &rows)?;
        executor.reply(&ReplyHeader::refusal(&call, CallStatus::Done, 0))?;
    }
    Ok(())
}
