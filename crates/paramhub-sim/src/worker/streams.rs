//! The streams of a worker: how each is opened, opened again, and closed.

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use paramhub_core::auth::Incarnation;
use paramhub_core::composition::Composed;
use paramhub_core::liveness::PeerLiveness;
use paramhub_core::placement::{Route, RouteId};
use paramhub_core::resuming::{
    AfterRound, Attempts, BrokenPath, Cuts, HANDSHAKE_OF_TWO, RESUME, StreamEnd, path_order,
};
use paramhub_core::wire::{
    Attempt, CHALLENGE_BYTES, Caller, Capabilities, Header, Hello, Operation, Refusal,
};
use paramhub_core::worker_job::{Consequence, FailureCause, Reopening};

use super::Worker;
use super::share_hubs::{Asked, Asking, ShareHubs};
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

/// How long a worker tries the hubs that it knows before it asks the manager for others.
const ASKS_AFTER: Duration = Duration::from_millis(200);
/// How long a hub may say that a job has ended before a worker believes it whose job may go on at another hub.
const ENDED_AFTER: Duration = Duration::from_secs(3);

/// The stream to a route.
pub(super) struct Lane {
    /// The hub of the newest stream.
    pub(super) hub: Process,
    pub(super) route: RouteId,
    /// The route in the placement.
    placed: Route,
    /// The hubs that have the route: the one that serves it, and its standby if it has one.
    places: Vec<RoutePlace>,
    /// How often the shares had changed when these were its places.
    pub(super) seen: u32,
    /// When the stream was lost that is opened again, if it is.
    resuming_since: Instant,
    /// What waits for the manager's answer.
    pub(super) asking: Option<Asking>,
    /// The place that is dialled.
    at: usize,
    round: Round,
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

/// Where a hub has a route.
#[derive(Clone, Copy, Debug)]
pub(super) struct RoutePlace {
    pub(super) hub: Process,
    pub(super) interface: u16,
    pub(super) core: u16,
    /// The route, if the hub is not its own in the placement.
    pub(super) standby_route: Option<RouteId>,
}

/// What the hubs that have a route have said since they were all dialled last.
#[derive(Default)]
struct Round {
    tried: usize,
    /// How many of them do not run any more.
    gone: usize,
    /// Since when hubs have said that the job has ended, and how.
    ended: Option<(Instant, FailureCause<String>)>,
    /// Whether another hub has come to the address of one of them: it does not know the job, or has another part in it.
    is_strange: bool,
    /// Whether one of them is about to serve the route, or to end its part.
    is_waited_for: bool,
    /// When the first of them was dialled.
    begun: Option<Instant>,
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
        let composed = self.joined().composed.clone();
        let hubs = composed.composition.sites[0].hubs.clone();
        let share_hubs = ShareHubs::new(self.process, hubs.clone(), self.joined().shares.clone());
        let lane = |(route, place): (RouteId, Route)| Lane {
            hub: Process::Hub(hub_at(&hubs[usize::from(place.hub)])),
            route,
            placed: place,
            places: share_hubs.places(route, &place),
            seen: 0,
            resuming_since: context.instant(),
            asking: None,
            at: 0,
            round: Round::default(),
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
        self.lanes = routes(&composed).map(lane).collect();
        self.share_hubs = self.plan.resuming.has_standbys.then_some(share_hubs);
        for index in 0..self.lanes.len() {
            self.open(index, context);
        }
    }

    /// Opens streams to all hubs as another process of the rank, which its hubs must refuse.
    pub(crate) fn dial_as_twin(&self, context: &mut Context<'_>) {
        let twin = Process::Twin(self.rank);
        for lane in &self.lanes {
            let stream = context.network.open(twin, lane.hub);
            let hello = Hello { incarnation: Incarnation([255; 16]), ..self.hello(lane, 0) };
            context.send(stream, twin, Message::Hello(Box::new(hello)));
        }
    }

    /// What the worker says first on a stream.
    fn hello(&self, lane: &Lane, attempt: u32) -> Hello {
        let Joined { composed, epoch, .. } = self.joined();
        let placement = &composed.placements[0];
        let place = lane.places[lane.at];
        Hello {
            caller: Caller::Worker { rank: self.rank, shares_parameters: false },
            interface: place.interface,
            core: place.core,
            standby_route: place.standby_route,
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
        let stream = context.network.open(self.process, lane.places[lane.at].hub);
        context.trace(|| {
            let (route, hub) = (lane.route, lane.places[lane.at].hub);
            format!("{:?} dials {stream:?} to route {route} at {hub:?} as attempt {attempt}", self.process)
        });
        let hello = self.hello(lane, attempt);
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
                    self.lanes[index].round.is_waited_for = true;
                    return self.dialled_in_vain(index, attempts, false, context);
                }
                if self.plan.resuming.has_standbys {
                    return self.refused_by_one_of_two(index, attempts, (refusal, why), context);
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
        let may_retry = |patience: &Duration| {
            self.lanes[index].cuts.may_retry(context.instant(), (*patience).min(RESUME))
        };
        match patience.filter(may_retry) {
            Some(patience) => self.resume(index, BrokenPath::after(end), patience, context),
            None => self.end_lane(index, &format!("{end:?}"), context),
        }
    }

    /// Opens a lane's stream again. The old one stays open until a frame comes on the new one.
    pub(super) fn resume(
        &mut self,
        index: usize,
        broken: BrokenPath,
        patience: Duration,
        context: &mut Context<'_>,
    ) {
        let lane = &mut self.lanes[index];
        if matches!(lane.state, LaneState::Open) {
            let is_same_hub_first = path_order(broken, true, true) < path_order(broken, false, true);
            if !is_same_hub_first {
                lane.at = (lane.at + 1) % lane.places.len();
            }
            lane.round = Round::default();
            (lane.asking, lane.resuming_since) = (None, context.instant());
            self.redial(index, Attempts::new(context.instant(), patience), context);
        }
    }

    pub(super) fn redial(&mut self, index: usize, attempts: Attempts, context: &mut Context<'_>) {
        let now = context.instant();
        if attempts.are_over(now) {
            return self.dialled_in_vain(index, attempts, false, context);
        }
        let lane = &mut self.lanes[index];
        if let Some(hubs) =
            self.share_hubs.as_ref().filter(|hubs| hubs.changes != lane.seen && lane.round.tried == 0)
        {
            (lane.places, lane.seen, lane.at) = (hubs.places(lane.route, &lane.placed), hubs.changes, 0);
        }
        if lane.round.tried == 0 {
            lane.round.begun = Some(now);
        }
        lane.attempts += 1;
        let stream = self.dial(index, self.lanes[index].attempts, context);
        self.lanes[index].state = LaneState::Resuming(attempts, Some(stream));
        let patience = match self.plan.resuming.has_standbys {
            true => attempts.connect_timeout() + HANDSHAKE_OF_TWO,
            false => PATIENCE,
        };
        let patience = attempts.by(now, patience).saturating_duration_since(now);
        context.wake_in(self.process, patience, Wake::DialTimeout { lane: index, stream });
    }

    pub(super) fn dialled_in_vain(
        &mut self,
        index: usize,
        attempts: Attempts,
        is_hub_gone: bool,
        context: &mut Context<'_>,
    ) {
        let lane = &mut self.lanes[index];
        lane.round.tried += 1;
        lane.round.gone += usize::from(is_hub_gone);
        lane.at = (lane.at + 1) % lane.places.len();
        if lane.round.tried < lane.places.len() && !attempts.are_over(context.instant()) {
            return self.redial(index, attempts, context);
        }
        let Round { tried, gone, is_strange, is_waited_for, begun, .. } = lane.round;
        (lane.round.tried, lane.round.gone) = (0, 0);
        (lane.round.is_strange, lane.round.is_waited_for) = (false, false);
        let now = context.instant();
        let is_in_vain = gone == tried || is_strange || lane.round.ended.is_some();
        let since = begun.filter(|_| is_in_vain).unwrap_or(lane.resuming_since);
        let asking = Asking { attempts, tried, gone, is_waited_for, since };
        // The other hub mostly takes over within some time. Before this worker gives up, it asks once more.
        let asks = is_in_vain || now.duration_since(lane.resuming_since) >= ASKS_AFTER;
        if self.plan.resuming.has_standbys && asks {
            return self.ask_manager(index, asking, context);
        }
        self.asked(index, asking, None, context);
    }

    /// The manager has been asked where the chunks of a lane are, or need not be.
    pub(super) fn asked(
        &mut self,
        index: usize,
        Asking { attempts, tried, gone, is_waited_for, .. }: Asking,
        asked: Option<Asked>,
        context: &mut Context<'_>,
    ) {
        let lane = &mut self.lanes[index];
        if asked == Some(Asked::Elsewhere) {
            lane.round.ended = None;
            return self.redial(index, attempts, context);
        }
        if asked == Some(Asked::Over) && lane.round.ended.is_none() && !is_waited_for {
            let hub = lane.hub;
            let cause = self.loss(hub, format!("it is cut off from {hub:?}, and the job has ended"), None);
            return self.reopened(index, Reopening::Failed(cause), context);
        }
        // If the manager is away, another hub may have become the standby, and take over when it is back.
        let are_known = asked != Some(Asked::NoAnswer);
        // Whatever the hubs that are there have said is said by all of them.
        if let Some((_, cause)) = lane.round.ended.take_if(|_| are_known && gone + 1 >= tried) {
            return self.reopened(index, Reopening::Failed(cause), context);
        }
        let is_hub_gone = gone == tried && are_known;
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

    /// One of the two hubs of a route refuses it. It may have lost sight of the job, which goes on at the other, or it may
    /// be a hub that has come back at the address of one of the two.
    fn refused_by_one_of_two(
        &mut self,
        index: usize,
        attempts: Attempts,
        (refusal, why): (Refusal, String),
        context: &mut Context<'_>,
    ) {
        if matches!(refusal, Refusal::Route | Refusal::WrongNonce) {
            self.lanes[index].round.is_strange = true;
            return self.dialled_in_vain(index, attempts, false, context);
        }
        let now = context.instant();
        let cause = self.cause(format!("it was refused: {why}"), Some(why));
        let (since, _) = *self.lanes[index].round.ended.get_or_insert((now, cause.clone()));
        match now.duration_since(since) >= ENDED_AFTER {
            true => self.reopened(index, Reopening::Failed(cause), context),
            false => self.dialled_in_vain(index, attempts, false, context),
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
                lane.hub = lane.places[lane.at].hub;
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
