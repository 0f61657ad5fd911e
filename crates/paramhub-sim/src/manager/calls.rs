//! The calls of hubs and ranks.

use std::ops::Range;
use std::time::Duration;

use paramhub_core::auth::{Incarnation, Nonce, Proof, Purpose, StreamSecret};
use paramhub_core::membership::{Submission, WaitingCall};
use paramhub_core::service::{
    ConnectService, ErrorCode, HubRegistered, HubReport, InitService, LeaveService, RegisterHub,
    ServiceError, refusal,
};

use super::queues::WaitingPoll;
use super::{Manager, ManagerWake, WaitingCaller, moment, placing, send};
use crate::call::{Answer, Request};
use crate::job::NAMESPACE;
use crate::network::StreamId;
use crate::world::{Context, Plant};

/// How long the comparison of settings and the placement take.
pub(super) const COMPUTING: Range<Duration> = Duration::from_micros(10)..Duration::from_millis(20);
/// How long a poll waits for commands.
const POLL_MAX: Duration = Duration::from_secs(1);

impl Manager {
    /// Takes a call.
    pub(super) fn take(&mut self, stream: StreamId, request: &Request, context: &mut Context<'_>) {
        let taken = match request {
            Request::Connect(call) => self
                .check_proof(call.rank, call.incarnation, Purpose::Connect, &call.proof)
                .and_then(|()| self.connect(stream, call, context)),
            Request::Init(call) => self
                .check_proof(call.rank, call.incarnation, Purpose::Init, &call.proof)
                .and_then(|()| self.init(stream, call, context)),
            Request::Leave(call) => self
                .check_proof(call.rank, call.incarnation, Purpose::Leave, &call.proof)
                .and_then(|()| self.leave(stream, call, context)),
            Request::Register(offer) => self.register(stream, offer, context),
            Request::Report(hub, report) => self.report(stream, hub, report, context),
            Request::Poll(hub, poll) => {
                let poll = WaitingPoll { stream, hub: hub.clone(), acknowledged: poll.acknowledged };
                self.look_for_commands(poll, false, context);
                Ok(())
            }
        };
        if let Err(refused) = taken {
            match request {
                Request::Connect(call) => context.ledger.refused(call.rank, call.incarnation, &refused),
                Request::Init(call) => context.ledger.refused(call.rank, call.incarnation, &refused),
                _ => {}
            }
            send(stream, Answer::Refused(refused), context);
        }
    }

    fn check_proof(
        &mut self,
        rank: u32,
        incarnation: Incarnation,
        purpose: Purpose,
        proof: &Proof,
    ) -> Result<(), ServiceError> {
        let secrets = self.membership().call_secrets(NAMESPACE, rank, purpose);
        let proves =
            |secret: StreamSecret| secret.prove_rank(purpose, NAMESPACE, rank, incarnation).matches(proof);
        match secrets.into_iter().flatten().any(proves) {
            true => Ok(()),
            false => Err(refusal(ErrorCode::WrongNonce, format!("rank {rank} does not prove itself"))),
        }
    }

    fn connect(
        &mut self,
        stream: StreamId,
        call: &ConnectService,
        context: &mut Context<'_>,
    ) -> Result<(), ServiceError> {
        let waiting = self.membership().connect(NAMESPACE, call, moment(context))?;
        self.wait(waiting, WaitingCaller { stream, rank: call.rank, incarnation: call.incarnation }, context);
        Ok(())
    }

    fn init(
        &mut self,
        stream: StreamId,
        call: &InitService,
        context: &mut Context<'_>,
    ) -> Result<(), ServiceError> {
        let (rank, incarnation, now) = (call.rank, call.incarnation, moment(context));
        let settings = self.plan.settings.clone();
        let submission = self.membership().submit(NAMESPACE, rank, incarnation, &settings, now, now)?;
        let comparing = context.random.time(&COMPUTING);
        // All ranks of the simulator want the same.
        let (waiting, comparing, wake) = match submission {
            Submission::Wait(waiting) => (waiting, Duration::ZERO, ManagerWake::Compared(waiting.call)),
            Submission::Compare { waiting, .. } => (waiting, comparing, ManagerWake::Compared(waiting.call)),
            Submission::Join { waiting, digest } => {
                let agrees = digest == placing::digest(&settings);
                (waiting, comparing, ManagerWake::Joins { call: waiting.call, agrees })
            }
        };
        self.wait(waiting, WaitingCaller { stream, rank, incarnation }, context);
        self.wake_in(comparing, wake, context);
        Ok(())
    }

    /// Lets a rank wait for the answer to its call.
    fn wait(&mut self, waiting: WaitingCall, caller: WaitingCaller, context: &mut Context<'_>) {
        let wait = waiting.deadline.saturating_sub(moment(context).monotonic);
        self.wake_in(wait, ManagerWake::Expired(waiting.call), context);
        self.running().callers.insert(waiting.call, caller);
    }

    fn leave(
        &mut self,
        stream: StreamId,
        call: &LeaveService,
        context: &mut Context<'_>,
    ) -> Result<(), ServiceError> {
        self.membership().leave(NAMESPACE, call, moment(context))?;
        send(stream, Answer::Taken, context);
        Ok(())
    }

    fn register(
        &mut self,
        stream: StreamId,
        offer: &RegisterHub,
        context: &mut Context<'_>,
    ) -> Result<(), ServiceError> {
        let token: String = draw(context).into();
        let hub = self.membership().register_hub(offer.clone(), &token, moment(context))?;
        // The hub hears of it when its record is saved.
        self.running().unsaved.joining.push((stream, HubRegistered { hub, token }));
        Ok(())
    }

    fn report(
        &mut self,
        stream: StreamId,
        hub: &HubRegistered,
        report: &HubReport,
        context: &mut Context<'_>,
    ) -> Result<(), ServiceError> {
        self.membership().report(hub.hub, Some(&hub.token), report.clone(), moment(context))?;
        send(stream, Answer::Taken, context);
        Ok(())
    }

    /// Answers a poll if there are commands, or if it has waited until something has changed; otherwise it waits.
    pub(super) fn look_for_commands(
        &mut self,
        poll: WaitingPoll,
        has_waited: bool,
        context: &mut Context<'_>,
    ) {
        let hub = poll.hub.hub;
        let admitted = self.membership().admit_hub(hub, Some(&poll.hub.token), moment(context));
        let stream = poll.stream;
        let queues = &mut self.running().queues;
        match admitted.and_then(|()| queues.poll(hub, poll.acknowledged)) {
            Err(refused) => send(stream, Answer::Refused(refused), context),
            Ok(commands) if commands.is_empty() && !has_waited => {
                queues.wait(poll);
                self.wake_in(POLL_MAX, ManagerWake::PollOver(stream), context);
            }
            Ok(commands) => {
                if let (Some(Plant::CommandsOnce), Some(last)) = (context.plant, commands.last()) {
                    let _ = queues.poll(hub, last.sequence);
                }
                send(stream, Answer::Commands(commands), context);
            }
        }
    }
}

/// Random bytes.
pub(super) fn draw(context: &mut Context<'_>) -> Nonce {
    let mut drawn = [0; 32];
    drawn.chunks_mut(8).for_each(|bytes| bytes.copy_from_slice(&context.random.number().to_le_bytes()));
    Nonce(drawn)
}
