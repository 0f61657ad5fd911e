//! A connection's bytes: those of strangers are counted, and buffers in the system are small until a caller has proved
//! something.

use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use crate::places::Guest;

/// Bytes that the system keeps for a stranger each way; it takes twice as many of memory.
pub(crate) const STRANGER_BUFFER: usize = 8 << 10;
/// Bytes that the system keeps for a caller who has proved something.
const PROVEN_BUFFER: usize = 1 << 20;

/// One connection.
pub(crate) struct Line {
    stream: TcpStream,
    guest: Arc<Guest>,
    is_wide: bool,
}

impl Line {
    pub(crate) fn new(stream: TcpStream, guest: Arc<Guest>) -> Self {
        Line { stream, guest, is_wide: false }
    }

    pub(crate) fn into_stream(self) -> TcpStream {
        self.stream
    }

    /// Gives a caller who has proved something buffers for a key table or a plan. Without them it is only slower.
    fn widen(&mut self) {
        if !self.is_wide && self.guest.is_proven() {
            self.is_wide = true;
            let socket = SockRef::from(&self.stream);
            let _ = socket.set_recv_buffer_size(PROVEN_BUFFER);
            let _ = socket.set_send_buffer_size(PROVEN_BUFFER);
        }
    }
}

impl AsyncRead for Line {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context, buffer: &mut ReadBuf) -> Poll<Result<()>> {
        self.widen();
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        let counted = self.guest.hold(buffer.filled().len() - before);
        Poll::Ready(counted.map_err(|_| Error::from(ErrorKind::ConnectionAborted)))
    }
}

impl AsyncWrite for Line {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context, bytes: &[u8]) -> Poll<Result<usize>> {
        self.widen();
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context,
        slices: &[IoSlice],
    ) -> Poll<Result<usize>> {
        self.widen();
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
