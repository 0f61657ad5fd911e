//! The worker's side of the rules: which requests are under way, and which answers a hub may give.
//!
//! One [`Requests`] keeps the books of all keys of a job. Like the hub's [`crate::exchange`] it sees neither data nor
//! sockets: the worker's I/O thread tells it what was asked, what has begun to leave and what has come back whole.

mod blocks;

use thiserror::Error;

use crate::chunk::{ChunkId, ChunkMap, Extent};
use crate::codec::{Codec, Dtype};
use crate::wire::{Header, Operation, State};

pub use self::blocks::PieceId;
use self::blocks::Sending;

/// What a worker can ask for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Contribute a gradient; done when it has taken effect.
    Push,
    /// Receive parameters.
    Pull,
    /// Contribute a gradient and receive the parameters that follow from it.
    PushPull,
    /// Rank 0: send the parameters to start from.
    Initialise,
    /// Receive a slot of the optimizer's state.
    PullState,
    /// Rank 0: send a slot of the optimizer's state to start from.
    InitialiseState,
    /// Contribute a layer's factors and receive the parameters that follow from them: of its weight and its bias together.
    Factors,
}

impl Request {
    /// The frame that carries it.
    pub const fn operation(self) -> Operation {
        match self {
            Request::Push => Operation::Push,
            Request::Pull => Operation::Pull,
            Request::PushPull => Operation::PushPull,
            Request::Initialise => Operation::Initialise,
            Request::PullState => Operation::PullState,
            Request::InitialiseState => Operation::InitialiseState,
            Request::Factors => Operation::Factors,
        }
    }

    /// The frame that answers it.
    pub const fn answer(self) -> Operation {
        match self {
            Request::Pull | Request::PushPull | Request::Factors => Operation::Parameters,
            Request::Push | Request::Initialise | Request::InitialiseState => Operation::Applied,
            Request::PullState => Operation::State,
        }
    }

    /// Whether it is about optimizer state, f32 whatever the key's dtype.
    pub const fn is_of_state(self) -> bool {
        matches!(self, Request::PullState | Request::InitialiseState)
    }
}

/// The requests under way, key by key and chunk by chunk.
#[derive(Clone, Debug)]
pub struct Requests {
    map: ChunkMap,
    dtypes: Vec<Dtype>,
    /// Of every key's gradients.
    codecs: Vec<Codec>,
    keys: Vec<Option<Underway>>,
    chunks: Vec<Progress>,
    /// Of every chunk, the version it was last answered with, where hubs leave out late workers: chunks go on without this
    /// worker, each by itself, and its next push of one is for the step that it has the parameters of. Empty elsewhere, where
    /// all chunks of a key are at the key's step.
    versions: Vec<u32>,
    /// Of layers whose factors go to a hub.
    blocks: Vec<Sending>,
}

#[derive(Clone, Copy, Debug)]
struct Underway {
    request: Request,
    step: u32,
    unanswered: u32,
    /// Of its answers.
    newest: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Idle,
    Unsent,
    Sent,
}

/// A second request for a key came before the first was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("a {request:?} of this key is still under way: wait for it first")]
pub struct Unfinished {
    /// What is under way.
    pub request: Request,
}

/// An answer that nobody asked for: the hub is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Unasked {
    /// No such chunk.
    #[error("the hub answered for chunk {0}, which does not exist")]
    Chunk(ChunkId),
    /// The chunk has no request that this would answer.
    #[error("the hub answered {operation:?} for chunk {chunk}, which waits for no such answer")]
    Answer {
        /// The chunk.
        chunk: ChunkId,
        /// The answer.
        operation: Operation,
    },
    /// Older parameters than asked for.
    #[error("the hub answered with version {got} of chunk {chunk}, older than version {expected} asked for")]
    Version {
        /// The chunk.
        chunk: ChunkId,
        /// Asked for.
        expected: u32,
        /// Answered.
        got: u32,
    },
    /// A payload of the wrong size or encoding.
    #[error(
        "the hub answered {bytes} bytes of {codec} for chunk {chunk}, which has {expected_bytes} bytes of {expected_codec}"
    )]
    Payload {
        /// The chunk.
        chunk: ChunkId,
        /// Answered.
        bytes: u32,
        /// Answered.
        codec: Codec,
        /// Asked for.
        expected_bytes: u32,
        /// Asked for.
        expected_codec: Codec,
    },
}

/// What is left of a key's request after one of its chunks was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answered {
    /// The key.
    pub key: u32,
    /// Set when this was the key's last chunk: the request is over.
    pub finished: Option<Request>,
    /// The newest version that any chunk of the key was answered with.
    pub newest: u32,
}

impl Requests {
    /// Books for a table cut by `map`, with each key's dtype and its gradients' codec in table order.
    pub fn new(map: ChunkMap, dtypes: Vec<Dtype>, codecs: Vec<Codec>) -> Self {
        assert_eq!([map.keys(); 2], [dtypes.len(), codecs.len()], "one dtype and one codec a key");
        Requests {
            keys: vec![None; map.keys()],
            chunks: vec![Progress::Idle; map.len() as usize],
            versions: Vec::new(),
            blocks: Vec::new(),
            map,
            dtypes,
            codecs,
        }
    }

    /// For a job whose hubs leave out late workers: every chunk has a step of its own.
    pub fn with_steps_of_chunks(mut self) -> Self {
        self.versions = vec![0; self.chunks.len()];
        self
    }

    /// Whether hubs may have gone on without this worker, so that answers say which step is next.
    pub fn has_steps_of_chunks(&self) -> bool {
        !self.versions.is_empty()
    }

    /// How the keys are cut.
    pub fn map(&self) -> &ChunkMap {
        &self.map
    }

    /// Starts a request. `step` is the step pushed, the version pulled, the version to start from, or the slot of the
    /// optimizer's state. All the key's chunks are then to be sent.
    pub fn begin(
        &mut self,
        key: u32,
        request: Request,
        step: u32,
    ) -> Result<std::ops::Range<ChunkId>, Unfinished> {
        if let Some(underway) = self.keys[key as usize] {
            return Err(Unfinished { request: underway.request });
        }
        let chunks = self.map.chunks_of(key);
        self.chunks[chunks.start as usize..chunks.end as usize].fill(Progress::Unsent);
        self.keys[key as usize] =
            Some(Underway { request, step, unanswered: chunks.len() as u32, newest: 0 });
        Ok(chunks)
    }

    /// The header of a chunk's request, and where its payload lies in the key.
    ///
    /// # Panics
    /// If the chunk's key has no request under way.
    pub fn header(&self, chunk: ChunkId) -> (Header, Extent) {
        let extent = self.map.extent(chunk).expect("a chunk to send is in the map");
        let underway = self.keys[extent.key as usize].expect("a chunk to send has a request");
        let codec = match underway.request {
            Request::Push | Request::PushPull => self.codecs[extent.key as usize],
            Request::Initialise => self.dtypes[extent.key as usize].codec(),
            Request::Pull | Request::PullState | Request::InitialiseState => Codec::F32,
            Request::Factors => unreachable!("blocks are sent in pieces"),
        };
        let length = match underway.request {
            Request::Pull | Request::PullState => 0,
            Request::InitialiseState => State::bytes(extent.elements),
            Request::Push | Request::PushPull | Request::Initialise => extent.bytes(codec),
            Request::Factors => unreachable!("blocks are sent in pieces"),
        };
        let step = self.step(chunk, underway);
        (Header { operation: underway.request.operation(), codec, chunk, step, length }, extent)
    }

    /// What a chunk's request says in place of a step.
    fn step(&self, chunk: ChunkId, underway: Underway) -> u32 {
        match underway.request {
            Request::Push | Request::PushPull => {
                self.versions.get(chunk as usize).copied().unwrap_or(underway.step)
            }
            // The version of another chunk of the key says nothing of this one's.
            Request::Pull if !self.versions.is_empty() => self.versions[chunk as usize],
            _ => underway.step,
        }
    }

    /// A chunk's request has begun to leave: from now on its answer may come.
    pub fn sent(&mut self, chunk: ChunkId) {
        self.chunks[chunk as usize] = Progress::Sent;
    }

    /// A chunk's stream was cut: whether its request must be sent again, which is so if it has left and was not answered whole.
    /// Of [blocks](Self::resend_block) no chunk is.
    pub fn resend(&mut self, chunk: ChunkId) -> bool {
        let key = self.map.extent(chunk).expect("a chunk on a stream is in the map").key;
        if self.keys[key as usize].is_some_and(|underway| underway.request == Request::Factors) {
            return false;
        }
        let progress = &mut self.chunks[chunk as usize];
        let was_sent = *progress == Progress::Sent;
        if was_sent {
            *progress = Progress::Unsent;
        }
        was_sent
    }

    /// Checks an answer's header and says where its payload goes. Asking twice for one answer is fine.
    pub fn expect(&self, header: &Header) -> Result<Extent, Unasked> {
        let chunk = header.chunk;
        let extent = self.map.extent(chunk).ok_or(Unasked::Chunk(chunk))?;
        let unasked = Unasked::Answer { chunk, operation: header.operation };
        let underway = self.keys[extent.key as usize].ok_or(unasked)?;
        let fits = header.operation == underway.request.answer()
            && (underway.request != Request::PullState || header.step == underway.step);
        if !fits || self.chunks[chunk as usize] != Progress::Sent {
            return Err(unasked);
        }
        let expected = match underway.request {
            Request::Pull | Request::Initialise => self.step(chunk, underway),
            Request::Push | Request::PushPull | Request::Factors => {
                self.step(chunk, underway).wrapping_add(1)
            }
            // What belongs to no version.
            Request::PullState | Request::InitialiseState => 0,
        };
        if header.step < expected {
            return Err(Unasked::Version { chunk, expected, got: header.step });
        }
        if header.operation != Operation::Applied {
            let (codec, expected_bytes) = match underway.request.is_of_state() {
                true => (Codec::F32, State::bytes(extent.elements)),
                false => {
                    let codec = self.parameters_as(extent.key, header.codec);
                    (codec, extent.bytes(codec))
                }
            };
            if header.codec != codec || header.length != expected_bytes {
                let (bytes, expected_codec) = (header.length, codec);
                return Err(Unasked::Payload {
                    chunk,
                    bytes,
                    codec: header.codec,
                    expected_bytes,
                    expected_codec,
                });
            }
        }
        Ok(extent)
    }

    /// How a key's parameters may come where they come as `codec`: those of a quantised key as the change since the version
    /// that this worker has, or whole where the hub does not know it to have that.
    fn parameters_as(&self, key: u32, codec: Codec) -> Codec {
        let quantised = self.codecs[key as usize];
        match codec.is_quantised() && quantised.is_quantised() {
            true => quantised,
            false => self.dtypes[key as usize].codec(),
        }
    }

    /// An answer that [`Requests::expect`] accepted is here whole.
    pub fn answered(&mut self, header: &Header) -> Result<Answered, Unasked> {
        let key = self.expect(header)?.key;
        let key = self.counted_at(key);
        self.chunks[header.chunk as usize] = Progress::Idle;
        let underway = self.keys[key as usize].as_mut().expect("an expected answer has a request");
        underway.unanswered -= 1;
        underway.newest = underway.newest.max(header.step);
        let newest = underway.newest;
        if !underway.request.is_of_state()
            && let Some(version) = self.versions.get_mut(header.chunk as usize)
        {
            *version = header.step;
        }
        let finished = (underway.unanswered == 0).then_some(underway.request);
        if finished.is_some() {
            self.keys[key as usize] = None;
            if finished == Some(Request::Factors) {
                self.end_bias(key);
            }
        }
        Ok(Answered { key, finished, newest })
    }

    /// The keys with a request under way, ascending; what a failed job leaves unanswered.
    pub fn underway(&self) -> impl Iterator<Item = u32> + '_ {
        self.keys.iter().enumerate().filter_map(|(key, underway)| underway.map(|_| key as u32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::{Key, KeyTable};

    fn requests() -> Requests {
        let mut keys = vec![Key::new("a", [600]), Key::new("b", [10])];
        keys[1].dtype = Dtype::BF16;
        let table = KeyTable::new(keys).unwrap();
        let codecs = vec![Codec::F16, Codec::F16];
        Requests::new(ChunkMap::new(&table, 1024).unwrap(), vec![Dtype::F32, Dtype::BF16], codecs)
    }

    fn parameters(chunk: ChunkId, codec: Codec, length: u32, step: u32) -> Header {
        Header { operation: Operation::Parameters, codec, chunk, step, length }
    }

    #[test]
    fn a_key_finishes_with_its_last_chunk_whatever_the_order() {
        let mut requests = requests();
        assert_eq!(requests.begin(0, Request::PushPull, 4), Ok(0..3));
        assert_eq!(requests.begin(0, Request::Pull, 4), Err(Unfinished { request: Request::PushPull }));
        for chunk in [2, 0, 1] {
            let (header, extent) = requests.header(chunk);
            assert_eq!((header.operation, header.step, header.codec), (Operation::PushPull, 4, Codec::F16));
            assert_eq!(header.length, extent.elements * 2);
            requests.sent(chunk);
        }
        assert_eq!(requests.answered(&parameters(1, Codec::F32, 1024, 5)).unwrap().finished, None);
        assert_eq!(requests.answered(&parameters(0, Codec::F32, 1024, 5)).unwrap().finished, None);
        assert_eq!(requests.underway().collect::<Vec<_>>(), [0]);
        let last = requests.answered(&parameters(2, Codec::F32, 88 * 4, 5)).unwrap();
        assert_eq!(last, Answered { key: 0, finished: Some(Request::PushPull), newest: 5 });
        assert_eq!(requests.begin(0, Request::Push, 5), Ok(0..3));
    }

    #[test]
    fn answers_nobody_asked_for_are_refused() {
        let mut requests = requests();
        let good = parameters(3, Codec::BF16, 20, 1);
        assert_eq!(requests.expect(&parameters(9, Codec::F32, 4, 0)), Err(Unasked::Chunk(9)));
        assert!(matches!(requests.expect(&good), Err(Unasked::Answer { .. })), "nothing is under way");
        requests.begin(1, Request::Pull, 1).unwrap();
        assert!(matches!(requests.expect(&good), Err(Unasked::Answer { .. })), "nothing was sent");
        requests.sent(3);
        assert_eq!(requests.expect(&good).unwrap().elements, 10);
        let applied = Header { operation: Operation::Applied, length: 0, ..good };
        assert!(matches!(requests.expect(&applied), Err(Unasked::Answer { .. })));
        assert!(matches!(requests.expect(&Header { step: 0, ..good }), Err(Unasked::Version { .. })));
        assert!(matches!(requests.expect(&Header { length: 40, ..good }), Err(Unasked::Payload { .. })));
        assert!(matches!(
            requests.expect(&Header { codec: Codec::F16, ..good }),
            Err(Unasked::Payload { .. })
        ));
        requests.answered(&good).unwrap();
        assert!(matches!(requests.answered(&good), Err(Unasked::Answer { .. })), "an answer counts once");
    }

    #[test]
    fn chunks_that_went_on_without_this_worker_have_steps_of_their_own() {
        let mut requests = requests().with_steps_of_chunks();
        let mut exchange = |request, step: u32, answers: [u32; 3]| {
            requests.begin(0, request, step).unwrap();
            let steps = [0, 1, 2].map(|chunk| {
                requests.sent(chunk);
                requests.header(chunk).0.step
            });
            let lengths = [1024, 1024, 88 * 4];
            let older = parameters(0, Codec::F32, 1024, steps[0]);
            if request == Request::PushPull {
                assert!(matches!(requests.expect(&older), Err(Unasked::Version { .. })), "not newer");
            }
            let last = [0, 1, 2].map(|chunk| {
                let header = parameters(chunk, Codec::F32, lengths[chunk as usize], answers[chunk as usize]);
                requests.answered(&header).unwrap()
            });
            (steps, last[2].newest)
        };
        assert_eq!(exchange(Request::PushPull, 0, [1, 3, 1]), ([0, 0, 0], 3));
        assert_eq!(exchange(Request::PushPull, 3, [2, 4, 5]), ([1, 3, 1], 5));
        assert_eq!(exchange(Request::Pull, 5, [4, 4, 6]), ([2, 4, 5], 6));
        assert_eq!(exchange(Request::PushPull, 6, [5, 5, 7]), ([4, 4, 6], 7));
    }

    #[test]
    fn a_quantised_keys_parameters_come_quantised_or_whole() {
        let table = KeyTable::new(vec![Key::new("w", [256, 8])]).unwrap();
        let map = ChunkMap::new(&table, 8192).unwrap();
        let mut requests = Requests::new(map, vec![Dtype::F32], vec![Codec::OneBit]);
        requests.begin(0, Request::PushPull, 0).unwrap();
        let (header, _) = requests.header(0);
        assert_eq!((header.codec, header.length), (Codec::OneBit, 2 * 4 + 256));
        requests.sent(0);
        let quantised = parameters(0, Codec::OneBit, 264, 1);
        let whole = parameters(0, Codec::F32, 8192, 1);
        assert!(requests.expect(&quantised).is_ok() && requests.expect(&whole).is_ok());
        for odd in [
            parameters(0, Codec::TwoBit, Codec::TwoBit.payload_bytes(2048) as u32, 1),
            parameters(0, Codec::OneBit, 263, 1),
            parameters(0, Codec::OneBit, 8192, 1),
            parameters(0, Codec::F32, 264, 1),
        ] {
            assert!(matches!(requests.expect(&odd), Err(Unasked::Payload { .. })), "{odd:?}");
        }
        requests.answered(&whole).unwrap();
        requests.begin(0, Request::Pull, 1).unwrap();
        assert_eq!(requests.header(0).0.length, 0);
        requests.sent(0);
        assert!(requests.expect(&quantised).is_ok() && requests.expect(&whole).is_ok());
    }

    #[test]
    fn state_is_single_precision_whatever_the_dtype_and_comes_of_the_slot_asked_for() {
        let mut requests = requests();
        requests.begin(1, Request::InitialiseState, 1).unwrap();
        let (header, _) = requests.header(3);
        assert_eq!((header.operation, header.step), (Operation::InitialiseState, 1));
        assert_eq!((header.codec, header.length), (Codec::F32, 48));
        requests.sent(3);
        let applied = Header { chunk: 3, ..Header::bare(Operation::Applied) };
        assert_eq!(requests.answered(&applied).unwrap().finished, Some(Request::InitialiseState));
        requests.begin(1, Request::PullState, 1).unwrap();
        assert_eq!(requests.header(3).0.length, 0);
        requests.sent(3);
        let good = Header { operation: Operation::State, codec: Codec::F32, chunk: 3, step: 1, length: 48 };
        for odd in [Header { step: 0, ..good }, Header { operation: Operation::Parameters, ..good }, applied]
        {
            assert!(matches!(requests.expect(&odd), Err(Unasked::Answer { .. })), "{odd:?}");
        }
        assert!(matches!(requests.expect(&Header { length: 40, ..good }), Err(Unasked::Payload { .. })));
        assert_eq!(requests.answered(&good).unwrap().finished, Some(Request::PullState));
    }
}
