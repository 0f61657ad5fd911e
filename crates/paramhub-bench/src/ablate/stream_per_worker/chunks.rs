//! The chunks that all cores share, each under its locks, and the outboxes in which cores leave answers for
//! one another.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use anyhow::{Context, bail};
use paramhub::placement::{HubShape, InterfaceShape, Placement};
use paramhub::{Aggregator, Codec, Hyperparameters, Optimizer, Registry};
use paramhub_core::chunk::ChunkMap;
use paramhub_core::exchange::{Answer, Exchange, Fold, Rules, SumAction};
use paramhub_core::wire::{Header, Operation};
use paramhub_harness::exchange::spec::Spec;
use paramhub_kernels::{Step, convert};
use paramhub_transport::Waker;

/// All data that the cores share.
pub(super) struct Chunks {
    workers: u32,
    placement: Placement,
    aggregator: Arc<dyn Aggregator>,
    optimizer: Arc<dyn Optimizer>,
    hyperparameters: Hyperparameters,
    /// The chunks, by slot.
    chunks: Vec<Chunk>,
    /// The outbox of each core.
    outboxes: Vec<AnswerOutbox>,
}

/// One chunk. A thread may lock `model` while it holds `work`, but waits for no further lock while it
/// holds `model`.
struct Chunk {
    codec: Codec,
    elements: u32,
    work: Mutex<Work>,
    model: RwLock<Model>,
}

struct Work {
    /// The exchange of this one chunk.
    exchange: Exchange,
    sum: Vec<f32>,
    state: Vec<f32>,
}

/// A chunk's parameters.
pub(super) struct Model {
    values: Vec<f32>,
    /// The values in the codec in which they travel; empty if that is f32.
    encoded: Vec<u8>,
}

impl Model {
    pub(super) fn payload(&self) -> &[u8] {
        if self.encoded.is_empty() { bytemuck::cast_slice(&self.values) } else { &self.encoded }
    }

    fn encode(&mut self, codec: Codec) {
        if codec != Codec::F32 {
            convert::encode(&self.values, &mut self.encoded, codec);
        }
    }
}

/// An answer to be sent to a rank.
#[derive(Clone, Copy)]
pub(super) struct PendingAnswer {
    pub(super) rank: u32,
    pub(super) slot: u32,
    pub(super) answer: Answer,
    pub(super) version: u32,
}

/// The answers that a core is to send, left by all cores.
struct AnswerOutbox {
    pending: Mutex<Vec<PendingAnswer>>,
    waker: Waker,
}

impl Chunks {
    pub(super) fn new(spec: &Spec) -> anyhow::Result<Chunks> {
        let settings = spec.settings()?;
        let map = ChunkMap::new(&settings.keys, settings.chunk_bytes)?;
        let interface = InterfaceShape { address: "one:1".into(), cores: vec![0], weight: 1 };
        let placement = Placement::new(
            &settings.keys,
            &map,
            &[HubShape { interfaces: vec![interface], local: None, between_hubs: None }],
        )?;
        let registry = Registry::with_builtins();
        let optimizer = registry.optimizer(&settings.optimizer.name)?;
        let hyperparameters = settings.optimizer.hyperparameters.unwrap_or_else(|| optimizer.defaults());
        let slots = optimizer.state_slots(&hyperparameters);
        let rules = Rules {
            workers: spec.workers,
            members: spec.workers,
            first_members: spec.workers,
            first_site: spec.workers,
            rank_0: Some(0),
            consistency: settings.consistency,
            reproducible: settings.reproducible,
            has_parameters: settings.has_parameters(),
            two_phase: false,
            quorum: None,
            rewind_every: None,
        };
        let chunk = |&chunk: &u32| {
            let extent = map.extent(chunk).expect("a placed chunk is in the map");
            let elements = extent.elements as usize;
            let codec = settings.keys.keys()[extent.key as usize].dtype.codec();
            let encoded = if codec == Codec::F32 { 0 } else { elements * codec.bytes() };
            let work = Work {
                exchange: Exchange::new(rules, 1),
                sum: vec![0.0; elements],
                state: vec![0.0; slots * elements],
            };
            let model = Model { values: vec![0.0; elements], encoded: vec![0; encoded] };
            Chunk { codec, elements: extent.elements, work: Mutex::new(work), model: RwLock::new(model) }
        };
        let chunks = placement.chunks(0).iter().map(chunk).collect();
        let outbox = |_| Ok(AnswerOutbox { pending: Mutex::default(), waker: Waker::new()? });
        let outboxes = (0..spec.cores).map(outbox).collect::<std::io::Result<_>>()?;
        let aggregator = registry.aggregator(&settings.aggregator)?;
        Ok(Chunks {
            workers: spec.workers,
            placement,
            aggregator,
            optimizer,
            hyperparameters,
            chunks,
            outboxes,
        })
    }

    pub(super) fn len(&self) -> u32 {
        self.chunks.len() as u32
    }

    /// Bytes of the largest chunk in its codec.
    pub(super) fn chunk_bytes_max(&self) -> usize {
        let bytes = self.chunks.iter().map(|chunk| chunk.elements as usize * chunk.codec.bytes());
        bytes.max().unwrap_or(0)
    }

    /// The ranks whose streams belong to a core.
    pub(super) fn ranks_of(&self, core: usize) -> impl Iterator<Item = u32> + use<> {
        (core as u32..self.workers).step_by(self.outboxes.len())
    }

    pub(super) fn waker(&self, core: usize) -> &Waker {
        &self.outboxes[core].waker
    }

    /// Takes the answers in a core's outbox.
    pub(super) fn collect(&self, core: usize, into: &mut Vec<PendingAnswer>) {
        into.append(&mut lock(&self.outboxes[core].pending));
    }

    /// Refuses a frame before its payload is read.
    pub(super) fn check(&self, header: &Header) -> anyhow::Result<()> {
        if !has_tensor(header.operation) {
            return Ok(());
        }
        let chunk = &self.chunks[self.slot(header)? as usize];
        if header.codec != chunk.codec
            || header.length as usize != chunk.elements as usize * chunk.codec.bytes()
        {
            bail!("chunk {} came with {} bytes of {}", header.chunk, header.length, header.codec);
        }
        Ok(())
    }

    /// Applies a frame of `rank` on the thread of core `here`, and leaves the answers in the outboxes of the
    /// cores that own the answered streams. `pending` is scratch space.
    pub(super) fn frame(
        &self,
        rank: u32,
        header: &Header,
        payload: &[u8],
        here: usize,
        pending: &mut Vec<PendingAnswer>,
    ) -> anyhow::Result<()> {
        let slot = match header.operation {
            Operation::Heartbeat | Operation::Leave => return Ok(()),
            _ => self.slot(header)?,
        };
        let chunk = &self.chunks[slot as usize];
        let mut work = lock(&chunk.work);
        match header.operation {
            Operation::Push => self.contribute(chunk, &mut work, rank, header, payload, Answer::Applied)?,
            Operation::PushPull => {
                self.contribute(chunk, &mut work, rank, header, payload, Answer::Parameters)?
            }
            Operation::Pull => work.exchange.pull(0, rank, header.step)?,
            Operation::Initialise => {
                work.exchange.initialise(0, Some(rank), header.step)?;
                let mut model = chunk.model.write().unwrap_or_else(PoisonError::into_inner);
                convert::decode(payload, &mut model.values, chunk.codec);
                model.encode(chunk.codec);
            }
            other => bail!("rank {rank} sent {other:?}, which this exchange does not understand"),
        }
        let exchange = &mut work.exchange;
        exchange.mark_due_answers(0, |rank, answer| {
            pending.push(PendingAnswer { rank, slot, answer, version: 0 })
        });
        for pending in pending.iter_mut() {
            pending.version = exchange.answer_version(0, pending.rank);
            // The stream tracks its unsent answers itself, so for the chunk's exchange they count as sent.
            exchange.answer_begun(0, pending.rank);
        }
        drop(work);
        self.hand_over(here, pending);
        Ok(())
    }

    fn contribute(
        &self,
        chunk: &Chunk,
        work: &mut Work,
        rank: u32,
        header: &Header,
        payload: &[u8],
        answer: Answer,
    ) -> anyhow::Result<()> {
        let arrival = work.exchange.push(0, rank, header.step, answer)?;
        match arrival.fold {
            Fold::Sum { starts_sum: true, .. } => {
                self.aggregator.assign(&mut work.sum, payload, header.codec)
            }
            Fold::Sum { starts_sum: false, .. } => self.aggregator.add(&mut work.sum, payload, header.codec),
            Fold::Park | Fold::Apart | Fold::Drop => bail!("every step is that of all ranks, once"),
        }
        if let SumAction::Update(update) = arrival.then {
            let step = Step {
                hyperparameters: &self.hyperparameters,
                number: update.number,
                contributions: update.contributions,
                factor: 1.0,
                tensor: None,
            };
            let mut model = chunk.model.write().unwrap_or_else(PoisonError::into_inner);
            self.optimizer.apply(&step, &mut model.values, &work.sum, &mut work.state);
            model.encode(chunk.codec);
        }
        Ok(())
    }

    fn hand_over(&self, here: usize, pending: &mut Vec<PendingAnswer>) {
        if pending.is_empty() {
            return;
        }
        let cores = self.outboxes.len();
        for (core, outbox) in self.outboxes.iter().enumerate() {
            let mut waiting = lock(&outbox.pending);
            let was_empty = waiting.is_empty();
            waiting.extend(pending.iter().filter(|pending| pending.rank as usize % cores == core));
            let has_begun_to_wait = was_empty && !waiting.is_empty();
            drop(waiting);
            if has_begun_to_wait && core != here {
                outbox.waker.wake();
            }
        }
        pending.clear();
    }

    /// A chunk's parameters to be sent. Waits for a core that is changing them.
    pub(super) fn model(&self, slot: u32) -> RwLockReadGuard<'_, Model> {
        self.chunks[slot as usize].model.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same without waiting, for a caller that holds another chunk's parameters already.
    pub(super) fn try_lock_parameters(&self, slot: u32) -> Option<RwLockReadGuard<'_, Model>> {
        self.chunks[slot as usize].model.try_read().ok()
    }

    /// The header of an answer.
    pub(super) fn header(&self, slot: u32, answer: Answer, version: u32) -> Header {
        let chunk = &self.chunks[slot as usize];
        let header = Header {
            chunk: self.placement.chunks(0)[slot as usize],
            step: version,
            ..Header::bare(Operation::Applied)
        };
        match answer {
            Answer::Applied => header,
            Answer::Parameters => {
                let length = chunk.elements * chunk.codec.bytes() as u32;
                Header { operation: Operation::Parameters, codec: chunk.codec, length, ..header }
            }
            Answer::State(_) => unreachable!("optimizer state is never asked for here"),
        }
    }

    fn slot(&self, header: &Header) -> anyhow::Result<u32> {
        let place = self.placement.locate(header.chunk);
        Ok(place.with_context(|| format!("there is no chunk {}", header.chunk))?.1)
    }
}

fn has_tensor(operation: Operation) -> bool {
    matches!(operation, Operation::Push | Operation::PushPull | Operation::Initialise)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A thread that panicked has ended its streams, and thus the job of all workers.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
