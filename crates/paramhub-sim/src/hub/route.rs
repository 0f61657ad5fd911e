//! A route of a hub: the exchange of its chunks, and the streams that lead to it.

use std::collections::BTreeMap;

use paramhub_core::chunk::ChunkId;
use paramhub_core::codec::Codec;
use paramhub_core::consistency::Consistency;
use paramhub_core::exchange::{
    Answer, Exchange, Fold, ProtocolViolation, RewoundTo, Rules, SumAction, Update,
};
use paramhub_core::liveness::PeerLiveness;
use paramhub_core::wire::{Header, Notice, Operation};

use crate::job::JobPlan;
use crate::message::{Content, Contribution};
use crate::network::StreamId;
use crate::world::{Context, Plant};

/// A route: the chunks of one core, and the streams that lead to it.
pub(super) struct Route {
    pub(super) core: u16,
    pub(super) state: RouteState,
    pub(super) exchange: Exchange,
    chunks: Vec<Chunk>,
    pub(super) ports: Vec<Port>,
    pub(super) rewind: Rewind,
    /// The epoch in which its chunks have begun to go back last; 0 if they never have.
    pub(super) rewound_in: u64,
    /// What ranks were told then.
    pub(super) notice: Option<Notice>,
}

/// How far a route has gone back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rewind {
    /// All ranks take part, or none has been lost yet.
    NotNeeded,
    /// A rank is lost. The step to go back to is not known. The first `workers` of the ranks are expected so far.
    Awaited { workers: u32 },
    /// Chunks go back to `step`, or begin anew if it is `None`, from slot `next` on.
    UnderWay { step: Option<u32>, next: u32 },
}

/// What the core has of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RouteState {
    /// It is about to allocate.
    Opening,
    Open,
    Freed,
}

struct Chunk {
    id: ChunkId,
    sum: Vec<Contribution>,
    /// The digest of the parameters.
    parameters: u64,
    /// The same of the copy to which the chunk can go back.
    copy: Option<u64>,
    length: u32,
}

/// The place of one rank's stream.
#[derive(Default)]
pub(super) struct Port {
    pub(super) stream: Option<StreamId>,
    /// The epoch and the attempt of the newest stream that was passed on.
    pub(super) newest: Option<(u64, u32)>,
    /// The stream is broken, and another may replace it.
    pub(super) is_cut: bool,
    /// What still comes is dropped: the job is over, or its rank was at fault.
    pub(super) is_muted: bool,
    pub(super) has_left: bool,
    pub(super) owed: BTreeMap<u32, Answer>,
    pub(super) liveness: Option<PeerLiveness>,
}

impl Chunk {
    /// Makes an update, whose contributions must be of processes that have come since an epoch. `keeps` says whether the
    /// parameters before it are copied.
    fn update(&mut self, update: Update, keeps: bool, rewound_in: u64, context: &mut Context<'_>) {
        let mut sum = std::mem::take(&mut self.sum);
        if keeps {
            self.copy = Some(self.parameters);
        }
        self.parameters = context.ledger.updated(self.id, update.step, &mut sum, rewound_in);
        if sum.len() != update.contributions as usize {
            let step = update.step;
            context.ledger.violate(|| format!("the mean of step {step} divides by another number than came"));
        }
    }
}

impl Route {
    pub(super) fn new(plan: &JobPlan, first_workers: u32, core: u16, chunks: &[ChunkId]) -> Route {
        let rules = Rules {
            workers: plan.workers,
            members: plan.workers,
            first_members: first_workers,
            first_site: plan.workers,
            rank_0: Some(0),
            consistency: Consistency::Synchronous,
            reproducible: plan.reproducible,
            has_parameters: true,
            two_phase: false,
            quorum: plan.quorum,
            rewind_every: plan.rewind_every,
        };
        let chunk = |&id: &ChunkId| {
            let length = plan.map.extent(id).expect("a chunk of the job").bytes(Codec::F32);
            Chunk { id, sum: Vec::new(), parameters: 0, copy: None, length }
        };
        Route {
            core,
            state: RouteState::Opening,
            exchange: Exchange::new(rules, chunks.len() as u32),
            chunks: chunks.iter().map(chunk).collect(),
            ports: (0..plan.workers).map(|_| Port::default()).collect(),
            rewind: Rewind::NotNeeded,
            rewound_in: 0,
            notice: None,
        }
    }

    /// Takes a request for a chunk, as a shard does.
    pub(super) fn take_request(
        &mut self,
        slot: u32,
        rank: u32,
        header: &Header,
        content: &Content,
        context: &mut Context<'_>,
    ) -> Result<(), ProtocolViolation> {
        let chunk = &mut self.chunks[slot as usize];
        match header.operation {
            Operation::Initialise => {
                if self.exchange.initialise(slot, Some(rank), header.step)? {
                    chunk.parameters = context.ledger.initialised(chunk.id);
                }
            }
            Operation::Pull => self.exchange.pull(slot, rank, header.step)?,
            Operation::PushPull => {
                let Content::Gradient(contribution) = *content else { unreachable!("a push has a gradient") };
                let arrival = self.exchange.push(slot, rank, header.step, Answer::Parameters)?;
                match arrival.fold {
                    Fold::Drop if context.plant == Some(Plant::RepeatCounted) => chunk.sum.push(contribution),
                    Fold::Drop => {}
                    Fold::Sum { .. } | Fold::Park => chunk.sum.push(contribution),
                }
                if let SumAction::Update(update) = arrival.then {
                    let keeps = self.exchange.keeps_version(slot);
                    chunk.update(update, keeps, self.rewound_in, context);
                }
            }
            other => unreachable!("no worker here sends {other:?}"),
        }
        self.mark_due_answers(slot);
        Ok(())
    }

    fn mark_due_answers(&mut self, slot: u32) {
        let ports = &mut self.ports;
        self.exchange.mark_due_answers(slot, |member, answer| {
            ports[member as usize].owed.insert(slot, answer);
        });
    }

    /// Ends the steps that wait for no member any more, as a shard does when the membership has changed.
    pub(super) fn end_steps(&mut self, context: &mut Context<'_>) {
        for slot in 0..self.chunks.len() as u32 {
            let chunk = &mut self.chunks[slot as usize];
            loop {
                if let Some(update) = self.exchange.end_if_complete(slot) {
                    chunk.update(update, false, self.rewound_in, context);
                } else if self.exchange.skip_missed_steps(slot) {
                    context.ledger.skipped(chunk.id, self.exchange.step(slot));
                } else {
                    break;
                }
            }
            self.mark_due_answers(slot);
        }
    }

    /// Begins to take all chunks back to a step, with which the first `workers` ranks begin again, or to begin anew.
    pub(super) fn begin_to_go_back(
        &mut self,
        step: Option<u32>,
        workers: u32,
        keeps_sums: bool,
    ) -> Result<(), String> {
        match step {
            Some(step) => {
                self.exchange.check_rewind(step).map_err(|cannot| cannot.to_string())?;
                self.exchange.rewind(step, workers);
            }
            None => self.exchange.begin_anew(workers),
        }
        if !keeps_sums {
            self.drop_sums();
        }
        self.rewind = Rewind::UnderWay { step, next: 0 };
        Ok(())
    }

    /// Takes the next chunk back. Returns whether there may be more.
    pub(super) fn go_back(&mut self, context: &mut Context<'_>) -> bool {
        let Rewind::UnderWay { step, next } = self.rewind else { return false };
        let Some(chunk) = self.chunks.get_mut(next as usize) else {
            self.rewind = Rewind::NotNeeded;
            return false;
        };
        match step {
            Some(step) => {
                if self.exchange.rewind_chunk(next, step) == RewoundTo::Copy {
                    chunk.parameters = chunk.copy.unwrap_or_default();
                }
                context.ledger.went_back(chunk.id, step, chunk.parameters);
            }
            None => {
                self.exchange.begin_chunk_anew(next);
                (chunk.parameters, chunk.copy) = (0, None);
                context.ledger.began_anew(chunk.id);
            }
        }
        self.rewind = Rewind::UnderWay { step, next: next + 1 };
        true
    }

    /// Drops the sums of the steps under way.
    pub(super) fn drop_sums(&mut self) {
        self.chunks.iter_mut().for_each(|chunk| chunk.sum.clear());
    }

    /// Takes every answer that is owed by a stream that works, with the rank that gets it.
    pub(super) fn take_due_answers(&mut self) -> Vec<(u32, Header, Content)> {
        let mut answers = Vec::new();
        for (rank, port) in (0..).zip(&mut self.ports) {
            if port.stream.is_none() || port.is_cut || port.is_muted {
                continue;
            }
            for (slot, answer) in std::mem::take(&mut port.owed) {
                let chunk = &self.chunks[slot as usize];
                let step = self.exchange.answer_version(slot, rank);
                self.exchange.answer_begun(slot, rank);
                answers.push(match answer {
                    Answer::Parameters => {
                        let (operation, length) = (Operation::Parameters, chunk.length);
                        let header = Header { operation, codec: Codec::F32, chunk: chunk.id, step, length };
                        (rank, header, Content::Parameters(chunk.parameters))
                    }
                    Answer::Applied | Answer::State(_) => {
                        let header = Header { chunk: chunk.id, step, ..Header::bare(Operation::Applied) };
                        (rank, header, Content::Nothing)
                    }
                });
            }
        }
        answers
    }
}
