//! Frames between processes of one host, through memory they share.
//!
//! A [`Segment`] is such memory; one holds a worker's tensors (its arena), one each stream's two rings. A [`ShmStream`]
//! keeps the promises of every stream: its rings carry frames as TCP would. Where both ends have an arena, tensors
//! stay there and only headers travel. A Unix socket wakes whoever sleeps and tells each side when the other dies; over it
//! the descriptors of both segments came ([`send_segments`], [`receive_segments`]).
//!
//! Nothing the other process writes is trusted: positions in a ring are compared with bounds kept here, bytes are copied
//! before they are looked at, and a segment is refused unless its size is sealed, since reading beyond the end of a file
//! that has shrunk would kill the reader.

mod bell;
mod passing;
mod ring;
mod segment;
mod stream;
mod tensor;

pub use bell::Bell;
pub use passing::{connect, receive_segments, send_segments};
pub use ring::RING_BYTES_DEFAULT;
pub use segment::Segment;
pub use stream::{ShmStream, create_rings, rings_bytes};
pub use tensor::{Arena, SharedTensor, Tensor};
