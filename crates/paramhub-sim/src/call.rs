//! Calls to the manager, and how a process repeats one that had no answer, as `paramhub-control` does.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use paramhub_core::service::{
    ConnectService, HubCommand, HubEvent, HubRegistered, HubReport, InitService, LeaveService,
    NumberedCommand, PollCommands, RegisterHub, ServiceConnected, ServiceError, ServiceInitialised,
};

use crate::message::Message;
use crate::network::{Arrival, Process, StreamId};
use crate::world::{Context, Wake};

/// How often a call whose connection broke is made again.
const RETRIES: u32 = 6;
/// The pause before the first repetition; it doubles with each further one.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// The longest such pause.
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(1);

/// A call to the manager.
pub(crate) enum Request {
    /// A hub joins.
    Register(RegisterHub),
    /// A hub waits for commands.
    Poll(HubRegistered, PollCommands),
    /// A hub reports.
    Report(HubRegistered, HubReport),
    /// A rank joins the job.
    Connect(Box<ConnectService>),
    /// A rank hands in its settings.
    Init(Box<InitService>),
    /// A rank leaves before it has reached a hub.
    Leave(LeaveService),
}

/// The manager's answer to a call.
#[derive(Clone)]
pub(crate) enum Answer {
    /// The hub has joined.
    Registered(HubRegistered),
    /// The commands that wait for a hub.
    Commands(Vec<NumberedCommand>),
    /// The call was taken, and there is nothing to say.
    Taken,
    /// Every rank has joined.
    Connected(Box<ServiceConnected>),
    /// The hubs have allocated.
    Initialised(Arc<ServiceInitialised>),
    /// The manager refuses what was asked.
    Refused(ServiceError),
}

/// Why a call has failed.
#[derive(Clone, Debug)]
pub(crate) enum CallError {
    /// The manager does not answer.
    Away(&'static str),
    /// It refuses what was asked.
    Refused(ServiceError),
}

/// Which of the calls that a process makes beside one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// A hub waits for commands, or joins.
    Commands,
    /// A hub reports.
    Reports,
    /// A worker joins its job.
    Member,
    /// A worker asks where the chunks are.
    Shares,
}

/// The calls that a process makes one after the other.
pub(crate) struct Caller {
    process: Process,
    line: Line,
    /// How long a manager at which nobody listens is called again.
    patience: Duration,
    call: Option<Call>,
    /// The number of the newest time for which a call waits; earlier ones do not count any more.
    awaited: u64,
}

/// A call that has no answer yet.
struct Call {
    request: Arc<Request>,
    timeout: Duration,
    /// When it was first sent to a manager that may have been there.
    first_sent: Option<Duration>,
    /// When the manager began to be away.
    away_since: Duration,
    has_broken: bool,
    retries_left: u32,
    pause: Duration,
    state: CallState,
}

#[derive(Clone, Copy)]
enum CallState {
    Sent(StreamId),
    /// The pause after a refused connection.
    Refused,
    /// The pause after a connection that broke.
    Broken,
}

impl Caller {
    pub(crate) fn new(process: Process, line: Line, patience: Duration) -> Caller {
        Caller { process, line, patience, call: None, awaited: 0 }
    }

    /// Whether a call has no answer yet.
    pub(crate) fn is_calling(&self) -> bool {
        self.call.is_some()
    }

    /// Makes a call, whose answer may take so long.
    pub(crate) fn call(&mut self, request: Request, timeout: Duration, context: &mut Context<'_>) {
        let call = Call {
            request: Arc::new(request),
            timeout,
            first_sent: None,
            away_since: context.agenda.now(),
            has_broken: false,
            retries_left: RETRIES,
            pause: RETRY_PAUSE,
            state: CallState::Refused,
        };
        self.dial(call, context);
    }

    fn dial(&mut self, mut call: Call, context: &mut Context<'_>) {
        let now = context.agenda.now();
        let first_sent = *call.first_sent.get_or_insert(now);
        let stream = context.network.open(self.process, Process::Manager);
        context.trace(|| format!("{:?} calls on {stream:?}: {:?}", self.process, call.request));
        context.send(stream, self.process, Message::Call(call.request.clone()));
        call.state = CallState::Sent(stream);
        let left = (first_sent + call.timeout).saturating_sub(now);
        self.call = Some(call);
        self.wait(left, context);
    }

    fn wait(&mut self, wait: Duration, context: &mut Context<'_>) {
        self.awaited += 1;
        context.wake_in(self.process, wait, Wake::Call(self.line, self.awaited));
    }

    /// A stream learns something. Returns how the call has ended, if that ends it.
    pub(crate) fn arrived(
        &mut self,
        stream: StreamId,
        arrival: &Arrival,
        context: &mut Context<'_>,
    ) -> Option<Result<Answer, CallError>> {
        let mut call =
            self.call.take_if(|call| matches!(call.state, CallState::Sent(sent) if sent == stream))?;
        let now = context.agenda.now();
        let has_time =
            call.first_sent.is_some_and(|sent| now.saturating_sub(sent) + RETRY_PAUSE < call.timeout);
        match arrival {
            Arrival::Message(Message::Answer(answer)) => {
                context.close(stream, self.process);
                Some(match answer {
                    Answer::Refused(refusal) => Err(CallError::Refused(refusal.clone())),
                    answer => Ok(answer.clone()),
                })
            }
            Arrival::Message(_) => {
                self.call = Some(call);
                None
            }
            Arrival::Refused if now.saturating_sub(call.away_since) < self.patience => {
                if !call.has_broken {
                    call.first_sent = None;
                }
                call.state = CallState::Refused;
                self.call = Some(call);
                self.wait(RETRY_PAUSE, context);
                None
            }
            Arrival::Closed | Arrival::Broken | Arrival::Reset if has_time && call.retries_left > 0 => {
                call.retries_left -= 1;
                let pause = call.pause;
                call.pause = (pause * 2).min(RETRY_PAUSE_MAX);
                (call.has_broken, call.state) = (true, CallState::Broken);
                self.call = Some(call);
                self.wait(pause, context);
                None
            }
            Arrival::Refused => Some(Err(CallError::Away("nobody listens"))),
            Arrival::Closed | Arrival::Broken | Arrival::Reset => {
                Some(Err(CallError::Away("the connection broke")))
            }
        }
    }

    /// A time has come for which a call has waited. Returns how the call has ended, if that ends it.
    pub(crate) fn woken(
        &mut self,
        awaited: u64,
        context: &mut Context<'_>,
    ) -> Option<Result<Answer, CallError>> {
        let mut call = self.call.take_if(|_| awaited == self.awaited)?;
        match call.state {
            CallState::Sent(stream) => {
                context.close(stream, self.process);
                return Some(Err(CallError::Away("it has not answered in time")));
            }
            CallState::Refused => {}
            CallState::Broken => call.away_since = context.agenda.now(),
        }
        self.dial(call, context);
        None
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CallError::Away(why) => write!(f, "the connection manager does not answer: {why}"),
            CallError::Refused(refusal) => refusal.fmt(f),
        }
    }
}

/// Settings and plans are left out: they are the same in all calls.
impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Request::Register(_) => f.write_str("Register"),
            Request::Poll(hub, poll) => write!(f, "Poll(hub {}, {})", hub.hub, poll.acknowledged),
            Request::Report(hub, report) => {
                let living: Vec<_> = report.jobs.iter().map(|job| job.namespace).collect();
                write!(f, "Report(hub {}, living {living:?}, [", hub.hub)?;
                report.events.iter().try_for_each(|event| describe_event(event, f))?;
                f.write_str("])")
            }
            Request::Connect(call) => write!(f, "Connect(rank {}, {:?})", call.rank, call.incarnation),
            Request::Init(call) => write!(f, "Init(rank {}, {:?})", call.rank, call.incarnation),
            Request::Leave(call) => write!(f, "Leave(rank {}, {})", call.rank, call.reason),
        }
    }
}

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Answer::Registered(hub) => write!(f, "Registered(hub {})", hub.hub),
            Answer::Commands(commands) => {
                f.write_str("Commands[")?;
                for NumberedCommand { sequence, command } in commands {
                    match command {
                        HubCommand::Allocate(_) => write!(f, "{sequence}: Allocate, ")?,
                        other => write!(f, "{sequence}: {other:?}, ")?,
                    }
                }
                f.write_str("]")
            }
            Answer::Taken => f.write_str("Taken"),
            Answer::Connected(connected) => write!(f, "Connected(epoch {})", connected.epoch),
            Answer::Initialised(_) => f.write_str("Initialised"),
            Answer::Refused(refusal) => write!(f, "Refused({refusal:?})"),
        }
    }
}

fn describe_event(event: &HubEvent, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match event {
        HubEvent::Allocated { .. } => f.write_str("Allocated, "),
        other => write!(f, "{other:?}, "),
    }
}
