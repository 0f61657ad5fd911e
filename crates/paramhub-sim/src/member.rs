//! A worker before it has streams: it joins its job at the manager and hands in its settings, as the product's `Member`
//! does.

use std::sync::Arc;
use std::time::Duration;

use paramhub_core::auth::{Incarnation, Purpose, RankClaim, StreamSecret};
use paramhub_core::composition::{Composed, Composition};
use paramhub_core::service::{ConnectService, ErrorCode, InitService, LeaveService, ServiceConnected};
use paramhub_core::standbys::Share;

use crate::call::{Answer, CallError, Caller, Line, Request};
use crate::job::{JobPlan, LINGER, NAMESPACE, NONCE, address_of_hub, incarnation};
use crate::message::Message;
use crate::network::{Arrival, Process, StreamId};
use crate::world::{Context, Wake};

/// How long a manager at which nobody listens is called again.
const RETRY_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a call may take: longer than the manager lets it wait, whose answer names what is missing.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// The pause before a process calls again for a rank that another has.
const TAKEN_PAUSE: Duration = Duration::from_millis(500);

/// A worker that joins its job.
pub(crate) struct Member {
    process: Process,
    plan: Arc<JobPlan>,
    call: ConnectService,
    caller: Caller,
    /// What it was told of the job, and its secret.
    connected: Option<(ServiceConnected, StreamSecret)>,
    number: u8,
    /// How often it has begun again, each time as another process would.
    again: u8,
    /// The number of workers that were started together with it, in a job in which this may change.
    workers: Option<u32>,
}

/// What a worker that has joined knows of its job.
pub(crate) struct Joined {
    pub(crate) composed: Arc<Composed>,
    /// The hubs of each share of the chunks, if they have standbys.
    pub(crate) shares: Vec<Share>,
    pub(crate) epoch: u64,
    /// The step at which it joins a running job, if it does.
    pub(crate) step: Option<u32>,
}

impl Member {
    /// The process of this number among those that were started for a rank.
    pub(crate) fn new(rank: u32, number: u8, workers: Option<u32>, plan: &Arc<JobPlan>) -> Member {
        let process = Process::Worker(rank, number);
        let caller = Caller::new(process, Line::Member, RETRY_TIMEOUT);
        let call = ConnectService { workers, ..connect_service(rank, number, 0, plan) };
        Member { process, plan: plan.clone(), call, caller, connected: None, number, again: 0, workers }
    }

    /// All ranks go back to an earlier step: the process joins anew, after a while, as another of its rank would.
    pub(crate) fn begin_again(&mut self, context: &mut Context<'_>) {
        self.again += 1;
        let call = connect_service(self.call.rank, self.number, self.again, &self.plan);
        self.call = ConnectService { workers: self.workers, ..call };
        self.connected = None;
        let wait = context.random.time(&context.compute.clone());
        context.wake_in(self.process, wait, Wake::Begin);
    }

    /// Joins the job.
    pub(crate) fn begin(&mut self, context: &mut Context<'_>) {
        self.caller.call(Request::Connect(Box::new(self.call.clone())), CALL_TIMEOUT, context);
    }

    /// A stream learns something. Returns the end of joining, if that is it.
    pub(crate) fn arrived(
        &mut self,
        stream: StreamId,
        arrival: &Arrival,
        context: &mut Context<'_>,
    ) -> Option<Result<Joined, String>> {
        let ended = self.caller.arrived(stream, arrival, context)?;
        self.call_ended(ended, context)
    }

    /// A time has come for which a call has waited.
    pub(crate) fn woken(
        &mut self,
        awaited: u64,
        context: &mut Context<'_>,
    ) -> Option<Result<Joined, String>> {
        let ended = self.caller.woken(awaited, context)?;
        self.call_ended(ended, context)
    }

    fn call_ended(
        &mut self,
        ended: Result<Answer, CallError>,
        context: &mut Context<'_>,
    ) -> Option<Result<Joined, String>> {
        let (rank, incarnation) = (self.call.rank, self.call.incarnation);
        match (ended, &self.connected) {
            (Ok(Answer::Connected(connected)), None) => {
                let Some(secrets) = &connected.secrets else {
                    return Some(Err(format!("rank {rank} gets no secret")));
                };
                let secret = secrets.rank;
                self.connected = Some((*connected, secret));
                let proof = secret.prove_rank(Purpose::Init, NAMESPACE, rank, incarnation);
                let settings = (*self.plan.settings).clone();
                let init = InitService { rank, incarnation, proof, settings };
                // In a job that goes back it waits for the processes of all other ranks.
                let timeout = if self.plan.rewind_every.is_some() { LINGER * 2 } else { CALL_TIMEOUT };
                self.caller.call(Request::Init(Box::new(init)), timeout, context);
                None
            }
            (Ok(Answer::Initialised(initialised)), Some((connected, _))) => {
                let composition = Composition::flat(connected.hubs.clone(), connected.workers);
                let composed = self.plan.compose(composition);
                let hash = composed.placements[0].hash().to_hex();
                if *hash != *initialised.placement_hash {
                    context.ledger.violate(|| format!("rank {rank} places the job otherwise than its hubs"));
                }
                let step = initialised.resumed_step;
                context.ledger.joined(rank, connected.epoch, step, self.workers);
                Some(Ok(Joined { composed, shares: connected.shares.clone(), epoch: connected.epoch, step }))
            }
            (Ok(other), _) => {
                context.ledger.violate(|| format!("rank {rank} is answered with {other:?}"));
                None
            }
            // The process that has the rank has died, and no hub has noticed yet.
            (Err(CallError::Refused(refusal)), None) if refusal.code == ErrorCode::Busy => {
                context.wake_in(self.process, TAKEN_PAUSE, Wake::Begin);
                None
            }
            // Another has been lost while this one waited, or a late call of a process that has died has got the rank.
            (Err(CallError::Refused(refusal)), Some(_))
                if matches!(refusal.code, ErrorCode::Busy | ErrorCode::WrongNonce)
                    && self.plan.rewind_every.is_some() =>
            {
                self.begin_again(context);
                None
            }
            (Err(error), connected) => {
                let call = if connected.is_some() { "InitService" } else { "ConnectService" };
                let why = format!("rank {rank}: {call}: {error}");
                self.give_up(&why, context);
                Some(Err(why))
            }
        }
    }

    /// Gives up its rank, so that the others need not wait for it.
    fn give_up(&self, why: &str, context: &mut Context<'_>) {
        self.leave(why, None, context);
    }

    /// Tells the manager that it has lost a hub, which the manager may not hear either.
    pub(crate) fn report_lost_hub(&self, hub: Process, why: &str, context: &mut Context<'_>) {
        let Process::Hub(number) = hub else { return };
        if self.connected.is_some() {
            self.leave(why, Some(address_of_hub(number, 0)), context);
        }
    }

    /// Calls LeaveService once: the worker ends, and nobody waits for an answer.
    fn leave(&self, why: &str, lost_hub: Option<String>, context: &mut Context<'_>) {
        let Some((_, secret)) = &self.connected else { return };
        let (rank, incarnation) = (self.call.rank, self.call.incarnation);
        let leave = LeaveService {
            lost_hub,
            rank,
            incarnation,
            proof: secret.prove_rank(Purpose::Leave, NAMESPACE, rank, incarnation),
            reason: why.to_owned(),
            finished: false,
        };
        let stream = context.network.open(self.process, Process::Manager);
        context.send(stream, self.process, Message::Call(Arc::new(Request::Leave(leave))));
    }

    /// The call with which the process has joined. The manager answers it again with the hubs of the shares.
    pub(crate) fn call(&self) -> &ConnectService {
        &self.call
    }

    /// The incarnation of the process.
    pub(crate) fn incarnation(&self) -> Incarnation {
        self.call.incarnation
    }
}

/// The first call of the process of this number among those that were started for a rank, when it has begun again so often.
fn connect_service(rank: u32, number: u8, again: u8, plan: &JobPlan) -> ConnectService {
    let incarnation = incarnation(number, again);
    ConnectService {
        rank,
        incarnation,
        proof: NONCE.prove_rank(Purpose::Connect, NAMESPACE, rank, incarnation),
        claim: Some(RankClaim(std::array::from_fn(|byte| incarnation.0[byte % 16]))),
        host: format!("host{rank}"),
        process: number.into(),
        place: plan.place_of(rank),
        peer_address: None,
        workers: None,
    }
}
