//! Moves frames between registered buffers: streams over TCP or shared memory, and the memory they read and write.
//!
//! Everything is non-blocking and meant for single-threaded event loops: a hub core, a worker's I/O thread. A [`Poller`]
//! says which [`Stream`]s are ready; [`Stream::receive`] hands whole frames to a [`FrameSink`], straight from a
//! [`Scratch`] shared by the thread's streams or straight into the slice the sink names; [`Stream::send`] writes frames
//! from wherever their payloads lie. Nothing is allocated and nothing is locked per frame.
//!
//! [`TcpStream`] joins any two hosts, [`ShmStream`] two processes of one; a [`Connection`] is either. With an arena
//! ([`shm`]) tensors lie where both ends reach them, only headers pass through the stream, and the sink is told with
//! [`FrameSink::placed`].
//!
//! [`SendRegion`] and [`ReceiveRegion`] are the user's tensors while an I/O thread owns them; [`socket`] makes the
//! connections and carries their handshake; [`handshakes`] bounds those that have proved nothing; [`interface`] knows which of this host's network interfaces they can take.

mod assembly;
mod connection;
pub mod handshakes;
mod host;
pub mod interface;
mod memory;
mod poll;
pub mod shm;
pub mod socket;
mod stream;
mod tcp;

pub use connection::Connection;
pub use host::host_identity;
pub use memory::{Home, Lending, ReceiveRegion, Returning, SendRegion, StableBytes, lend};
pub use poll::{Event, Events, Interest, Poller, Waker};
pub use shm::ShmStream;
pub use socket::SAME_HOST_SEND_BYTES;
pub use stream::{
    FrameSink, Landing, Outgoing, ReceiveError, Received, SCRATCH_BYTES_DEFAULT, Scratch, Sent, Stream,
    StreamError,
};
pub use tcp::{ReceiveMode, TcpStream};
