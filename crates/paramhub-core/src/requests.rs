//! The worker's side of the rules: which requests are in flight, and which answers a hub may give.
//!
//! One [`Requests`] keeps the requests for all keys of a job. Like the hub's [`crate::exchange`] it sees
//! neither data nor sockets: the worker's I/O thread reports each request, each frame that has left whole
//! and each answer that has arrived whole.

mod blocks;
mod resending;

use thiserror::Error;

use crate::chunk::{ChunkId, ChunkMap, Extent};
use crate::codec::{Codec, Dtype};
use crate::wire::{Header, Operation, State};

use self::blocks::BlockProgress;
pub use self::blocks::PieceId;

/// The requests that a worker can make for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Contribute a gradient; done when the gradient has taken effect.
    Push,
    /// Receive parameters.
    Pull,
    /// Contribute a gradient and receive the parameters that result.
    PushPull,
    /// As rank 0: send the initial parameters.
    Initialise,
    /// Receive a slot of the optimizer's state.
    PullState,
    /// As rank 0: send a slot of the optimizer's initial state.
    InitialiseState,
    /// Contribute a layer's factors and receive the parameters that result, of its weight and its bias
    /// together.
    Factors,
}

impl Request {
    /// The operation of the request's frame.
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

    /// The operation of the answer's frame.
    pub const fn answer(self) -> Operation {
        match self {
            Request::Pull | Request::PushPull | Request::Factors => Operation::Parameters,
            Request::Push | Request::Initialise | Request::InitialiseState => Operation::Applied,
            Request::PullState => Operation::State,
        }
    }

    /// Returns whether the request is about optimizer state, which is f32 whatever the key's dtype.
    pub const fn is_of_state(self) -> bool {
        matches!(self, Request::PullState | Request::InitialiseState)
    }
}

/// The requests in flight, key by key and chunk by chunk.
#[derive(Clone, Debug)]
pub struct Requests {
    map: ChunkMap,
    dtypes: Vec<Dtype>,
    /// The codec of each key's gradients.
    codecs: Vec<Codec>,
    keys: Vec<Option<InFlightRequest>>,
    chunks: Vec<ChunkProgress>,
    /// The version of the last answer for each chunk, in a job whose hubs leave out late workers. There each
    /// chunk may go on without this worker, and the worker's next push of a chunk is for the step whose
    /// parameters it has. Empty in other jobs, where all chunks of a key are at the key's step.
    versions: Vec<u32>,
    /// The blocks of layers whose factors go to a hub.
    blocks: Vec<BlockProgress>,
}

#[derive(Clone, Copy, Debug)]
struct InFlightRequest {
    request: Request,
    step: u32,
    unanswered: u32,
    /// The newest version of its answers.
    newest: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChunkProgress {
    Idle,
    Unsent,
    Sent,
}

/// The key has a request that is not answered yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("a {request:?} of this key is still under way: wait for it first")]
pub struct RequestUnderway {
    /// The request in flight.
    pub request: Request,
}

/// An answer to no request: the hub is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum UnexpectedAnswer {
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
    /// Parameters of an older version than asked for.
    #[error("the hub answered with version {got} of chunk {chunk}, older than version {expected} asked for")]
    Version {
        /// The chunk.
        chunk: ChunkId,
        /// The version asked for.
        expected: u32,
        /// The version of the answer.
        got: u32,
    },
    /// A payload of the wrong size or encoding.
    #[error(
        "the hub answered {bytes} bytes of {codec} for chunk {chunk}, which has {expected_bytes} bytes of {expected_codec}"
    )]
    Payload {
        /// The chunk.
        chunk: ChunkId,
        /// The bytes of the answer.
        bytes: u32,
        /// The codec of the answer.
        codec: Codec,
        /// The bytes expected.
        expected_bytes: u32,
        /// The codec expected.
        expected_codec: Codec,
    },
}

/// An answer that a request in flight expects and that has not come whole yet. It counts once.
#[derive(Debug, PartialEq, Eq)]
pub struct ExpectedAnswer {
    header: Header,
    extent: Extent,
}

impl ExpectedAnswer {
    /// The place of its payload in the key.
    pub fn extent(&self) -> &Extent {
        &self.extent
    }
}

/// The rest of a key's request after the answer for one of its chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answered {
    /// The key.
    pub key: u32,
    /// The request, if this was the key's last chunk and the request is over.
    pub finished: Option<Request>,
    /// The newest version among the answers for the key's chunks.
    pub newest: u32,
}

impl Requests {
    /// No requests, for a table cut by `map`; dtypes of the keys and codecs of their gradients are in table
    /// order.
    pub fn new(map: ChunkMap, dtypes: Vec<Dtype>, codecs: Vec<Codec>) -> Self {
        assert_eq!([map.keys(); 2], [dtypes.len(), codecs.len()], "one dtype and one codec a key");
        Requests {
            keys: vec![None; map.keys()],
            chunks: vec![ChunkProgress::Idle; map.len() as usize],
            versions: Vec::new(),
            blocks: Vec::new(),
            map,
            dtypes,
            codecs,
        }
    }

    /// The same for a job whose hubs leave out late workers: each chunk has a step of its own.
    pub fn with_steps_of_chunks(mut self) -> Self {
        self.versions = vec![0; self.chunks.len()];
        self
    }

    /// Returns whether hubs may have gone on without this worker, so that answers determine which step is
    /// next.
    pub fn has_steps_of_chunks(&self) -> bool {
        !self.versions.is_empty()
    }

    /// Returns the way in which the keys are cut into chunks.
    pub fn map(&self) -> &ChunkMap {
        &self.map
    }

    /// Starts a request. `step` is the step to push, the version to pull, the version of the initial
    /// parameters, or the slot of the optimizer's state. All chunks of the key are then to be sent.
    pub fn begin(
        &mut self,
        key: u32,
        request: Request,
        step: u32,
    ) -> Result<std::ops::Range<ChunkId>, RequestUnderway> {
        if let Some(underway) = self.keys[key as usize] {
            return Err(RequestUnderway { request: underway.request });
        }
        let chunks = self.map.chunks_of(key);
        self.chunks[chunks.start as usize..chunks.end as usize].fill(ChunkProgress::Unsent);
        self.keys[key as usize] =
            Some(InFlightRequest { request, step, unanswered: chunks.len() as u32, newest: 0 });
        Ok(chunks)
    }

    /// The header of a chunk's request, and the place of its payload in the key.
    ///
    /// # Panics
    /// If the chunk's key has no request in flight.
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

    /// The `step` of the header of a chunk's request.
    fn step(&self, chunk: ChunkId, underway: InFlightRequest) -> u32 {
        match underway.request {
            Request::Push | Request::PushPull => {
                self.versions.get(chunk as usize).copied().unwrap_or(underway.step)
            }
            // Each chunk has a version of its own, whatever the version asked for of the key.
            Request::Pull if !self.versions.is_empty() => self.versions[chunk as usize],
            _ => underway.step,
        }
    }

    /// Notes that a chunk's request has left whole: from now on its answer may come.
    pub fn sent(&mut self, chunk: ChunkId) {
        self.chunks[chunk as usize] = ChunkProgress::Sent;
    }

    /// Checks an answer's header.
    pub fn expect(&self, header: &Header) -> Result<ExpectedAnswer, UnexpectedAnswer> {
        let chunk = header.chunk;
        let extent = self.map.extent(chunk).ok_or(UnexpectedAnswer::Chunk(chunk))?;
        let unexpected = UnexpectedAnswer::Answer { chunk, operation: header.operation };
        let underway = self.keys[extent.key as usize].ok_or(unexpected)?;
        let fits = header.operation == underway.request.answer()
            && (underway.request != Request::PullState || header.step == underway.step);
        if !fits || self.chunks[chunk as usize] != ChunkProgress::Sent {
            return Err(unexpected);
        }
        let expected = match underway.request {
            Request::Pull | Request::Initialise => self.step(chunk, underway),
            Request::Push | Request::PushPull | Request::Factors => {
                self.step(chunk, underway).wrapping_add(1)
            }
            // These have no version.
            Request::PullState | Request::InitialiseState => 0,
        };
        if header.step < expected {
            return Err(UnexpectedAnswer::Version { chunk, expected, got: header.step });
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
                return Err(UnexpectedAnswer::Payload {
                    chunk,
                    bytes,
                    codec: header.codec,
                    expected_bytes,
                    expected_codec,
                });
            }
        }
        Ok(ExpectedAnswer { header: *header, extent })
    }

    /// The codec in which a key's parameters may come if they come as `codec`: those of a quantised key as
    /// the change since this worker's version, or whole in f32 if the hub does not know that the worker has that
    /// version. Through shared memory they come in their own type.
    fn parameters_as(&self, key: u32, codec: Codec) -> Codec {
        let gradient = self.codecs[key as usize];
        match (gradient.is_quantised(), codec) {
            (true, Codec::F32) => Codec::F32,
            (true, codec) if codec.is_quantised() => gradient,
            _ => self.dtypes[key as usize].codec(),
        }
    }

    /// Notes that an answer has arrived whole. No other answer for its chunk may have been counted since it
    /// was accepted.
    pub fn answered(&mut self, ExpectedAnswer { header, extent }: ExpectedAnswer) -> Answered {
        let key = self.counted_at(extent.key);
        self.chunks[header.chunk as usize] = ChunkProgress::Idle;
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
        Answered { key, finished, newest }
    }

    /// The keys with a request in flight, ascending: those that a failed job leaves unanswered.
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

    /// Takes an answer that has come whole.
    fn answer(requests: &mut Requests, header: &Header) -> Result<Answered, UnexpectedAnswer> {
        let expected = requests.expect(header)?;
        Ok(requests.answered(expected))
    }

    fn parameters(chunk: ChunkId, codec: Codec, length: u32, step: u32) -> Header {
        Header { operation: Operation::Parameters, codec, chunk, step, length }
    }

    #[test]
    fn a_key_finishes_with_its_last_chunk_whatever_the_order() {
        let mut requests = requests();
        assert_eq!(requests.begin(0, Request::PushPull, 4), Ok(0..3));
        assert_eq!(requests.begin(0, Request::Pull, 4), Err(RequestUnderway { request: Request::PushPull }));
        for chunk in [2, 0, 1] {
            let (header, extent) = requests.header(chunk);
            assert_eq!((header.operation, header.step, header.codec), (Operation::PushPull, 4, Codec::F16));
            assert_eq!(header.length, extent.elements * 2);
            requests.sent(chunk);
        }
        assert_eq!(answer(&mut requests, &parameters(1, Codec::F32, 1024, 5)).unwrap().finished, None);
        assert_eq!(answer(&mut requests, &parameters(0, Codec::F32, 1024, 5)).unwrap().finished, None);
        assert_eq!(requests.underway().collect::<Vec<_>>(), [0]);
        let last = answer(&mut requests, &parameters(2, Codec::F32, 88 * 4, 5)).unwrap();
        assert_eq!(last, Answered { key: 0, finished: Some(Request::PushPull), newest: 5 });
        assert_eq!(requests.begin(0, Request::Push, 5), Ok(0..3));
    }

    #[test]
    fn answers_without_a_request_are_refused() {
        let mut requests = requests();
        let good = parameters(3, Codec::BF16, 20, 1);
        assert_eq!(requests.expect(&parameters(9, Codec::F32, 4, 0)), Err(UnexpectedAnswer::Chunk(9)));
        assert!(
            matches!(requests.expect(&good), Err(UnexpectedAnswer::Answer { .. })),
            "nothing is under way"
        );
        requests.begin(1, Request::Pull, 1).unwrap();
        assert!(matches!(requests.expect(&good), Err(UnexpectedAnswer::Answer { .. })), "nothing was sent");
        requests.sent(3);
        assert_eq!(requests.expect(&good).unwrap().extent().elements, 10);
        let applied = Header { operation: Operation::Applied, length: 0, ..good };
        assert!(matches!(requests.expect(&applied), Err(UnexpectedAnswer::Answer { .. })));
        assert!(matches!(
            requests.expect(&Header { step: 0, ..good }),
            Err(UnexpectedAnswer::Version { .. })
        ));
        assert!(matches!(
            requests.expect(&Header { length: 40, ..good }),
            Err(UnexpectedAnswer::Payload { .. })
        ));
        assert!(matches!(
            requests.expect(&Header { codec: Codec::F16, ..good }),
            Err(UnexpectedAnswer::Payload { .. })
        ));
        answer(&mut requests, &good).unwrap();
        assert!(
            matches!(answer(&mut requests, &good), Err(UnexpectedAnswer::Answer { .. })),
            "an answer counts once"
        );
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
                assert!(
                    matches!(requests.expect(&older), Err(UnexpectedAnswer::Version { .. })),
                    "not newer"
                );
            }
            let last = [0, 1, 2].map(|chunk| {
                let header = parameters(chunk, Codec::F32, lengths[chunk as usize], answers[chunk as usize]);
                answer(&mut requests, &header).unwrap()
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
        let mut requests = Requests::new(map, vec![Dtype::F32], vec![Codec::ONE_BIT]);
        requests.begin(0, Request::PushPull, 0).unwrap();
        let (header, _) = requests.header(0);
        assert_eq!((header.codec, header.length), (Codec::ONE_BIT, 2 * 4 + 256));
        requests.sent(0);
        let quantised = parameters(0, Codec::ONE_BIT, 264, 1);
        let whole = parameters(0, Codec::F32, 8192, 1);
        assert!(requests.expect(&quantised).is_ok() && requests.expect(&whole).is_ok());
        for odd in [
            parameters(0, Codec::TWO_BIT, Codec::TWO_BIT.payload_bytes(2048) as u32, 1),
            parameters(0, Codec::ONE_BIT, 263, 1),
            parameters(0, Codec::ONE_BIT, 8192, 1),
            parameters(0, Codec::F32, 264, 1),
        ] {
            assert!(matches!(requests.expect(&odd), Err(UnexpectedAnswer::Payload { .. })), "{odd:?}");
        }
        answer(&mut requests, &whole).unwrap();
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
        assert_eq!(answer(&mut requests, &applied).unwrap().finished, Some(Request::InitialiseState));
        requests.begin(1, Request::PullState, 1).unwrap();
        assert_eq!(requests.header(3).0.length, 0);
        requests.sent(3);
        let good = Header { operation: Operation::State, codec: Codec::F32, chunk: 3, step: 1, length: 48 };
        for odd in [Header { step: 0, ..good }, Header { operation: Operation::Parameters, ..good }, applied]
        {
            assert!(matches!(requests.expect(&odd), Err(UnexpectedAnswer::Answer { .. })), "{odd:?}");
        }
        assert!(matches!(
            requests.expect(&Header { length: 40, ..good }),
            Err(UnexpectedAnswer::Payload { .. })
        ));
        assert_eq!(answer(&mut requests, &good).unwrap().finished, Some(Request::PullState));
    }
}
