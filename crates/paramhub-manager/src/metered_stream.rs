//! The bytes of a connection. Those of unauthenticated callers are counted, and the system's buffers are
//! small until a caller has proved something.

use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use crate::connection_slots::ConnectionSlot;

/// Bytes that the system buffers for an unauthenticated caller each way. They take twice as much memory.
pub(crate) const UNAUTHENTICATED_BUFFER: usize = 8 << 10;
/// Bytes that the system buffers for a caller that has proved something.
const PROVEN_BUFFER: usize = 1 << 20;

/// One connection.
pub(crate) struct MeteredStream {
    stream: TcpStream,
    slot: Arc<ConnectionSlot>,
    is_wide: bool,
}

impl MeteredStream {
    pub(crate) fn new(stream: TcpStream, slot: Arc<ConnectionSlot>) -> Self {
        MeteredStream { stream, slot, is_wide: false }
    }

    pub(crate) fn into_stream(self) -> TcpStream {
        self.stream
    }

    /// Gives a caller that has proved something buffers for a key table or a plan. If that fails, the
    /// connection is only slower.
    fn widen(&mut self) {
        if !self.is_wide && self.slot.is_proven() {
            self.is_wide = true;
            let socket = SockRef::from(&self.stream);
            let _ = socket.set_recv_buffer_size(PROVEN_BUFFER);
            let _ = socket.set_send_buffer_size(PROVEN_BUFFER);
        }
    }
}

impl AsyncRead for MeteredStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context, buffer: &mut ReadBuf) -> Poll<Result<()>> {
        self.widen();
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        let counted = self.slot.count_bytes(buffer.filled().len() - before);
        Poll::Ready(counted.map_err(|_| Error::from(ErrorKind::ConnectionAborted)))
    }
}

impl AsyncWrite for MeteredStream {
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
