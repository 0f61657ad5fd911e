//! Moves frames between registered buffers: streams over TCP or shared memory, and the memory they read and write.
//!
//! Everything is non-blocking and meant for single-threaded event loops: a hub core, a worker's I/O thread. A
//! [`Poller`] reports which [`Stream`]s are ready. [`Stream::receive`] passes whole frames to a
//! [`FrameSink`], either from a [`Scratch`] that the thread's streams share, or straight into the slice that
//! the sink names. [`Stream::send`] writes frames from the memory of their payloads. There is no allocation
//! and no lock per frame.
//!
//! [`TcpStream`] connects any two hosts, [`ShmStream`] two processes of one host; a [`Connection`] is either.
//! With an arena ([`shm`]), tensors are in memory that both ends reach, only headers pass through the stream,
//! and the sink receives them through [`FrameSink::placed`].
//!
//! [`SendRegion`] and [`ReceiveRegion`] are the user's tensors while an I/O thread owns them. [`socket`] and
//! [`dialling`] make the connections, [`greeting`] carries their handshake, and [`handshakes`] bounds the
//! connections that have proved nothing; [`interface`] lists this host's network interfaces that they can use.
//! [`runtime`] is what an I/O thread and its callers share, [`measuring`] what measurements of a network need.

mod assembly;
mod connection;
pub mod dialling;
pub mod encryption;
pub mod greeting;
pub mod handshakes;
mod host;
pub mod interface;
pub mod measuring;
mod memory;
mod poll;
pub mod runtime;
pub mod shm;
pub mod socket;
mod stream;
mod tcp;
mod unsent_limit;

pub use connection::Connection;
pub use host::host_identity;
pub use memory::{BufferSlot, LendScope, LoanedBuffer, ReceiveRegion, SendRegion, StableBytes, lend};
pub use poll::{Event, Events, Interest, Poller, Waker};
pub use shm::ShmStream;
pub use socket::SAME_HOST_SEND_BYTES;
pub use stream::{
    FrameSink, Landing, Outgoing, ReceiveError, Received, SCRATCH_BYTES_DEFAULT, Scratch, Sent, Stream,
    StreamError,
};
pub use tcp::{ReceiveMode, TcpStream, WRITE_BYTES_MAX};
