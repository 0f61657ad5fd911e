//! The streams of a job to a hub: what the acceptor and the cores do with each.

use paramhub_core::auth::Incarnation;
use paramhub_core::composition::Neighbour;
use paramhub_core::job_control::{CoreEvent, FaultCause};
use paramhub_core::liveness::{HEARTBEAT, LivenessChange, LivenessRules, PeerLiveness};
use paramhub_core::placement::RouteId;
use paramhub_core::resuming::{HubWait, StreamEnd};
use paramhub_core::service::CauseKind;
use paramhub_core::stream_admission::{StreamOrigin, StreamPlace};
use paramhub_core::wire::{Attempt, Header, Hello, Operation, Refusal};

use super::job::HubJob;
use super::{Hub, PASSING};
use crate::message::{Content, Frame, Message};
use crate::network::{Arrival, StreamId};
use crate::world::{Context, Plant, Wake};

impl Hub {
    /// An end of a stream learns something.
    pub(super) fn stream_arrived(&mut self, stream: StreamId, arrival: Arrival, context: &mut Context<'_>) {
        if let Some(job) = &mut self.job {
            if let Some(waiting) = job.admitted.get_mut(&stream) {
                return waiting.push(arrival);
            }
            if let Some((route, rank)) = job.port_of(stream) {
                return self.port_arrived(route, rank, arrival, context);
            }
        }
        if let Arrival::Message(Message::Hello(hello)) = arrival {
            self.greet(stream, &hello, context);
        }
    }

    fn port_arrived(&mut self, route: RouteId, rank: u32, arrival: Arrival, context: &mut Context<'_>) {
        match arrival {
            Arrival::Message(Message::Frame(frame)) => self.take_frame(route, rank, frame, context),
            Arrival::Closed => self.closed(route, rank, context),
            Arrival::Broken => self.cut(route, rank, StreamEnd::PathFailed, context),
            Arrival::Reset => self.cut(route, rank, StreamEnd::Reset, context),
            Arrival::Message(_) | Arrival::Refused => {}
        }
    }

    /// The job to which a stream belongs.
    fn job_mut(&mut self) -> &mut HubJob {
        self.job.as_mut().expect("a stream that is admitted belongs to a job")
    }

    /// The acceptor: admits a stream or refuses it.
    fn greet(&mut self, stream: StreamId, hello: &Hello, context: &mut Context<'_>) {
        let interfaces = 0..hello.interface + 1;
        let origin = StreamOrigin::Interfaces { interfaces, is_encrypted: false };
        let hello = self.job.as_mut().map_or(*hello, |job| job.planted(context.plant, hello));
        let placed = match (&self.refused, self.job.as_mut().filter(|job| job.is_open)) {
            (Some(why), _) => Err((Refusal::JobEnded, why.clone())),
            (None, None) => Err((Refusal::WrongNonce, "the hub does not know the job".into())),
            (None, Some(job)) => job.streams.place(&hello, &origin).map(|place| (job, place)),
        };
        match placed {
            Ok((job, place)) => {
                job.streams.take(&place, &hello, &origin);
                job.admitted.insert(stream, Vec::new());
                context.send(stream, self.process, Message::Welcome);
                let passing = context.random.time(&PASSING);
                context.wake_in(self.process, passing, Wake::Adopt { stream, place });
            }
            Err((refusal, why)) => {
                context.send(stream, self.process, Message::Refused(refusal, why));
                context.close(stream, self.process);
            }
        }
    }

    /// The core takes a stream, and in place of another drops that.
    pub(super) fn adopt(&mut self, stream: StreamId, place: StreamPlace, context: &mut Context<'_>) {
        // All members are workers, whose ports are their ranks.
        let StreamPlace { route, port: rank, epoch, attempt, resumed_by } = place;
        let process = self.process;
        // A stream of a job that was allocated before the present one is not among those that were admitted.
        let admitted = self.job.as_mut().and_then(|job| Some((job.admitted.remove(&stream)?, job)));
        let Some((arrivals, job)) = admitted else { return context.close(stream, process) };
        let is_planted = context.plant == Some(Plant::StaleStream);
        let is_over = job.is_forgotten;
        let newest = job.port(route, rank).newest;
        if newest.is_some_and(|newest| (epoch, attempt) < newest) && !is_planted || is_over {
            // It was admitted before all ranks have gone back.
            if let Some(notice) = job.route(route).notice.clone() {
                let (header, content) = (Header::bare(Operation::Rewound), Content::Rewound(notice));
                context.send(stream, process, Message::Frame(Frame { header, content }));
            }
            return context.close(stream, process);
        }
        let port = job.port(route, rank);
        context.trace(|| format!("{process:?} adopts {stream:?}, attempt {attempt} of rank {rank}"));
        port.newest = Some((epoch, attempt));
        let before = port.stream.replace(stream);
        let had_stream = before.is_some();
        if let Some(before) = before {
            context.close(before, process);
        }
        (port.is_cut, port.is_muted) = (false, false);
        port.liveness = Some(PeerLiveness::new(context.instant()));
        if resumed_by.is_some() || had_stream {
            port.owed.clear();
            if context.plant != Some(Plant::NoResume) {
                job.route(route).exchange.resume(rank);
            }
            // The worker keeps the old stream until a frame arrives on the new one.
            self.send(route, rank, Header::bare(Operation::Heartbeat), Content::Nothing, context);
            self.handle_core(CoreEvent::Moved { neighbour: Neighbour::Worker(rank), by: 0 }, context);
        }
        arrivals.into_iter().for_each(|arrival| self.stream_arrived(stream, arrival, context));
    }

    fn take_frame(&mut self, route: RouteId, rank: u32, frame: Frame, context: &mut Context<'_>) {
        let now = context.instant();
        let job = self.job_mut();
        let port = job.port(route, rank);
        if port.is_muted || port.is_cut {
            return;
        }
        if let Some(liveness) = &mut port.liveness {
            liveness.heard(now);
        }
        let header = frame.header;
        let taken = match header.operation {
            Operation::Heartbeat => Ok(()),
            Operation::Leave => return self.left(route, rank, context),
            Operation::Failure => {
                let Content::Failure(failure) = frame.content else { unreachable!("a failure has a reason") };
                let message = format!("rank {rank} gave up: {}", failure.message);
                return self.fault(route, rank, rank, message, FaultCause::Kind(CauseKind::GaveUp), context);
            }
            _ => {
                let slot = job.slot(header.chunk);
                job.route(route).take_request(slot, rank, &header, &frame.content, context)
            }
        };
        if let Err(violation) = taken {
            context.ledger.violate(|| format!("rank {rank} broke the rules at {header:?}: {violation}"));
        }
        self.answer(route, context);
    }

    /// Sends every answer that is owed by a stream that works.
    pub(super) fn answer(&mut self, id: RouteId, context: &mut Context<'_>) {
        let answers = self.job_mut().route(id).take_due_answers();
        for (rank, header, content) in answers {
            self.send(id, rank, header, content, context);
        }
    }

    pub(super) fn send(
        &mut self,
        route: RouteId,
        rank: u32,
        header: Header,
        content: Content,
        context: &mut Context<'_>,
    ) {
        let process = self.process;
        let port = self.job_mut().port(route, rank);
        let Some(stream) = port.stream else { return };
        if let Some(liveness) = &mut port.liveness {
            liveness.sent(context.instant());
        }
        context.send(stream, process, Message::Frame(Frame { header, content }));
    }

    /// A rank has left by a stream.
    fn left(&mut self, id: RouteId, rank: u32, context: &mut Context<'_>) {
        let route = self.job_mut().route(id);
        if std::mem::replace(&mut route.ports[rank as usize].has_left, true) {
            return;
        }
        let ports = &mut route.ports;
        let left = route.exchange.leave(rank, |slot, member, answer| {
            ports[member as usize].owed.insert(slot, answer);
        });
        if let Err(left) = left {
            let message = format!("rank {} left the job, but others wait for {}", left.member, left.awaited);
            return self.fault(id, rank, left.member, message, FaultCause::Kind(CauseKind::Known), context);
        }
        self.handle_core(CoreEvent::Left { route: id, port: rank }, context);
    }

    /// The other end has closed a stream.
    fn closed(&mut self, route: RouteId, rank: u32, context: &mut Context<'_>) {
        let port = self.job_mut().port(route, rank);
        if !port.has_left && !port.is_muted {
            return self.lose(route, rank, "it closed its stream", context);
        }
        if let Some(stream) = port.stream.take() {
            context.close(stream, self.process);
        }
    }

    /// A stream was cut: the core waits for another in its place, or its worker is lost.
    fn cut(&mut self, route: RouteId, rank: u32, end: StreamEnd, context: &mut Context<'_>) {
        let wait = self.plan.resuming.hub_waits(end);
        let process = self.process;
        let port = self.job_mut().port(route, rank);
        if port.is_cut || port.is_muted {
            return;
        }
        if port.has_left {
            return self.closed(route, rank, context);
        }
        let Some(wait) = wait.filter(|_| context.plant != Some(Plant::CutsLose)) else {
            return self.lose(route, rank, &format!("its stream ended: {end:?}"), context);
        };
        port.is_cut = true;
        if let (HubWait::For(grace), Some(stream)) = (wait, port.stream) {
            context.wake_in(process, grace, Wake::CutOver { stream });
        }
    }

    /// The time is over in which another stream could take the place of one that was cut.
    pub(super) fn cut_over(&mut self, stream: StreamId, context: &mut Context<'_>) {
        let Some((route, rank)) = self.job.as_ref().and_then(|job| job.port_of(stream)) else { return };
        let port = self.job_mut().port(route, rank);
        if port.is_cut && !port.is_muted {
            self.lose(route, rank, "its stream was cut, and it has not come back", context);
        }
    }

    fn lose(&mut self, route: RouteId, rank: u32, why: &str, context: &mut Context<'_>) {
        let message = format!("rank {rank} was lost: {why}");
        self.fault(route, rank, rank, message, FaultCause::Kind(CauseKind::PeerLost), context);
        if let Some(stream) = self.job_mut().port(route, rank).stream.take() {
            context.close(stream, self.process);
        }
    }

    /// The job cannot go on because of `culprit`, as the stream of `rank` shows.
    fn fault(
        &mut self,
        route: RouteId,
        rank: u32,
        culprit: u32,
        message: String,
        cause: FaultCause,
        context: &mut Context<'_>,
    ) {
        self.job_mut().port(route, rank).is_muted = true;
        let event = CoreEvent::Faulted { culprit: Neighbour::Worker(culprit), message, cause };
        self.handle_core(event, context);
    }

    pub(super) fn tick(&mut self, context: &mut Context<'_>) {
        let now = context.instant();
        let rules = LivenessRules::of_stream(HEARTBEAT, self.plan.dead_after);
        let pause = self.own_pauses.turn(now);
        let (mut due, mut dead) = (Vec::new(), Vec::new());
        for (&id, route) in self.job.iter_mut().flat_map(|job| &mut job.routes) {
            for (rank, port) in (0..).zip(&mut route.ports) {
                let Some(liveness) = port.liveness.as_mut().filter(|_| port.stream.is_some()) else {
                    continue;
                };
                liveness.forgive(pause, now);
                if port.is_muted {
                    continue;
                }
                if !port.is_cut && liveness.is_heartbeat_due(now, &rules) {
                    due.push((id, rank));
                }
                if !port.has_left
                    && let Some(LivenessChange::Dead(silence)) = liveness.check(now, &rules)
                {
                    dead.push((id, rank, silence));
                }
            }
        }
        for (route, rank) in due {
            self.send(route, rank, Header::bare(Operation::Heartbeat), Content::Nothing, context);
        }
        for (route, rank, silence) in dead {
            let message =
                format!("rank {rank} was lost: it has not been heard for {} s", silence.as_secs_f64());
            self.fault(route, rank, rank, message, FaultCause::Silence, context);
        }
        self.carry_out(context);
    }
}

impl HubJob {
    /// The Hello that is admitted in place of the one that came, if the hub is to have a fault: every stream is then
    /// newer than those that came before it.
    fn planted(&mut self, plant: Option<Plant>, hello: &Hello) -> Hello {
        self.planted += 1;
        let newest = Attempt::Numbered { epoch: self.epoch, number: (1 << 20) + self.planted };
        match plant {
            Some(Plant::StaleStream) if hello.attempt.resumes() => Hello { attempt: newest, ..*hello },
            Some(Plant::RankTwice) => Hello { attempt: newest, incarnation: Incarnation([0; 16]), ..*hello },
            _ => *hello,
        }
    }
}
