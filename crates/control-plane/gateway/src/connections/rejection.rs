//! A stream that adds a message to the HTTP library's own error answers.
//!
//! Input that is no valid request never reaches a route: the HTTP library answers it with a bare status. The
//! stream replaces such an answer by one with the JSON error that all failures have.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Statuses of the library's own answers, with error code and message.
const WORDS: [(&str, &str, &str); 3] = [
    (
        "400 Bad Request",
        "invalid_request",
        "this is not an HTTP request; check the request line and the header",
    ),
    ("414 URI Too Long", "uri_too_long", "the path of the request is too long"),
    (
        "431 Request Header Fields Too Large",
        "header_too_large",
        "the request's header is longer than 16 KiB or has more than 64 fields; send a shorter one",
    ),
];

#[derive(Debug)]
pub(super) struct RejectionStream<T> {
    inner: T,
    /// Unwritten rest of a replaced answer, and the length of the library's answer that it replaces.
    exchanged: Option<(Vec<u8>, usize)>,
}

impl<T> RejectionStream<T> {
    pub(super) fn new(inner: T) -> Self {
        Self { inner, exchanged: None }
    }
}

/// Returns the replacement for `answer`, if that is the library's own.
fn exchange(answer: &[u8]) -> Option<Vec<u8>> {
    let rest = answer.strip_prefix(b"HTTP/1.1 ")?;
    let (status, code, message) = WORDS.iter().find(|(status, ..)| rest.starts_with(status.as_bytes()))?;
    let head = std::str::from_utf8(answer).ok()?;
    if !(head.ends_with("\r\n\r\n") && head.contains("\r\ncontent-length: 0\r\n")) {
        return None;
    }
    let body = format!(
        r#"{{"error":{{"message":"{message}","type":"invalid_request_error","param":null,"code":"{code}"}}}}"#
    );
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    Some([head, body].concat().into_bytes())
}

impl<T: AsyncRead + Unpin> AsyncRead for RejectionStream<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for RejectionStream<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.exchanged.is_none() {
            match exchange(buf) {
                Some(answer) => self.exchanged = Some((answer, buf.len())),
                None => return Pin::new(&mut self.inner).poll_write(cx, buf),
            }
        }
        let Self { inner, exchanged } = &mut *self;
        let Some((left, stands_for)) = exchanged else { return Poll::Ready(Ok(0)) };
        while !left.is_empty() {
            let written = ready!(Pin::new(&mut *inner).poll_write(cx, left))?;
            left.drain(..written);
        }
        let stands_for = *stands_for;
        *exchanged = None;
        Poll::Ready(Ok(stands_for))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut filled = bufs.iter().filter(|buf| !buf.is_empty());
        match (filled.next(), filled.next()) {
            // An answer without a body is written in one piece.
            (Some(alone), None) => self.poll_write(cx, alone),
            _ => Pin::new(&mut self.inner).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    async fn said(answer: &str) -> String {
        let (near, mut far) = duplex(7);
        let answer = answer.to_owned();
        let writer =
            tokio::spawn(async move { RejectionStream::new(near).write_all(answer.as_bytes()).await });
        let mut said = String::new();
        far.read_to_string(&mut said).await.unwrap();
        writer.await.unwrap().unwrap();
        said
    }

    #[tokio::test]
    async fn an_answer_without_a_word_gets_one() {
        let bare = "HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\ndate: now\r\n\r\n";
        let said = said(bare).await;
        let (head, body) = said.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}", body.len())), "{said}");
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(body["error"]["code"], "header_too_large");
    }

    #[tokio::test]
    async fn every_other_answer_goes_through_as_it_is() {
        for answer in [
            "HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n{}",
            "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
            "data: HTTP/1.1 431\n\n",
        ] {
            assert_eq!(said(answer).await, answer);
        }
    }
}
