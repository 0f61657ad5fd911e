//! The connection manager: the production state machine of its jobs and hubs, and around it what the product's
//! `registry`, `state` and `rendezvous` do: callers wait, records are saved before callers hear of them.

mod calls;
mod placing;
mod queues;
mod store;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use paramhub_core::auth::{Incarnation, Namespace};
use paramhub_core::membership::{
    self, CallId, Job, JobRecord, LogEvent, Membership, MembershipLimits, Now, Output, REPORTED_BACK_MAX,
};
use paramhub_core::service::{HubCommand, JobState, JobStatus};
use paramhub_core::settings::Settings;
use paramhub_core::standbys::Share;

use crate::call::Answer;
use crate::job::{FIRST_EPOCH, JobPlan, NAMESPACE, NONCE, hub_shape};
use crate::message::Message;
use crate::network::{Arrival, Process, StreamId};
use crate::world::{Context, Plant, Wake};
use queues::HubQueues;
use store::{Changes, Store, Unsaved};

/// The silence after which a hub gets no jobs.
const HUB_TIMEOUT: Duration = Duration::from_secs(10);

/// The silence after which a hub is lost for jobs that run: longer than any fault lasts, and shorter than in the product,
/// so that runs end.
const HUB_UNHEARD_MAX: Duration = Duration::from_secs(100);

/// The manager's host: its disk, and the manager if it runs.
pub(crate) struct Manager {
    plan: Arc<JobPlan>,
    store: Store,
    /// How often it has been started.
    starts: u32,
    running: Option<Running>,
    /// Hubs that were lost, in all runs.
    lost_hubs: u32,
    /// How often the job has left a hub that was drained, in all runs.
    left_drained: usize,
}

/// A manager that runs.
struct Running {
    membership: Membership,
    queues: HubQueues,
    /// The callers that wait for an answer.
    callers: BTreeMap<CallId, WaitingCaller>,
    /// What has changed since the records were last taken to be saved.
    unsaved: Unsaved,
    /// What is being saved.
    saving: Option<(Unsaved, Changes)>,
    /// The settings of jobs that are being placed.
    placing: BTreeMap<Namespace, Arc<Settings>>,
}

/// A rank that waits for an answer.
#[derive(Clone, Copy)]
struct WaitingCaller {
    stream: StreamId,
    rank: u32,
    incarnation: Incarnation,
}

/// What a manager has waited for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ManagerWake {
    /// It looks for silent hubs and expired jobs.
    Tick,
    /// The records that were taken to be saved are on disk.
    Saved,
    /// A call has waited as long as it may.
    Expired(CallId),
    /// A poll has waited as long as it may.
    PollOver(StreamId),
    /// The settings in a call have been compared with those of the first rank.
    Compared(CallId),
    /// The settings of a process that takes a lost rank have been compared with the job's.
    Joins { call: CallId, agrees: bool },
    /// A job's placement is made.
    Placed(Namespace),
}

impl Manager {
    /// A manager that has created the job.
    pub(crate) fn new(plan: &Arc<JobPlan>, context: &mut Context<'_>) -> Manager {
        let now = moment(context);
        let job = Job::new(0, plan.request.clone(), NAMESPACE, NONCE, Some(FIRST_EPOCH), now);
        let mut store = Store::default();
        store.create(job.record(now));
        let mut manager =
            Manager { plan: plan.clone(), store, starts: 0, running: None, lost_hubs: 0, left_drained: 0 };
        manager.start(context);
        manager
    }

    /// The job as the manager knows it, and as its record shows it if there is nothing to save; none while the manager
    /// does not run.
    pub(crate) fn settled(&self) -> Option<&JobStatus> {
        let running = self.running.as_ref()?;
        let is_saved = running.unsaved.is_empty() && running.saving.is_none();
        self.store.status(NAMESPACE).filter(|status| is_saved && status.state.has_ended())
    }

    /// The job's state on disk.
    pub(crate) fn recorded(&self) -> Option<JobState> {
        self.store.status(NAMESPACE).map(|status| status.state)
    }

    /// The hubs of each share of the job; empty in a job without standbys, and while the manager does not run.
    pub(crate) fn shares(&self) -> &[Share] {
        let job = self.running.as_ref().and_then(|running| running.membership.job(NAMESPACE).ok());
        job.map(Job::shares).unwrap_or_default()
    }

    /// The same as they are on disk; empty while there is something to save.
    pub(crate) fn saved_shares(&self) -> &[Share] {
        let is_saved = |running: &Running| running.unsaved.is_empty() && running.saving.is_none();
        if self.running.as_ref().is_some_and(is_saved) { self.shares() } else { &[] }
    }

    /// How often the job has left a hub that was drained.
    pub(crate) fn left_drained(&self) -> usize {
        self.left_drained
    }

    /// An operator drains the hub of this process, if it has joined, or no longer.
    pub(crate) fn drain(&mut self, number: u16, drained: bool, context: &mut Context<'_>) {
        let Some(running) = self.running.as_mut() else { return };
        let address = &hub_shape(number, 1).interfaces[0].address;
        let statuses = running.membership.hub_statuses(moment(context));
        let hub = statuses.iter().find(|hub| hub.shape.interfaces[0].address == *address);
        if let Some(hub) = hub.map(|hub| hub.hub) {
            running.membership.drain_hub(hub, drained, moment(context)).expect("it has joined");
        }
        self.carry_out(context);
    }

    /// Whether any hub was ever lost, or not heard for so long that a rank's word suffices to take it for lost.
    pub(crate) fn has_lost_hubs(&self) -> bool {
        self.lost_hubs > 0
    }

    /// Starts the manager with what is in its store.
    pub(crate) fn start(&mut self, context: &mut Context<'_>) {
        let (mut jobs, hubs) = self.store.load();
        if context.plant == Some(Plant::HoldersForgotten) {
            jobs.iter_mut().for_each(forget_holders);
        }
        let limits = MembershipLimits {
            unheard_max: HUB_UNHEARD_MAX,
            hub_timeout: HUB_TIMEOUT,
            living_jobs_max: 8,
            ended_jobs_max: 8,
            core_rate: None,
        };
        let drawn = calls::draw(context);
        let membership = Membership::new(jobs, hubs, limits, drawn, moment(context));
        let state = membership.job(NAMESPACE).map(Job::state);
        context.trace(|| format!("the manager starts with the job {:?}", state.as_ref().ok()));
        // With this planted fault, it is to be found by what it leads to.
        if context.plant != Some(Plant::HoldersForgotten) {
            context.ledger.manager_started(state.ok());
        }
        self.starts += 1;
        self.running = Some(Running {
            membership,
            queues: HubQueues::default(),
            callers: BTreeMap::new(),
            unsaved: Unsaved::default(),
            saving: None,
            placing: BTreeMap::new(),
        });
        self.wake_in(Duration::ZERO, ManagerWake::Tick, context);
        self.carry_out(context);
    }

    /// The manager dies. What is being saved is on disk if it `keeps_last`.
    pub(crate) fn crash(&mut self, keeps_last: bool) {
        if let Some(Running { saving: Some((_, changes)), .. }) = self.running.take()
            && keeps_last
        {
            self.store.save(changes);
        }
    }

    /// An end of a stream learns something.
    pub(crate) fn arrived(&mut self, stream: StreamId, arrival: Arrival, context: &mut Context<'_>) {
        let Some(running) = &mut self.running else {
            if let Arrival::Message(Message::Call(_)) = arrival {
                context.network.refuse(stream, Process::Manager, context.agenda);
            }
            return;
        };
        match arrival {
            Arrival::Message(Message::Call(request)) => self.take(stream, &request, context),
            Arrival::Closed | Arrival::Broken | Arrival::Reset => {
                let call = running.callers.iter().find(|(_, caller)| caller.stream == stream);
                if let Some(call) = call.map(|(&call, _)| call) {
                    running.callers.remove(&call);
                    running.membership.hang_up(call, moment(context));
                }
                if let Some(poll) = running.queues.take(stream) {
                    running.membership.hub_hung_up(poll.hub.hub, moment(context));
                }
                context.close(stream, Process::Manager);
            }
            Arrival::Message(_) | Arrival::Refused => {}
        }
        self.carry_out(context);
    }

    /// A time has come for which the manager has waited since it was started for the time of this number.
    pub(crate) fn wake(&mut self, start: u32, wake: ManagerWake, context: &mut Context<'_>) {
        let Some(running) = self.running.as_mut().filter(|_| start == self.starts) else { return };
        let now = moment(context);
        match wake {
            ManagerWake::Tick => {
                running.membership.check_time(now);
                let tick = running.membership.tick();
                self.wake_in(tick, ManagerWake::Tick, context);
            }
            ManagerWake::Saved => {
                let (saved, changes) = running.saving.take().expect("it was being saved");
                self.store.save(changes);
                for (hub, command) in saved.commands {
                    note_shares(&command, context);
                    running.queues.push(hub, command, false);
                }
                for (call, answer) in saved.answers {
                    self.answer(call, answer, context);
                }
                for (stream, registered) in saved.joining {
                    send(stream, Answer::Registered(registered), context);
                }
            }
            ManagerWake::Expired(call) => {
                if running.callers.contains_key(&call) {
                    running.membership.expire(call, now);
                }
            }
            ManagerWake::PollOver(stream) => {
                if running.queues.take(stream).is_some() {
                    send(stream, Answer::Commands(Vec::new()), context);
                }
            }
            ManagerWake::Compared(call) => {
                if let Some((namespace, settings)) = running.membership.agree(call, now) {
                    running.placing.insert(namespace, settings);
                    let wait = context.random.time(&calls::COMPUTING);
                    self.wake_in(wait, ManagerWake::Placed(namespace), context);
                }
            }
            ManagerWake::Joins { call, agrees } => running.membership.join(call, agrees, now),
            ManagerWake::Placed(namespace) => {
                if let Some(settings) = running.placing.remove(&namespace) {
                    let placed = placing::place(&mut running.membership, namespace, &settings, &self.plan);
                    match placed {
                        Ok(commands) => commands
                            .into_iter()
                            .for_each(|(hub, command)| running.queues.push(hub, command, false)),
                        Err(refused) => running.membership.cannot_place(namespace, refused, now),
                    }
                }
            }
        }
        self.carry_out(context);
    }

    fn running(&mut self) -> &mut Running {
        self.running.as_mut().expect("only a manager that runs takes calls")
    }

    fn membership(&mut self) -> &mut Membership {
        &mut self.running().membership
    }

    fn wake_in(&self, wait: Duration, wake: ManagerWake, context: &mut Context<'_>) {
        context.wake_in(Process::Manager, wait, Wake::Manager { start: self.starts, wake });
    }

    /// Carries out the consequences of what has happened, until there are none.
    fn carry_out(&mut self, context: &mut Context<'_>) {
        loop {
            let Some(running) = &mut self.running else { return };
            let outputs = running.membership.take_outputs(moment(context));
            let polls = running.queues.take_changed();
            if outputs.is_empty() && polls.is_empty() {
                break;
            }
            for output in outputs {
                self.carry_out_one(output, context);
            }
            for poll in polls {
                self.look_for_commands(poll, true, context);
            }
        }
        let Some(running) = &mut self.running else { return };
        if running.saving.is_none() && !running.unsaved.is_empty() {
            let unsaved = std::mem::take(&mut running.unsaved);
            let changes = unsaved.changes(&running.membership, moment(context));
            running.saving = Some((unsaved, changes));
            let wait = context.random.time(&context.saving.clone());
            self.wake_in(wait, ManagerWake::Saved, context);
        }
    }

    fn carry_out_one(&mut self, output: Output, context: &mut Context<'_>) {
        let Some(running) = &mut self.running else { return };
        match output {
            Output::Answer { call, namespace, answer } => {
                let answer = match running.unsaved_of(namespace) {
                    Some(records) if context.plant != Some(Plant::AnswersUnsaved) => {
                        return records.answers.push((call, answer));
                    }
                    _ => answer,
                };
                self.answer(call, answer, context);
            }
            Output::HubJoined { hub } => {
                running.queues.add(hub);
                running.unsaved.hubs.insert(hub);
            }
            Output::SaveHub { hub } => drop(running.unsaved.hubs.insert(hub)),
            Output::HubRestored { hub } => running.queues.restore(hub),
            Output::HubForgotten { hub } => {
                running.queues.remove(hub);
                running.unsaved.hubs.insert(hub);
            }
            Output::Command { command: HubCommand::ReportJobs { .. }, .. }
                if context.plant == Some(Plant::JobsNotAsked) => {}
            Output::Command { hub, command, unless_queued } => {
                match running.waiting_before(hub, command.namespace()) {
                    Some(commands) => commands.push((hub, command)),
                    None => running.queues.push(hub, command, unless_queued),
                }
            }
            Output::ChangeMembership { hub, namespace, command } => {
                match running.unsaved_of(Some(namespace)) {
                    Some(records) => records.commands.push((hub, command)),
                    None => {
                        note_shares(&command, context);
                        running.queues.push(hub, command, false);
                    }
                }
            }
            Output::Save(namespace) => drop(running.unsaved.jobs.insert(namespace)),
            Output::Remove(namespace) => {
                running.unsaved.jobs.remove(&namespace);
                running.unsaved.removed_jobs.push(namespace);
            }
            Output::Log(event) => {
                context.trace(|| format!("the manager: {event:?}"));
                let is_loss = matches!(event, LogEvent::HubLost { .. } | LogEvent::HubUnheard { .. });
                self.lost_hubs += u32::from(is_loss);
                let is_drained = |message: &str| message.contains("is drained by an operator; hub");
                let left = matches!(&event, LogEvent::SharesChanged { message, .. } if is_drained(message));
                self.left_drained += usize::from(left);
            }
        }
    }

    /// Answers a rank that has waited.
    fn answer(&mut self, call: CallId, answer: membership::Answer, context: &mut Context<'_>) {
        let Some(running) = &mut self.running else { return };
        let Some(WaitingCaller { stream, rank, incarnation }) = running.callers.remove(&call) else { return };
        let answer = match answer {
            membership::Answer::Connected(Ok(connected)) => {
                let connected = connected.answer();
                context.ledger.connected(rank, incarnation, &connected);
                Answer::Connected(Box::new(connected))
            }
            membership::Answer::Initialised(Ok(initialised)) => {
                context.ledger.told_that_it_runs(rank, &initialised);
                Answer::Initialised(initialised)
            }
            membership::Answer::Connected(Err(refusal)) | membership::Answer::Initialised(Err(refusal)) => {
                context.ledger.refused(rank, incarnation, &refusal);
                Answer::Refused(refusal)
            }
            membership::Answer::Stopped(_) | membership::Answer::Probed(_) => Answer::Taken,
        };
        send(stream, answer, context);
    }
}

impl Running {
    /// The records among which that of a job is yet to be saved, if it is.
    fn unsaved_of(&mut self, namespace: Option<Namespace>) -> Option<&mut Unsaved> {
        let namespace = namespace?;
        let saving = self.saving.as_mut().map(|(unsaved, _)| unsaved);
        let both = [Some(&mut self.unsaved), saving].into_iter().flatten();
        both.into_iter().find(|records| records.jobs.contains(&namespace))
    }

    /// The commands that wait until a record is saved, if one of them is for this hub and about this job.
    fn waiting_before(
        &mut self,
        hub: u32,
        namespace: Option<Namespace>,
    ) -> Option<&mut Vec<(u32, HubCommand)>> {
        let saving = self.saving.as_mut().map(|(unsaved, _)| &mut unsaved.commands);
        let both = [Some(&mut self.unsaved.commands), saving].into_iter().flatten();
        both.into_iter().find(|commands| {
            commands.iter().any(|(to, command)| *to == hub && command.namespace() == namespace)
        })
    }
}

/// Notes the shares that a hub is about to hear.
fn note_shares(command: &HubCommand, context: &mut Context<'_>) {
    if let HubCommand::ChangeShares { number, shares, .. } = command {
        context.ledger.shares_decided(*number, shares);
    }
}

/// Answers a call and closes its stream.
fn send(stream: StreamId, answer: Answer, context: &mut Context<'_>) {
    context.send(stream, Process::Manager, Message::Answer(answer));
    context.close(stream, Process::Manager);
}

/// A job that has lost which process has which rank, as if none had connected.
fn forget_holders(record: &mut JobRecord) {
    if record.members.take().is_some() {
        record.status.state = JobState::Connecting;
    }
}

fn moment(context: &Context<'_>) -> Now {
    let now = context.agenda.now();
    Now { monotonic: REPORTED_BACK_MAX + now, unix_s: 1_700_000_000 + now.as_secs() }
}
