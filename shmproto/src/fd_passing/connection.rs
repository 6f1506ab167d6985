//! Connection in which one datagram is one message with exactly the descriptors that it requires.

use std::{
    io::{self, IoSlice, IoSliceMut},
    marker::PhantomData,
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    io::Errno,
    net::{
        self, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags,
    },
};

use super::{FdMessage, MAX_DESCRIPTORS, MAX_MESSAGE_BYTES, MAX_TEXT_BYTES};
use crate::codec::DecodeError;

/// Error of a message that was not sent.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The peer has not received earlier messages. No part of this message was sent.
    #[error("the peer does not take its messages: try again later, or give it up")]
    Full,
    /// The peer closed the connection.
    #[error("the peer closed the connection: forget it")]
    Closed,
    /// The caller gave another number of descriptors than the message requires.
    #[error(
        "the message calls for {wanted} descriptors, and {given} were given: this is a fault of this program"
    )]
    Descriptors {
        /// Number of descriptors that the message requires.
        wanted: usize,
        /// Number of descriptors that were given.
        given: usize,
    },
    /// The message exceeds the size limit; holds its size in bytes.
    #[error("the message has {0} bytes, and at most {MAX_MESSAGE_BYTES} are sent: shorten its text")]
    TooLong(usize),
    /// The operating system refused to send.
    #[error("the message cannot be sent ({0}): close the connection")]
    System(#[source] io::Error),
}

/// Error of a received message. After every error but `System` the caller must close the connection.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    /// The peer closed the connection, or its process ended.
    #[error("the peer closed the connection: forget it")]
    Closed,
    /// The datagram was longer than any message.
    #[error("the peer sent more than {MAX_MESSAGE_BYTES} bytes at once: close the connection")]
    TooLong,
    /// Descriptors are missing, because more came than any message has, or this process may open no more.
    #[error(
        "not all descriptors of a message arrived: close the connection, or raise the limit of open files"
    )]
    Control,
    /// The bytes do not encode a message.
    #[error("the peer sent what is no message ({0}): close the connection")]
    Decode(#[from] DecodeError),
    /// The number of received descriptors is not the one that the message requires.
    #[error("a message that calls for {wanted} descriptors came with {got}: close the connection")]
    Descriptors {
        /// Number of descriptors that the message requires.
        wanted: usize,
        /// Number of descriptors that came.
        got: usize,
    },
    /// A text of the message is too long; holds its size in bytes.
    #[error("the peer sent a text of {0} bytes, above {MAX_TEXT_BYTES}: close the connection")]
    Text(usize),
    /// The operating system refused to receive.
    #[error("nothing can be received ({0}): close the connection")]
    System(#[source] io::Error),
}

/// Connection that sends `S` and receives `R`, closed when dropped. Two threads may send and receive at once.
#[derive(Debug)]
pub struct Connection<S, R> {
    socket: OwnedFd,
    messages: PhantomData<fn(S) -> R>,
}

impl<S: FdMessage, R: FdMessage> Connection<S, R> {
    /// Uses a `SOCK_SEQPACKET` socket. The socket's own flag decides whether calls block.
    #[must_use]
    pub fn over(socket: OwnedFd) -> Self {
        Self { socket, messages: PhantomData }
    }

    /// Sends `message` and copies of `descriptors`, all or nothing.
    ///
    /// # Errors
    /// On a non-blocking socket, returns [`SendError::Full`] if the peer does not receive its messages.
    pub fn send(&self, message: &S, descriptors: &[BorrowedFd<'_>]) -> Result<(), SendError> {
        let wanted = message.descriptors();
        if wanted != descriptors.len() {
            return Err(SendError::Descriptors { wanted, given: descriptors.len() });
        }
        let bytes = message.to_bytes();
        if bytes.len() > MAX_MESSAGE_BYTES || message.text_bytes() > MAX_TEXT_BYTES {
            return Err(SendError::TooLong(bytes.len()));
        }
        match send(self.socket.as_fd(), &bytes, descriptors) {
            Ok(()) => Ok(()),
            // TOOMANYREFS: this user has too many descriptors in sockets whose peers do not receive.
            Err(Errno::AGAIN | Errno::NOBUFS | Errno::TOOMANYREFS) => Err(SendError::Full),
            Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => Err(SendError::Closed),
            Err(errno) => Err(SendError::System(errno.into())),
        }
    }

    /// Receives the next message and its descriptors, which child processes do not inherit. `None` if the
    /// socket is non-blocking and no message waits. Descriptors of an invalid message are closed.
    ///
    /// # Errors
    /// Returns a [`ReceiveError`] if the peer is gone or violates the protocol.
    pub fn receive(&self) -> Result<Option<(R, Vec<OwnedFd>)>, ReceiveError> {
        let mut buffer = vec![0; MAX_MESSAGE_BYTES];
        let (bytes, descriptors) = match receive(self.socket.as_fd(), &mut buffer) {
            Ok(received) => received?,
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::CONNRESET | Errno::NOTCONN) => return Err(ReceiveError::Closed),
            Err(errno) => return Err(ReceiveError::System(errno.into())),
        };
        let message = R::from_bytes(bytes)?;
        match message.text_bytes() {
            ..=MAX_TEXT_BYTES => {}
            bytes => return Err(ReceiveError::Text(bytes)),
        }
        let (wanted, got) = (message.descriptors(), descriptors.len());
        if wanted == got {
            Ok(Some((message, descriptors)))
        } else {
            Err(ReceiveError::Descriptors { wanted, got })
        }
    }

    /// Ends the connection for both sides: a thread that waits in [`Connection::receive`] returns.
    pub fn shut_down(&self) {
        // The call fails only if the peer is gone, and then the connection has ended already.
        let _ = net::shutdown(&self.socket, net::Shutdown::Both);
    }
}

impl<S, R> AsFd for Connection<S, R> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn send(socket: BorrowedFd<'_>, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    rustix::io::retry_on_intr(|| {
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(Errno::INVAL);
        }
        // A datagram is sent completely or not at all.
        net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).map(drop)
    })
}

type Datagram<'a> = Result<(&'a [u8], Vec<OwnedFd>), ReceiveError>;

fn receive<'a>(socket: BorrowedFd<'_>, buffer: &'a mut [u8]) -> rustix::io::Result<Datagram<'a>> {
    // The buffer has capacity for one descriptor more than any message has, so that one too many is detected.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS + 1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::io::retry_on_intr(|| {
        net::recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    // Descriptors are collected before any check, so that dropping them closes them.
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    Ok(if received.flags.contains(ReturnFlags::CTRUNC) {
        Err(ReceiveError::Control)
    } else if received.flags.contains(ReturnFlags::TRUNC) {
        Err(ReceiveError::TooLong)
    } else if received.bytes == 0 {
        Err(ReceiveError::Closed)
    } else {
        Ok((&buffer[..received.bytes], descriptors))
    })
}
