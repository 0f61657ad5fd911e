//! The streams of a job to a hub: what the acceptor and the cores do with each.

use paramhub_core::auth::Incarnation;
use paramhub_core::between_sites;
use paramhub_core::composition::Neighbour;
use paramhub_core::exchange::ProtocolViolation;
use paramhub_core::job_control::{CoreEvent, FaultCause};
use paramhub_core::liveness::{LivenessChange, PeerLiveness};
use paramhub_core::placement::RouteId;
use paramhub_core::ports::Side;
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
            if let Some((route, port)) = job.port_of(stream) {
                return self.port_arrived(route, port, arrival, context);
            }
        }
        let arrival = self.link_arrived(stream, arrival, context);
        if let Some(Arrival::Message(Message::Hello(hello))) = arrival {
            self.greet(stream, &hello, context);
        }
    }

    fn port_arrived(&mut self, route: RouteId, port: u32, arrival: Arrival, context: &mut Context<'_>) {
        match arrival {
            Arrival::Message(Message::Frame(frame)) => self.take_frame(route, port, frame, context),
            Arrival::Closed => self.ended(route, port, StreamEnd::Closed, context),
            Arrival::Broken => self.ended(route, port, StreamEnd::PathFailed, context),
            Arrival::Reset => self.ended(route, port, StreamEnd::Reset, context),
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
            _ if self.is_elsewhere => Err((Refusal::Busy, "the job goes on elsewhere".into())),
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
                context.wake_in(self.process, passing, Wake::Adopt { stream, place, standby: None });
            }
            Err((refusal, why)) => {
                context.send(stream, self.process, Message::Refused(refusal, why));
                context.close(stream, self.process);
            }
        }
    }

    /// The core takes a stream, which may lead to the standby at a position of the job, and in place of another drops that.
    pub(super) fn adopt(
        &mut self,
        stream: StreamId,
        place: StreamPlace,
        standby: Option<u16>,
        context: &mut Context<'_>,
    ) {
        let StreamPlace { route, port: number, epoch, attempt, resumed_by } = place;
        let process = self.process;
        // A stream of a job that was allocated before the present one is not among those that were admitted.
        let admitted = self.job.as_mut().and_then(|job| Some((job.admitted.remove(&stream)?, job)));
        let Some((arrivals, job)) = admitted else { return context.close(stream, process) };
        if job.route(route).is_given_up {
            return context.close(stream, process);
        }
        if standby.is_some() && standby != job.route(route).standby {
            // It was dialled before another hub became the standby.
            return context.close(stream, process);
        }
        let is_planted = context.plant == Some(Plant::StaleStream);
        let is_over = job.is_forgotten;
        let newest = job.port(route, number).newest;
        if newest.is_some_and(|newest| (epoch, attempt) < newest) && !is_planted || is_over {
            // It was admitted before all ranks have gone back.
            if let Some(notice) = job.route(route).notice.clone() {
                let (header, content) = (Header::bare(Operation::Rewound), Content::Rewound(notice));
                context.send(stream, process, Message::Frame(Frame { header, content }));
            }
            return context.close(stream, process);
        }
        let neighbour = job.route(route).neighbours.neighbour(number);
        if matches!(neighbour, Neighbour::Worker(_)) && !job.route(route).serves {
            // It was admitted before this hub ceased to serve the route. The worker dials again.
            return context.close(stream, process);
        }
        if let Neighbour::Worker(_) = neighbour {
            context.ledger.exchanges(stream, job.route(route).copy);
        }
        let port = job.port(route, number);
        context.trace(|| format!("{process:?} adopts {stream:?}, attempt {attempt} of {neighbour:?}"));
        port.newest = Some((epoch, attempt));
        let before = port.stream.replace(stream);
        let had_stream = before.is_some();
        if let Some(before) = before {
            context.close(before, process);
        }
        (port.is_cut, port.is_muted) = (false, false);
        port.liveness = Some(PeerLiveness::new(context.instant()));
        if resumed_by.is_some() || had_stream {
            job.route(route).resume(number, context);
            if let Neighbour::Worker(_) = neighbour {
                // It keeps the old stream until a frame arrives on the new one.
                self.send(route, number, Header::bare(Operation::Heartbeat), Content::Nothing, context);
            }
            self.handle_core(CoreEvent::Moved { route, neighbour, by: 0 }, context);
        }
        self.answer(route, context);
        arrivals.into_iter().for_each(|arrival| self.stream_arrived(stream, arrival, context));
    }

    fn take_frame(&mut self, route: RouteId, number: u32, frame: Frame, context: &mut Context<'_>) {
        let now = context.instant();
        let job = self.job_mut();
        let port = job.port(route, number);
        if port.is_muted || port.is_cut {
            return;
        }
        if let Some(liveness) = &mut port.liveness {
            liveness.heard(now);
        }
        let header = frame.header;
        let state = job.route(route);
        let side = state.neighbours.side(number);
        if state.departures.has_left(number)
            && !side.takes_sums()
            && !between_sites::repeats_after_leave(side, header.operation)
        {
            let name = self.name_at(route, number);
            return context.ledger.violate(|| format!("{name} sent {header:?} after it had left"));
        }
        let taken = match header.operation {
            Operation::Heartbeat => Ok(()),
            // A worker has left the hub that serves the chunks.
            Operation::Leave if side == Side::Serving && header.step > 0 => {
                return self.left(route, header.step - 1, context);
            }
            Operation::Leave => return self.left(route, number, context),
            Operation::Failure => {
                let Content::Failure(failure) = frame.content else { unreachable!("a failure has a reason") };
                let neighbour = job.route(route).neighbours.neighbour(number);
                let message = match neighbour {
                    Neighbour::Worker(rank) => format!("rank {rank} gave up: {}", failure.message),
                    // Another hub has ended the job.
                    Neighbour::Site(_) | Neighbour::Counterpart(_) => failure.message,
                };
                let cause = FaultCause::Kind(CauseKind::GaveUp);
                return self.fault(route, number, neighbour, message, cause, context);
            }
            _ => {
                let slot = job.slot(header.chunk);
                job.route(route).take_frame(slot, number, &header, frame.content, context)
            }
        };
        let has_standby = self.job_mut().route(route).exchange.has_standby();
        if let Err(violation @ ProtocolViolation::StepAhead { .. }) = &taken
            && has_standby
        {
            self.lose(route, number, &violation.to_string(), context);
        } else if let Err(violation) = taken {
            let name = self.name_at(route, number);
            context.ledger.violate(|| format!("{name} broke the rules at {header:?}: {violation}"));
        }
        self.answer(route, context);
        self.report_copied(route, context);
        self.carry_out(context);
    }

    /// Sends everything that is due by a stream that works.
    pub(super) fn answer(&mut self, id: RouteId, context: &mut Context<'_>) {
        for (port, header, content) in self.job_mut().route(id).take_due_frames() {
            self.send(id, port, header, content, context);
        }
        for (port, stream) in self.job_mut().route(id).take_left_above() {
            context.network.end_sending(stream, self.process, context.agenda);
            if context.plant == Some(Plant::LeavesUnheard) {
                self.handle_core(CoreEvent::Left { route: id, port }, context);
            }
        }
    }

    /// The hub has left a site above: that has closed the stream after the Leave, or cannot be reached any more.
    fn left_above(&mut self, route: RouteId, number: u32, context: &mut Context<'_>) {
        if let Some(stream) = self.job_mut().port(route, number).stream.take() {
            context.close(stream, self.process);
        }
        self.handle_core(CoreEvent::Left { route, port: number }, context);
    }

    pub(super) fn send(
        &mut self,
        route: RouteId,
        port: u32,
        header: Header,
        content: Content,
        context: &mut Context<'_>,
    ) {
        let process = self.process;
        let port = self.job_mut().port(route, port);
        let Some(stream) = port.stream else { return };
        if let Some(liveness) = &mut port.liveness {
            liveness.sent(context.instant());
        }
        context.send(stream, process, Message::Frame(Frame { header, content }));
    }

    /// A neighbour has left by a stream.
    fn left(&mut self, id: RouteId, port: u32, context: &mut Context<'_>) {
        let route = self.job_mut().route(id);
        if route.departures.has_left(port) {
            return;
        }
        if let Err(left) = route.leave(port) {
            let culprit = route.neighbours.member(left.member);
            let name = self.name_of(culprit);
            let message = format!("{name} left the job, but others wait for {}", left.awaited);
            return self.fault(id, port, culprit, message, FaultCause::Kind(CauseKind::Known), context);
        }
        self.handle_core(CoreEvent::Left { route: id, port }, context);
        self.answer(id, context);
    }

    /// A stream has ended: the core waits for another in its place, or its neighbour has left or is lost.
    fn ended(&mut self, route: RouteId, number: u32, end: StreamEnd, context: &mut Context<'_>) {
        let (process, terms) = (self.process, self.plan.resuming);
        let route_state = self.job_mut().route(route);
        let side = route_state.neighbours.side(number);
        let has_left = route_state.departures.has_left(number);
        let leaves_above = has_left && side.takes_sums();
        let port = &mut route_state.ports[number as usize];
        if leaves_above && !port.is_muted && end == StreamEnd::Closed {
            return self.left_above(route, number, context);
        }
        if has_left && !leaves_above || port.is_muted {
            if let Some(stream) = port.stream.take() {
                context.close(stream, process);
            }
            return;
        }
        if port.is_cut {
            return;
        }
        let wait = between_sites::hub_waits(&terms, side, end);
        let Some(wait) = wait.filter(|_| context.plant != Some(Plant::CutsLose)) else {
            return self.lose(route, number, &format!("its stream ended: {end:?}"), context);
        };
        context.trace(|| {
            format!("{process:?} waits {wait:?} for another stream at port {number} of route {route}")
        });
        port.is_cut = true;
        let (HubWait::For(grace), Some(stream)) = (wait, port.stream) else { return };
        context.wake_in(process, grace, Wake::CutOver { stream });
        if side.takes_sums() {
            self.dial_again(route, number, grace, context);
        }
    }

    /// The time is over in which another stream could take the place of one that was cut.
    pub(super) fn cut_over(&mut self, stream: StreamId, context: &mut Context<'_>) {
        let Some((route, port)) = self.job.as_ref().and_then(|job| job.port_of(stream)) else { return };
        let state = self.job_mut().port(route, port);
        if state.is_cut && !state.is_muted {
            self.lose(route, port, "its stream was cut, and it has not come back", context);
        }
    }

    fn lose(&mut self, route: RouteId, port: u32, why: &str, context: &mut Context<'_>) {
        if self.job_mut().route(route).leaves_above(port) {
            return self.left_above(route, port, context);
        }
        let message = format!("{} was lost: {why}", self.name_at(route, port));
        let culprit = self.job_mut().route(route).neighbours.neighbour(port);
        self.fault(route, port, culprit, message, FaultCause::Kind(CauseKind::PeerLost), context);
        if let Some(stream) = self.job_mut().port(route, port).stream.take() {
            context.close(stream, self.process);
        }
    }

    fn name_at(&mut self, route: RouteId, port: u32) -> String {
        let neighbour = self.job_mut().route(route).neighbours.neighbour(port);
        self.name_of(neighbour)
    }

    fn name_of(&mut self, neighbour: Neighbour) -> String {
        self.job_mut().composed.composition.name_of(neighbour)
    }

    /// The job cannot go on because of `culprit`, as the stream of a port shows.
    fn fault(
        &mut self,
        route: RouteId,
        port: u32,
        culprit: Neighbour,
        message: String,
        cause: FaultCause,
        context: &mut Context<'_>,
    ) {
        self.job_mut().port(route, port).is_muted = true;
        self.handle_core(CoreEvent::Faulted { route, culprit, message, cause }, context);
    }

    pub(super) fn tick(&mut self, context: &mut Context<'_>) {
        let now = context.instant();
        let plan = self.plan.clone();
        let pause = self.own_pauses.turn(now);
        let (mut due, mut dead) = (Vec::new(), Vec::new());
        for (&id, route) in self.job.iter_mut().flat_map(|job| &mut job.routes) {
            for (number, port) in (0..).zip(&mut route.ports) {
                let Some(liveness) = port.liveness.as_mut().filter(|_| port.stream.is_some()) else {
                    continue;
                };
                liveness.forgive(pause, now);
                if port.is_muted {
                    continue;
                }
                let side = route.neighbours.side(number);
                let rules = between_sites::liveness(&plan.resuming, side, plan.dead_after);
                let has_left = route.departures.has_left(number);
                // No frame follows a Leave.
                let leaves_above = has_left && side.takes_sums();
                if !port.is_cut && !leaves_above && liveness.is_heartbeat_due(now, &rules) {
                    due.push((id, number));
                }
                if (!has_left || leaves_above)
                    && let Some(LivenessChange::Dead(silence)) = liveness.check(now, &rules)
                {
                    dead.push((id, number, silence));
                }
            }
        }
        for (route, port) in due {
            self.send(route, port, Header::bare(Operation::Heartbeat), Content::Nothing, context);
        }
        for (route, port, silence) in dead {
            if self.job_mut().route(route).leaves_above(port) {
                self.left_above(route, port, context);
                continue;
            }
            let name = self.name_at(route, port);
            let message = format!("{name} was lost: it has not been heard for {} s", silence.as_secs_f64());
            let culprit = self.job_mut().route(route).neighbours.neighbour(port);
            self.fault(route, port, culprit, message, FaultCause::Silence, context);
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
