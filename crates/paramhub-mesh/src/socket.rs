//! The connection to a peer, in clear or encrypted.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use paramhub_transport::encryption::Encryption;
use paramhub_trust::StreamKeys;

use crate::wire::{HEADER_BYTES, PIECE_BYTES};

/// A connection whose handshake is over.
#[derive(Debug)]
pub(crate) struct PeerSocket {
    /// Shared for the time in which what was read from it is handled, which needs the peer.
    pub(crate) socket: Arc<OwnedFd>,
    /// Present if what the connection carries is encrypted.
    pub(crate) encryption: Option<Box<Encryption>>,
}

impl PeerSocket {
    pub(crate) fn new(socket: OwnedFd, keys: Option<&StreamKeys>) -> PeerSocket {
        let encryption = keys.map(|keys| Box::new(Encryption::new(keys, HEADER_BYTES + PIECE_BYTES)));
        PeerSocket { socket: Arc::new(socket), encryption }
    }

    /// Sends a few bytes: a connection without traffic has room for them.
    pub(crate) fn send_few(&mut self, bytes: &[u8]) -> io::Result<()> {
        let is_sent = match &mut self.encryption {
            None => paramhub_transport::encryption::write(&self.socket, bytes)? == bytes.len(),
            Some(encryption) => {
                let taken = encryption.send(&self.socket, std::iter::once((bytes, &[][..])))?;
                taken == 1 && !encryption.has_unsent()
            }
        };
        if is_sent { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    /// Reads on until the peer's next few bytes are here, which it has sent in one; `false` if not all have come. Of what
    /// follows nothing is read. `filled` is how many are here.
    pub(crate) fn receive_few(&mut self, bytes: &mut [u8], filled: &mut usize) -> io::Result<bool> {
        match &mut self.encryption {
            None => {
                while *filled < bytes.len() {
                    match rustix::io::read(&self.socket, &mut bytes[*filled..]) {
                        Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                        Ok(read) => *filled += read,
                        Err(rustix::io::Errno::INTR) => {}
                        Err(rustix::io::Errno::AGAIN) => return Ok(false),
                        Err(errno) => return Err(errno.into()),
                    }
                }
                Ok(true)
            }
            Some(encryption) => encryption.receive_one(&self.socket, bytes),
        }
    }
}

impl From<OwnedFd> for PeerSocket {
    fn from(socket: OwnedFd) -> PeerSocket {
        PeerSocket::new(socket, None)
    }
}

impl AsFd for PeerSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
