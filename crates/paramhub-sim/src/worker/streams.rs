//! The streams of a worker: how each is opened, opened again, and closed.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use paramhub_core::auth::Incarnation;
use paramhub_core::composition::Composed;
use paramhub_core::liveness::PeerLiveness;
use paramhub_core::placement::{HubShape, Route, RouteId};
use paramhub_core::resuming::{AfterRound, Attempts, Cuts, StreamEnd};
use paramhub_core::wire::{
    Attempt, CHALLENGE_BYTES, Caller, Capabilities, Header, Hello, Operation, Refusal,
};
use paramhub_core::worker_job::{Consequence, Reopening};

use super::Worker;
use crate::job::{NAMESPACE, hub_at};
use crate::member::Joined;
use crate::message::{Content, Message};
use crate::network::{Arrival, Process, StreamId};
use crate::world::{Context, Wake};

/// How long connection and handshake may take before a stream is dialled once more.
const PATIENCE: Duration = Duration::from_secs(4);
/// How long the handshake of a first stream may take.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// The pause before a hub that is not ready is dialled again.
const BUSY_PAUSE: Duration = Duration::from_millis(50);

/// The stream to a route.
pub(super) struct Lane {
    pub(super) hub: Process,
    pub(super) route: RouteId,
    pub(super) state: LaneState,
    /// The stream from which frames come.
    pub(super) stream: Option<StreamId>,
    /// The number of the newest stream.
    pub(super) attempts: u32,
    /// A stream that was replaced. It stays open until a frame comes on the new one.
    pub(super) retired: Option<StreamId>,
    /// Streams that were dialled in vain; they stay open as long.
    pub(super) unheard: Vec<StreamId>,
    /// The slots whose requests are to be sent.
    pub(super) ready: BTreeSet<u32>,
    pub(super) control: VecDeque<(Header, Content)>,
    pub(super) liveness: PeerLiveness,
    pub(super) has_ended_sending: bool,
    /// How often the stream was cut and opened again.
    pub(super) cuts: Cuts,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum LaneState {
    /// The first stream is being opened.
    Opening(StreamId),
    Open,
    /// Another stream is being opened in place of one that broke; there is none while a pause lasts.
    Resuming(Attempts, Option<StreamId>),
    Closed,
}

impl Worker {
    /// Opens the first streams to all hubs.
    pub(super) fn open_all(&mut self, context: &mut Context<'_>) {
        let lane = |(route, place): (RouteId, Route), hubs: &[HubShape]| Lane {
            hub: Process::Hub(hub_at(&hubs[usize::from(place.hub)])),
            route,
            state: LaneState::Closed,
            stream: None,
            attempts: 0,
            retired: None,
            unheard: Vec::new(),
            ready: BTreeSet::new(),
            control: VecDeque::new(),
            liveness: PeerLiveness::new(context.instant()),
            has_ended_sending: false,
            cuts: Cuts::default(),
        };
        let composed = self.joined().composed.clone();
        let hubs = &composed.composition.sites[0].hubs;
        self.lanes = routes(&composed).map(|route| lane(route, hubs)).collect();
        for index in 0..self.lanes.len() {
            self.open(index, context);
        }
    }

    /// Opens streams to all hubs as another process of the rank, which its hubs must refuse.
    pub(crate) fn dial_as_twin(&self, context: &mut Context<'_>) {
        let twin = Process::Twin(self.rank);
        for lane in &self.lanes {
            let stream = context.network.open(twin, lane.hub);
            let hello = Hello { incarnation: Incarnation([255; 16]), ..self.hello(lane.route, 0) };
            context.send(stream, twin, Message::Hello(Box::new(hello)));
        }
    }

    /// What the worker says first on a stream.
    fn hello(&self, route: RouteId, attempt: u32) -> Hello {
        let Joined { composed, epoch, .. } = self.joined();
        let placement = &composed.placements[0];
        let place = placement.routes()[usize::from(route)];
        Hello {
            caller: Caller::Worker { rank: self.rank, shares_parameters: false },
            interface: place.interface,
            core: place.core,
            standby_route: None,
            offered: Capabilities::default(),
            required: Capabilities::default(),
            attempt: Attempt::Numbered { epoch: *epoch, number: attempt },
            namespace: NAMESPACE,
            incarnation: self.member.incarnation(),
            placement: *placement.hash().as_bytes(),
            challenge: [0; CHALLENGE_BYTES],
        }
    }

    /// Opens the first stream of a lane.
    pub(super) fn open(&mut self, index: usize, context: &mut Context<'_>) {
        let stream = self.dial(index, 0, context);
        self.lanes[index].state = LaneState::Opening(stream);
        context.wake_in(self.process, HANDSHAKE, Wake::DialTimeout { lane: index, stream });
    }

    fn dial(&mut self, index: usize, attempt: u32, context: &mut Context<'_>) -> StreamId {
        let lane = &self.lanes[index];
        let stream = context.network.open(self.process, lane.hub);
        context.trace(|| {
            format!("{:?} dials {stream:?} to {:?} as attempt {attempt}", self.process, lane.route)
        });
        let hello = self.hello(lane.route, attempt);
        context.send(stream, self.process, Message::Hello(Box::new(hello)));
        stream
    }

    /// A hub answers the Hello of a stream.
    pub(super) fn greeted(
        &mut self,
        index: usize,
        stream: StreamId,
        arrival: Arrival,
        context: &mut Context<'_>,
    ) {
        let lane = &mut self.lanes[index];
        match (lane.state, arrival) {
            (LaneState::Opening(_), Arrival::Message(Message::Welcome)) => {
                (lane.stream, lane.state) = (Some(stream), LaneState::Open);
                lane.liveness = PeerLiveness::new(context.instant());
            }
            (LaneState::Opening(_), Arrival::Message(Message::Refused(Refusal::Busy, _))) => {
                context.wake_in(self.process, BUSY_PAUSE, Wake::Redial(index));
            }
            (LaneState::Opening(_), Arrival::Message(Message::Refused(Refusal::Stale, why)))
                if self.plan.rewind_every.is_some() =>
            {
                // It has joined before all ranks went back.
                let cause = self.cause(why, None);
                self.rewound.push(cause.error.clone());
                self.give_up(cause, context);
            }
            (LaneState::Opening(_), Arrival::Message(Message::Refused(_, why))) => {
                let cause = self.cause(format!("it was refused: {why}"), None);
                self.give_up(cause, context);
            }
            (
                LaneState::Opening(_),
                Arrival::Closed | Arrival::Broken | Arrival::Reset | Arrival::Refused,
            ) => {
                let hub = lane.hub;
                let cause = self.loss(hub, format!("a stream to {hub:?} broke before it was open"), None);
                self.give_up(cause, context);
            }
            (LaneState::Resuming(..), Arrival::Message(Message::Welcome)) => {
                self.reopened(index, Reopening::Opened(stream), context);
            }
            (LaneState::Resuming(attempts, _), Arrival::Message(Message::Refused(refusal, why))) => {
                if refusal == Refusal::Busy {
                    return self.dialled_in_vain(index, attempts, false, context);
                }
                if refusal == Refusal::Stale && self.plan.rewind_every.is_some() {
                    // All ranks have gone back, and this one has not heard of it by another stream yet.
                    let cause = self.cause(why, None);
                    self.rewound.push(cause.error.clone());
                    return self.reopened(index, Reopening::Failed(cause), context);
                }
                let hub = (refusal == Refusal::JobEnded).then_some(());
                let cause = self.cause(format!("it was refused: {why}"), hub.map(|()| why));
                self.reopened(index, Reopening::Failed(cause), context);
            }
            (LaneState::Resuming(attempts, _), Arrival::Closed | Arrival::Broken | Arrival::Reset) => {
                self.dialled_in_vain(index, attempts, false, context);
            }
            (LaneState::Resuming(attempts, _), Arrival::Refused) => {
                self.dialled_in_vain(index, attempts, true, context);
            }
            _ => {}
        }
    }

    /// A lane's stream has ended, which may be its path's fault.
    pub(super) fn cut(&mut self, index: usize, end: StreamEnd, context: &mut Context<'_>) {
        let patience = self.job.tries(end);
        match patience.filter(|&patience| self.lanes[index].cuts.may_retry(context.instant(), patience)) {
            Some(patience) => self.resume(index, patience, context),
            None => self.end_lane(index, &format!("{end:?}"), context),
        }
    }

    /// Opens a lane's stream again. The old one stays open until a frame comes on the new one.
    pub(super) fn resume(&mut self, index: usize, patience: Duration, context: &mut Context<'_>) {
        if matches!(self.lanes[index].state, LaneState::Open) {
            self.redial(index, Attempts::new(context.instant(), patience), context);
        }
    }

    pub(super) fn redial(&mut self, index: usize, attempts: Attempts, context: &mut Context<'_>) {
        let now = context.instant();
        if attempts.are_over(now) {
            return self.dialled_in_vain(index, attempts, false, context);
        }
        self.lanes[index].attempts += 1;
        let stream = self.dial(index, self.lanes[index].attempts, context);
        self.lanes[index].state = LaneState::Resuming(attempts, Some(stream));
        let patience = attempts.by(now, PATIENCE).saturating_duration_since(now);
        context.wake_in(self.process, patience, Wake::DialTimeout { lane: index, stream });
    }

    pub(super) fn dialled_in_vain(
        &mut self,
        index: usize,
        attempts: Attempts,
        is_hub_gone: bool,
        context: &mut Context<'_>,
    ) {
        match attempts.after_round(context.instant(), self.outcome.is_some(), is_hub_gone) {
            AfterRound::Again(pause) => {
                self.lanes[index].state = LaneState::Resuming(attempts, None);
                context.wake_in(self.process, pause, Wake::Redial(index));
            }
            AfterRound::GiveUp => {
                let hub = self.lanes[index].hub;
                let cause = self.loss(hub, format!("it is cut off from {hub:?}"), None);
                self.reopened(index, Reopening::Failed(cause), context);
            }
        }
    }

    fn reopened(&mut self, index: usize, reopening: Reopening<StreamId, String>, context: &mut Context<'_>) {
        let is_closed = matches!(self.lanes[index].state, LaneState::Closed);
        match self.job.reopened(reopening, is_closed, context.instant()) {
            Consequence::Ignore => {}
            Consequence::Close => self.close_lane(index, context),
            Consequence::Announce(announcement) => self.announce(announcement, context),
            Consequence::Replace { stream, leaves } => {
                let lane = &mut self.lanes[index];
                lane.retired = lane.stream.replace(stream);
                lane.state = LaneState::Open;
                lane.liveness = PeerLiveness::new(context.instant());
                lane.cuts.reopened(context.instant());
                lane.has_ended_sending = false;
                let placement = &self.joined.as_ref().expect("it has streams").composed.placements[0];
                let again = self.requests.resend_route(placement, lane.route);
                lane.ready.extend(again);
                if leaves {
                    lane.control.push_back((Header::bare(Operation::Leave), Content::Nothing));
                }
            }
        }
    }

    pub(super) fn end_lane(&mut self, index: usize, reason: &str, context: &mut Context<'_>) {
        self.close_lane(index, context);
        let hub = self.lanes[index].hub;
        let cause = self.loss(hub, format!("it lost {hub:?}: {reason}"), Some(format!("{hub:?}")));
        self.job.stream_lost(cause, context.instant());
    }

    pub(super) fn close_lane(&mut self, index: usize, context: &mut Context<'_>) {
        let lane = &mut self.lanes[index];
        let dialled = match std::mem::replace(&mut lane.state, LaneState::Closed) {
            LaneState::Opening(stream) | LaneState::Resuming(_, Some(stream)) => Some(stream),
            _ => None,
        };
        let streams = [lane.stream.take(), lane.retired.take(), dialled].into_iter().flatten();
        for stream in streams.chain(lane.unheard.drain(..)) {
            context.close(stream, self.process);
        }
    }
}

/// The routes that carry chunks.
fn routes(composed: &Composed) -> impl Iterator<Item = (RouteId, Route)> {
    let placement = &composed.placements[0];
    let all = (0..).zip(placement.routes().iter().copied());
    all.filter(|&(id, _)| !placement.chunks(id).is_empty())
}
