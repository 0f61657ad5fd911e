//! A route of a hub: the exchange of its chunks, and the streams that lead to it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use paramhub_core::between_sites::{self, Again, Departures};
use paramhub_core::chunk::ChunkId;
use paramhub_core::codec::Codec;
use paramhub_core::composition::{Composed, OptimizeAt, SiteId};
use paramhub_core::consistency::Consistency;
use paramhub_core::exchange::{
    Answer, Exchange, Fold, LeftWhileAwaited, ProtocolViolation, RewoundTo, Rules, SumAction, Update,
};
use paramhub_core::liveness::PeerLiveness;
use paramhub_core::placement::RouteId;
use paramhub_core::ports::{Ports, Side};
use paramhub_core::standbys::Role;
use paramhub_core::wire::{Header, Notice, Operation};

use super::new_standby::Copying;
use crate::job::JobPlan;
use crate::message::{Content, Contribution};
use crate::network::StreamId;
use crate::world::{Context, Plant};

/// A route: the chunks of one core, and the streams that lead to it.
pub(super) struct Route {
    pub(super) core: u16,
    pub(super) state: RouteState,
    /// The hub has nothing more to do with it.
    pub(super) is_given_up: bool,
    pub(super) exchange: Exchange,
    pub(super) chunks: Vec<Chunk>,
    /// Whose versions of the chunks these are: those of the site or, where two hubs have each chunk, of this hub.
    pub(super) copy: SiteId,
    /// Whether workers exchange with this hub.
    pub(super) serves: bool,
    /// Whether this site updates chunks whose owner is another.
    pub(super) optimizes_here: bool,
    /// Who is at the other end of each stream.
    pub(super) neighbours: Arc<Ports>,
    pub(super) ports: Vec<Port>,
    pub(super) departures: Departures,
    /// The position of its standby in the job, if this hub serves the route and has one.
    pub(super) standby: Option<u16>,
    /// The chunks that a new standby has still to get.
    pub(super) copying: Option<Copying>,
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

pub(super) struct Chunk {
    pub(super) id: ChunkId,
    pub(super) sum: Vec<Contribution>,
    /// The sum of the last update, for sites below.
    pub(super) total: Vec<Contribution>,
    /// The digest of the parameters.
    pub(super) parameters: u64,
    /// The same of the copy to which the chunk can go back.
    copy: Option<u64>,
    pub(super) length: u32,
}

/// The place of the stream of a worker, or of a route of another site.
#[derive(Default)]
pub(super) struct Port {
    pub(super) stream: Option<StreamId>,
    /// The epoch and the attempt of the newest stream that was passed on.
    pub(super) newest: Option<(u64, u32)>,
    /// The stream is broken, and another may replace it.
    pub(super) is_cut: bool,
    /// What still comes is dropped: the job is over, or its rank was at fault.
    pub(super) is_muted: bool,
    /// The chunks whose parameters to start from are to be sent to another site.
    pub(super) starts: BTreeSet<u32>,
    /// The answers that are due and, to a site above, sums.
    pub(super) owed: BTreeMap<u32, Answer>,
    /// To a standby: the workers that have left, of which it is to hear.
    pub(super) leavers: BTreeSet<u32>,
    /// To a site above: how far the hub's Leave is.
    pub(super) leave: Leave,
    pub(super) liveness: Option<PeerLiveness>,
}

/// How far a Leave is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Leave {
    #[default]
    NotDue,
    Due,
    Sent,
}

impl Chunk {
    /// Makes an update, whose contributions must be of processes that have come since an epoch. `keeps` says whether the
    /// parameters before it are copied.
    fn update(
        &mut self,
        site: SiteId,
        update: Update,
        keeps: bool,
        rewound_in: u64,
        context: &mut Context<'_>,
    ) {
        let mut sum = std::mem::take(&mut self.sum);
        if keeps {
            self.copy = Some(self.parameters);
        }
        self.parameters = context.ledger.updated((site, self.id), update.step, &mut sum, rewound_in);
        if sum.len() != update.contributions as usize {
            let step = update.step;
            context.ledger.violate(|| format!("the mean of step {step} divides by another number than came"));
        }
        self.total = sum;
    }
}

impl Route {
    /// The route `id` of a site, with these neighbours.
    pub(super) fn new(
        plan: &JobPlan,
        composed: &Composed,
        (site, id): (SiteId, RouteId),
        neighbours: &Arc<Ports>,
        first_workers: u32,
        core: u16,
    ) -> Route {
        let members = neighbours.members();
        let rules = Rules {
            workers: plan.workers,
            members,
            // Only a job of one site begins without some workers.
            first_members: members - (plan.workers - first_workers),
            first_site: neighbours.workers(),
            rank_0: neighbours.rank_0(),
            consistency: Consistency::Synchronous,
            reproducible: plan.reproducible,
            has_parameters: true,
            two_phase: false,
            quorum: plan.quorum,
            rewind_every: plan.rewind_every,
        };
        let chunk = |&id: &ChunkId| {
            let length = plan.map.extent(id).expect("a chunk of the job").bytes(Codec::F32);
            Chunk { id, sum: Vec::new(), total: Vec::new(), parameters: 0, copy: None, length }
        };
        Route {
            core,
            state: RouteState::Opening,
            is_given_up: false,
            exchange: Exchange::among_sites(rules, neighbours.reach(rules.consistency)),
            chunks: composed.placements[usize::from(site)].chunks(id).iter().map(chunk).collect(),
            copy: site,
            serves: true,
            optimizes_here: composed.composition.optimize_at == OptimizeAt::EverySite,
            ports: (0..neighbours.len()).map(|_| Port::default()).collect(),
            departures: Departures::new(neighbours, &(rules.first_members..members)),
            neighbours: neighbours.clone(),
            standby: None,
            copying: None,
            rewind: Rewind::NotNeeded,
            rewound_in: 0,
            notice: None,
        }
    }

    /// Sets what this hub is for the route, the number of its copy of the chunks, and its standby if it has one.
    pub(super) fn begin_as(&mut self, role: Role, copy: SiteId, standby: Option<u16>) {
        self.standby = standby;
        self.exchange.set_role(role);
        self.serves = matches!(role, Role::Serves { .. });
        self.copy = copy;
    }

    /// The member that contributes by a port; `None` for a site above.
    pub(super) fn member(&self, port: u32) -> Option<u32> {
        match self.neighbours.side(port) {
            Side::Worker(member) | Side::Below(member) => Some(member),
            Side::Above | Side::Standby | Side::Serving => None,
        }
    }

    /// Takes a frame about a chunk, as a shard does.
    pub(super) fn take_frame(
        &mut self,
        slot: u32,
        port: u32,
        header: &Header,
        content: Content,
        context: &mut Context<'_>,
    ) -> Result<(), ProtocolViolation> {
        match (header.operation, content) {
            (Operation::Initialise, content) => {
                self.initialise(slot, port, header.step, &content, context)?;
            }
            (Operation::Pull, _) => self.exchange.pull(slot, port, header.step)?,
            (Operation::PushPull, Content::Gradient(contribution)) => {
                self.contribute(slot, port, header.step, vec![contribution], context)?;
            }
            (Operation::PushPull, Content::Sum(sum)) => {
                self.contribute(slot, port, header.step, sum, context)?;
            }
            (Operation::Push, Content::Sum(sum)) => self.follow(slot, port, header.step, sum, context)?,
            (Operation::Applied, Content::Nothing) => self.acknowledged(slot, port, header.step, context)?,
            (Operation::Total, Content::Sum(total)) => {
                let then = self.exchange.lower(slot, header.step.wrapping_sub(1))?;
                self.chunks[slot as usize].sum = total;
                self.go_on(slot, then, context);
            }
            (Operation::Parameters, Content::Parameters(digest)) => {
                self.exchange.lower(slot, header.step.wrapping_sub(1))?;
                let chunk = &mut self.chunks[slot as usize];
                chunk.sum.clear();
                chunk.parameters = digest;
                context.ledger.lowered((self.copy, chunk.id), header.step, digest);
            }
            (other, content) => unreachable!("nobody sends {other:?} with {content:?}"),
        }
        self.mark_due_answers(slot);
        Ok(())
    }

    /// Takes parameters to start from, and passes them on to the other sites that have the chunk.
    fn initialise(
        &mut self,
        slot: u32,
        port: u32,
        version: u32,
        content: &Content,
        context: &mut Context<'_>,
    ) -> Result<(), ProtocolViolation> {
        let is_new = self.exchange.initialise(slot, self.member(port), version)?;
        if self.neighbours.side(port) == Side::Serving {
            self.ports[port as usize].owed.insert(slot, Answer::Applied);
        }
        if is_new {
            let chunk = &mut self.chunks[slot as usize];
            chunk.parameters = match *content {
                Content::Parameters(digest) if self.neighbours.side(port) == Side::Serving => {
                    context.ledger.copied((self.copy, chunk.id), version, digest)
                }
                _ => context.ledger.initialised((self.copy, chunk.id)),
            };
            for (to, there) in self.neighbours.to_sites() {
                let is_told = !self.departures.has_left(to) && self.neighbours.carries(to, there.side, slot);
                if to != port && is_told {
                    self.ports[to as usize].starts.insert(slot);
                }
            }
        }
        Ok(())
    }

    fn contribute(
        &mut self,
        slot: u32,
        port: u32,
        step: u32,
        contributions: Vec<Contribution>,
        context: &mut Context<'_>,
    ) -> Result<(), ProtocolViolation> {
        let member = self.member(port).expect("nothing is contributed from above");
        let is_counted_again = match context.plant {
            Some(Plant::RepeatCounted) => true,
            Some(Plant::SumCountedAgain) => member >= self.neighbours.workers(),
            _ => false,
        };
        let arrival = self.exchange.push(slot, member, step, Answer::Parameters)?;
        if arrival.fold != Fold::Drop || is_counted_again {
            self.chunks[slot as usize].sum.extend(contributions);
        }
        self.go_on(slot, arrival.then, context);
        Ok(())
    }

    /// Continues with a sum that lacks contributions, or that is complete and at its place.
    pub(super) fn go_on(&mut self, slot: u32, then: SumAction, context: &mut Context<'_>) {
        let chunk = &mut self.chunks[slot as usize];
        match then {
            SumAction::Raise
                if context.plant == Some(Plant::StandbyNotTold) && self.exchange.has_standby() =>
            {
                let version = self.exchange.step(slot) + 1;
                if let Ok(Some(then)) = self.exchange.acknowledged(slot, version) {
                    self.go_on(slot, then, context);
                }
            }
            SumAction::Raise => {
                if !self.exchange.has_standby() {
                    context.ledger.raised((self.copy, chunk.id), self.exchange.step(slot), &chunk.sum);
                }
                let above = self.neighbours.above(slot).expect("sums are raised where a site is above");
                self.ports[above as usize].owed.insert(slot, Answer::Parameters);
            }
            SumAction::Update(update) => {
                let keeps = self.exchange.keeps_version(slot);
                chunk.update(self.copy, update, keeps, self.rewound_in, context);
            }
            SumAction::Wait | SumAction::Repeated | SumAction::Late => {}
            SumAction::Make | SumAction::Hold => unreachable!("no job here has factors or two phases"),
        }
    }

    /// Another stream is in the place of that of a port.
    pub(super) fn resume(&mut self, port: u32, context: &Context<'_>) {
        let leaves_above = self.leaves_above(port);
        let state = &mut self.ports[port as usize];
        state.owed.clear();
        state.leave = if leaves_above { Leave::Due } else { Leave::NotDue };
        if context.plant == Some(Plant::NoResume) {
            return;
        }
        match self.neighbours.side(port) {
            Side::Worker(member) => self.exchange.resume(member),
            Side::Below(_) | Side::Above | Side::Standby | Side::Serving => {
                between_sites::resume(&mut self.exchange, &self.neighbours, port, |again| match again {
                    Again::Start(slot) => drop(state.starts.insert(slot)),
                    Again::Sum(_) if context.plant == Some(Plant::SumsNotSentAgain) => {}
                    Again::Sum(slot) => drop(state.owed.insert(slot, Answer::Parameters)),
                });
                self.pass_on_leaves_again(port);
            }
        }
    }

    /// Whether this hub leaves a site above by a port. It has left when that closes the stream.
    pub(super) fn leaves_above(&self, port: u32) -> bool {
        self.neighbours.side(port).takes_sums() && self.departures.has_left(port)
    }

    /// The neighbour at a port has left, or this hub leaves some above because of it.
    pub(super) fn leave(&mut self, port: u32) -> Result<(), LeftWhileAwaited> {
        let departure = self.departures.leave(&self.neighbours, port);
        for above in departure.above {
            self.copying = None;
            self.ports[above as usize].leave = Leave::Due;
        }
        let Some(member) = departure.member else { return Ok(()) };
        self.pass_on_leave(member);
        let (ports, neighbours) = (&mut self.ports, &self.neighbours);
        self.exchange.leave(member, |slot, member, answer| {
            ports[neighbours.of_member(slot, member) as usize].owed.insert(slot, answer);
        })
    }

    pub(super) fn mark_due_answers(&mut self, slot: u32) {
        let (ports, neighbours) = (&mut self.ports, &self.neighbours);
        self.exchange.mark_due_answers(slot, |member, answer| {
            ports[neighbours.of_member(slot, member) as usize].owed.insert(slot, answer);
        });
    }

    /// Ends the steps that wait for no member any more, as a shard does when the membership has changed.
    pub(super) fn end_steps(&mut self, context: &mut Context<'_>) {
        for slot in 0..self.chunks.len() as u32 {
            let chunk = &mut self.chunks[slot as usize];
            loop {
                if let Some(update) = self.exchange.end_if_complete(slot) {
                    chunk.update(self.copy, update, false, self.rewound_in, context);
                } else if self.exchange.skip_missed_steps(slot) {
                    context.ledger.skipped((self.copy, chunk.id), self.exchange.step(slot));
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
                context.ledger.went_back((self.copy, chunk.id), step, chunk.parameters);
            }
            None => {
                self.exchange.begin_chunk_anew(next);
                (chunk.parameters, chunk.copy) = (0, None);
                context.ledger.began_anew((self.copy, chunk.id));
            }
        }
        self.rewind = Rewind::UnderWay { step, next: next + 1 };
        true
    }

    /// Drops the sums of the steps under way.
    pub(super) fn drop_sums(&mut self) {
        self.chunks.iter_mut().for_each(|chunk| chunk.sum.clear());
    }
}
