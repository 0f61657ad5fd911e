//! ConnectService and InitService: calls that wait for other ranks.

use std::sync::Arc;
use std::time::Duration;

use paramhub_core::service::{
    ConnectService, ErrorCode, InitService, ServiceConnected, ServiceError, ServiceInitialised,
};
use paramhub_core::settings::Settings;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::allocation::allocate;
use crate::body::TableBody;
use crate::clock::Now;
use crate::error::refusal;
use crate::job::{Stage, Submission, Transition};
use crate::registry::{Registry, blocking, shutting_down};
use crate::world::{Rank, Ticket};

/// Joins a rank to its job; returns when every rank has joined and there are as many hubs as it waits for.
pub(crate) async fn connect(
    registry: &Arc<Registry>,
    caller: Rank,
    call: ConnectService,
) -> Result<ServiceConnected, ServiceError> {
    let namespace = caller.namespace;
    let now = Now::read();
    let (ticket, deadline) = registry.with(|world| {
        let seated = world.change(namespace, |job| {
            let seated = job.connect(&call, now);
            let seated = seated
                .map(|ticket| (job.wait(ticket), deadline(now.instant, job.options.rendezvous_timeout_s)));
            (seated, Transition::None)
        })?;
        world.convene(namespace, now);
        seated
    })?;
    let mut waiting = Waiting::new(registry, caller, ticket.number, Wait::Connect);
    let waited = wait_beyond(registry, Stage::Connecting, ticket, deadline).await?;
    waiting.over = true;
    let ticket = waiting.ticket;
    registry.with(|world| {
        if let Waited::TimedOut = waited {
            world.convene_at_last(namespace, Now::read());
        }
        let hubs = world.hubs.shapes();
        // The last rank may have come between the timeout and this lock.
        world.change(namespace, |job| {
            let still_connecting = *job.subscribe().borrow() == Stage::Connecting;
            let answer = match waited {
                Waited::TimedOut if still_connecting => {
                    Err(job.connect_timed_out(caller.rank, ticket, &hubs))
                }
                _ => job.connected(caller.rank, caller.incarnation),
            };
            (answer, Transition::None)
        })?
    })
}

/// Hands in a rank's settings; returns when every rank has and the hubs have allocated.
pub(crate) async fn init(
    registry: &Arc<Registry>,
    body: TableBody,
) -> Result<ServiceInitialised, ServiceError> {
    let arrived = Instant::now();
    let caller = body.caller;
    let namespace = caller.namespace;
    let (settings, body) = parse(body).await?;
    let now = Now::read();
    let submission = registry.with(|world| {
        world.change(namespace, |job| {
            let deadline = deadline(arrived, job.options.rendezvous_timeout_s);
            let taken =
                job.submit(caller.rank, caller.incarnation, &settings, now).map(
                    |submission| match submission {
                        Submission::Done => None,
                        Submission::Wait { ticket } => Some((job.wait(ticket), None, deadline)),
                        Submission::Compare { ticket, first, settings } => {
                            Some((job.wait(ticket), Some((first, settings)), deadline))
                        }
                    },
                );
            (taken, Transition::None)
        })?
    })?;
    let Some((ticket, first, deadline)) = submission else {
        return registry.with(|world| world.job(namespace)?.initialised(caller.rank));
    };
    let mut waiting = Waiting::new(registry, caller, ticket.number, Wait::Init);
    if let Some((first, theirs)) = first {
        compare(registry, caller, settings, first, theirs).await?;
    } else {
        drop(settings);
    }
    // Megabytes of key table have been compared and are gone: the next body may come in.
    drop(body);
    if let Some(agreed) = registry.with(|world| world.agree(namespace, caller.rank, Now::read()))? {
        tokio::spawn(allocate(registry.clone(), namespace, agreed));
    }
    let waited = wait_beyond(registry, Stage::Initialising, ticket, deadline).await?;
    waiting.over = true;
    registry.with(|world| {
        world.change(namespace, |job| {
            let still_initialising = *job.subscribe().borrow() == Stage::Initialising;
            let transition = match waited {
                Waited::TimedOut if still_initialising => job.init_timed_out(Now::read()),
                _ => Transition::None,
            };
            (job.initialised(caller.rank), transition)
        })?
    })
}

/// Parses and checks the settings in a call to InitService. The body comes back, spent, because it holds its place in the budget.
async fn parse(mut body: TableBody) -> Result<(Arc<Settings>, TableBody), ServiceError> {
    blocking(move || {
        let call: InitService = body.parse()?;
        // What was proved came first in the body, and nothing can come twice.
        if (call.rank, call.incarnation) != (body.caller.rank, body.caller.incarnation) {
            return Err(refusal(ErrorCode::BadRequest, "the body names two ranks"));
        }
        call.settings.check().map_err(|wrong| {
            refusal(
                ErrorCode::BadRequest,
                format!("the settings of rank {} cannot be used: {wrong}", call.rank),
            )
        })?;
        Ok((Arc::new(call.settings), body))
    })
    .await?
}

/// Compares a rank's settings with the first rank's; where they differ the job is over for everyone.
async fn compare(
    registry: &Arc<Registry>,
    caller: Rank,
    mine: Arc<Settings>,
    first: u32,
    theirs: Arc<Settings>,
) -> Result<(), ServiceError> {
    let compared = blocking(move || mine.agree(caller.rank, first, &theirs)).await?;
    let Err(disagreement) = compared else { return Ok(()) };
    registry.with(|world| {
        world.change(caller.namespace, |job| {
            let message = format!("the ranks of job `{}` do not want the same: {disagreement}", job.name);
            let transition = job.fail(ErrorCode::Disagreement, message, Now::read());
            (job.initialised(caller.rank).map(drop), transition)
        })?
    })
}

enum Waited {
    Reached,
    TimedOut,
}

async fn wait_beyond(
    registry: &Registry,
    stage: Stage,
    mut ticket: Ticket,
    deadline: Instant,
) -> Result<Waited, ServiceError> {
    let reached = reach(&mut ticket.stage, stage);
    tokio::select! {
        biased;
        () = registry.stopped() => Err(shutting_down()),
        waited = tokio::time::timeout_at(deadline, reached) => {
            Ok(if waited.is_ok() { Waited::Reached } else { Waited::TimedOut })
        }
    }
}

async fn reach(stages: &mut watch::Receiver<Stage>, stage: Stage) {
    // An error says that the job was forgotten, which the caller finds out under the lock.
    let _ = stages.wait_for(|reached| *reached > stage).await;
}

fn deadline(from: Instant, timeout_s: f64) -> Instant {
    from + Duration::from_secs_f64(timeout_s)
}

#[derive(Clone, Copy)]
enum Wait {
    Connect,
    Init,
}

/// A call that waits. When its connection breaks the call is dropped in the middle of its wait, and this tells the job.
struct Waiting<'a> {
    registry: &'a Registry,
    caller: Rank,
    ticket: u64,
    wait: Wait,
    /// Whether the wait came to an end of its own.
    over: bool,
}

impl<'a> Waiting<'a> {
    fn new(registry: &'a Registry, caller: Rank, ticket: u64, wait: Wait) -> Self {
        Waiting { registry, caller, ticket, wait, over: false }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let now = Now::read();
        self.registry.with(|world| {
            let left = world.change(self.caller.namespace, |job| {
                job.waited(now);
                match self.wait {
                    Wait::Connect if !self.over => job.connect_dropped(self.caller.rank, self.ticket),
                    Wait::Init if !self.over => job.init_dropped(self.caller.rank, self.ticket, now),
                    _ => {}
                }
                ((), Transition::None)
            });
            // A job that was forgotten meanwhile counts no calls.
            drop(left);
        });
    }
}
