//! The requirements on every transport, written against the [`Stream`] trait: `conformance!(MyTransport)`
//! makes the tests.

mod sink;
mod suite;

use paramhub_core::wire::{Direction, Header};
use paramhub_transport::{Outgoing, ReceiveMode, Stream};

pub(crate) use sink::{Collector, Policy, Refused};
pub(crate) use suite::*;

/// Makes connections to test.
pub(crate) trait Transport {
    type Stream: Stream;
    type Peer: Peer;

    /// Two ends of one connection. `options` are those of the second; the first receives the other direction.
    fn pair(options: Options) -> (Self::Stream, Self::Stream);

    /// A stream whose other end can send any bytes.
    fn with_peer(options: Options) -> (Self::Peer, Self::Stream);
}

/// The other end, which sends bytes instead of frames.
pub(crate) trait Peer {
    fn write(&mut self, bytes: &[u8]);
    /// Ends the connection in order.
    fn close(self);
    /// Breaks the connection.
    fn reset(self);
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub(crate) direction: Direction,
    /// The mode of transports that read ahead.
    #[allow(dead_code, reason = "not every transport reads ahead")]
    pub(crate) mode: ReceiveMode,
    pub(crate) frame_bytes_max: usize,
    /// Requests buffers so small that a megabyte does not fit.
    pub(crate) tight: bool,
}

impl Options {
    pub(crate) const MAX: usize = 33_001;

    pub(crate) fn with_mode(mode: ReceiveMode) -> Self {
        Options { direction: Direction::ToWorker, mode, frame_bytes_max: Self::MAX, tight: false }
    }
}

/// A frame with its own memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) header: Header,
    pub(crate) payload: Vec<u8>,
}

impl Frame {
    pub(crate) fn outgoing(&self) -> Outgoing<'_> {
        Outgoing { header: self.header, payload: &self.payload }
    }

    pub(crate) fn wire(&self) -> Vec<u8> {
        [&self.header.encode()[..], &self.payload].concat()
    }
}

pub(crate) fn wire(frames: &[Frame]) -> Vec<u8> {
    frames.iter().flat_map(Frame::wire).collect()
}

/// Random numbers from a printed seed; PARAMHUB_TEST_SEED repeats a run.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new() -> Self {
        let seed = std::env::var("PARAMHUB_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
        let now = || std::time::UNIX_EPOCH.elapsed().expect("after 1970").as_nanos() as u64;
        let seed = seed.unwrap_or_else(now);
        println!("PARAMHUB_TEST_SEED={seed}");
        Random(seed)
    }

    /// splitmix64.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

/// The suite's tests for one [`Transport`](conformance::Transport).
#[macro_export]
macro_rules! conformance {
    ($transport:ty) => {
        $crate::conformance!(@ $transport:
            every_size_arrives_whole_and_in_order, a_frame_may_exceed_the_scratch,
            frames_survive_a_split_at_every_byte, frames_survive_single_bytes, frames_survive_random_fragments,
            one_call_sends_many_frames, both_directions_work_at_once,
            back_pressure_blocks_and_the_frame_goes_on_from_other_memory,
            an_end_between_frames_is_orderly_and_inside_one_is_not, a_reset_is_reported_and_stays,
            a_bad_header_ends_the_stream_and_hands_nothing_over, control_frames_fit_beside_tiny_chunks,
            a_refusing_sink_ends_the_stream, withdrawn_memory_is_not_written, the_budget_shares_a_thread_fairly,
        );
        #[test]
        #[should_panic(expected = "must be finished first")]
        fn another_frame_in_place_of_the_unfinished_one_panics() {
            conformance::another_frame_after_an_unfinished_one::<$transport>();
        }
        #[test]
        #[should_panic(expected = "lies")]
        fn a_header_that_lies_about_its_payload_panics() {
            conformance::a_lying_header::<$transport>();
        }
    };
    (@ $transport:ty: $($name:ident),* $(,)?) => {
        $(#[test] fn $name() { conformance::$name::<$transport>(); })*
    };
}
