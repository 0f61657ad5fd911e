//! Frames between processes of one host, through memory they share.
//!
//! A [`Segment`] is such memory: one holds a worker's tensors (its arena), and each stream has one for its
//! two rings. A [`ShmStream`] keeps the promises of every stream: its rings carry frames as TCP would. If
//! both ends have an arena, tensors stay there and only headers travel. A Unix socket wakes a sleeping
//! process and shows each side when the other dies; it also carried the descriptors of both segments
//! ([`send_segments`], [`receive_segments`]).
//!
//! Nothing that the other process writes is trusted: positions in a ring are checked against bounds kept
//! here, bytes are copied before they are used, and a segment is refused unless its size is sealed, since a
//! read beyond the end of a file that has shrunk would kill the reader.

mod doorbell;
mod passing;
mod ring;
mod segment;
mod stream;
mod tensor;

pub use doorbell::Doorbell;
pub use passing::{connect, receive_segments, send_segments};
pub use ring::RING_BYTES_DEFAULT;
pub use segment::Segment;
pub use stream::{ShmStream, create_rings, rings_bytes};
pub use tensor::{Arena, SharedTensor, Tensor};
