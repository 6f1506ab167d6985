//! A stream with a time limit for clients that read nothing, or too slowly.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep},
};

use crate::slow_peer_timeout::PeerTimeBudget;

/// Minimum rate of a client, in bytes per second. The unread part of an answer stays in memory meanwhile.
const LEAST_BYTES_PER_S: u64 = 4 << 10;

/// A stream whose writes fail when its client lags behind [`LEAST_BYTES_PER_S`]; see [`PeerTimeBudget`].
#[derive(Debug)]
pub(super) struct WriteTimeout<T> {
    inner: T,
    budget: PeerTimeBudget,
    waiting: Option<WriteWait>,
}

#[derive(Debug)]
struct WriteWait {
    since: Instant,
    deadline: Pin<Box<Sleep>>,
}

impl<T> WriteTimeout<T> {
    pub(super) fn new(inner: T, timeout: Duration) -> Self {
        Self { inner, budget: PeerTimeBudget::new(timeout, LEAST_BYTES_PER_S), waiting: None }
    }

    /// Fails a pending write when the client's time budget is used up; `bytes` returns the length of a
    /// completed write.
    fn limit<R>(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<R>>,
        bytes: fn(&R) -> usize,
    ) -> Poll<io::Result<R>> {
        if let Poll::Ready(written) = &written {
            let waited = self.waiting.take().map(|waiting| waiting.since.elapsed());
            self.budget.moved(waited.unwrap_or_default(), written.as_ref().map_or(0, bytes) as u64);
        } else {
            let begin = || WriteWait { since: Instant::now(), deadline: Box::pin(sleep(self.budget.left())) };
            ready!(self.waiting.get_or_insert_with(begin).deadline.as_mut().poll(cx));
            let message = format!(
                "the client reads slower than {LEAST_BYTES_PER_S} bytes per second for too long \
                 (--client-write-timeout-ms)"
            );
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, message)));
        }
        written
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for WriteTimeout<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for WriteTimeout<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write(cx, buf);
        self.limit(cx, written, |bytes| *bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write_vectored(cx, bufs);
        self.limit(cx, written, |bytes| *bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.inner).poll_flush(cx);
        self.limit(cx, flushed, |()| 0)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    #[tokio::test]
    async fn a_reader_who_takes_nothing_is_given_up() {
        let (near, far) = duplex(4);
        let mut stream = WriteTimeout::new(near, Duration::from_millis(20));
        let error = stream.write_all(b"more than fits").await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(far);
    }

    #[tokio::test]
    async fn a_reader_who_drips_is_given_up_although_no_pause_is_too_long() {
        let timeout = Duration::from_millis(200);
        let (near, mut far) = duplex(1);
        let mut stream = WriteTimeout::new(near, timeout);
        tokio::spawn(async move {
            while far.read_u8().await.is_ok() {
                sleep(timeout / 8).await;
            }
        });
        let error = stream.write_all(&[0; 1 << 20]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn a_slow_reader_is_waited_for_as_long_as_it_takes_something() {
        let (near, mut far) = duplex(1);
        let mut stream = WriteTimeout::new(near, Duration::from_secs(30));
        let reader = tokio::spawn(async move {
            let mut taken = Vec::new();
            far.read_to_end(&mut taken).await.map(|_| taken)
        });
        stream.write_all(b"byte by byte").await.unwrap();
        drop(stream);
        assert_eq!(reader.await.unwrap().unwrap(), b"byte by byte");
    }
}
