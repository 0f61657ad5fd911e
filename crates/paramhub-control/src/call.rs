//! One HTTP exchange: sends the request, reads the answer or refusal, and retries where that is safe.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paramhub_core::limits::REQUEST_BYTES_MAX;
use paramhub_core::service::{ErrorCode, ServiceError};
use serde::de::DeserializeOwned;
use ureq::http::StatusCode;

use crate::error::ControlError;
use crate::managers::{Answer, Managers, NoAnswer};
use crate::tls;

/// The number of retries of a call whose connection broke, or for which the manager has no capacity: a
/// manager with many callers breaks connections before it handles their calls.
const RETRIES: u32 = 6;
/// The pause before the first retry; it doubles with each further one.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// The longest such pause.
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(1);
/// How long a call goes through several managers until one leads, unless the client was told otherwise.
const LEADER_PATIENCE: Duration = Duration::from_secs(10);
/// The pause before a call goes through them again, once the retries are used up.
const LEADER_PAUSE: Duration = Duration::from_millis(300);
/// The maximum of bytes in an answer: a hub's plan is a key table with a little around it.
pub(crate) const ANSWER_BYTES_MAX: u64 = REQUEST_BYTES_MAX as u64 + (64 << 20);

/// A request, and how long its answer may take.
#[derive(Clone)]
pub(crate) struct Call {
    pub(crate) method: &'static str,
    /// The path, from the first slash on.
    pub(crate) path: String,
    pub(crate) token: Option<String>,
    /// One more header.
    pub(crate) header: Option<(&'static str, String)>,
    /// The body in JSON, where the call has one.
    pub(crate) body: Option<Arc<Vec<u8>>>,
    /// The time from dialling to the last byte of the answer; retries after a broken connection share it.
    pub(crate) timeout: Duration,
    /// `true` if two calls have the same effect as one.
    pub(crate) repeatable: bool,
    pub(crate) answer_bytes_max: u64,
}

impl Call {
    /// Makes the call. `retry_timeout` is how long a refused connection is dialled again, from the beginning of the call
    /// and from each break of a connection: the manager may be about to start, or may be restarting. By default it is
    /// not dialled again if it is the only manager.
    ///
    /// Where there are several managers, each is called, from the one that has answered last, until one has the call. What
    /// remains then is the same as for a single manager.
    pub(crate) fn make(
        &self,
        managers: &Managers,
        retry_timeout: Option<Duration>,
    ) -> Result<Vec<u8>, ControlError> {
        let size = self.body.as_ref().map_or(0, |body| body.len());
        if size > REQUEST_BYTES_MAX {
            let cause = format!("it has {size} bytes, more than the {REQUEST_BYTES_MAX} a manager takes");
            return Err(ControlError::Request { url: managers.url.clone(), cause });
        }
        let mut away_since = Instant::now();
        let mut attempts = Attempts { left: RETRIES, pause: RETRY_PAUSE };
        let (mut first_sent, mut first_break, mut has_doubted, mut was_reached) = (None, None, false, false);
        let mut round = Round::from(managers, managers.current());
        loop {
            let sent = *first_sent.get_or_insert_with(Instant::now);
            let left = self.timeout.saturating_sub(sent.elapsed());
            let has_time = left > RETRY_PAUSE;
            let url = managers.addresses[round.place].url.as_str();
            let miss = match managers.ask(round.place, self, left) {
                Ok(answer) if answer.status == StatusCode::SERVICE_UNAVAILABLE => {
                    match not_leader(&answer) {
                        Some(refused) => Miss::not_leader(refused, url, managers),
                        // A manager without capacity for a caller answers so before it does anything.
                        None if has_time && attempts.again() => continue,
                        None => return read_answer(answer, url),
                    }
                }
                Ok(answer) => {
                    managers.remember(round.place);
                    return match (read_answer(answer, url), first_break) {
                        // Perhaps this very call took the name before its connection broke.
                        (Err(refused), Some(broken))
                            if !self.repeatable && refused.code() == Some(ErrorCode::NameTaken) =>
                        {
                            Err(broken)
                        }
                        (answer, _) => answer,
                    };
                }
                // The manager has another authority than the one that is known. A token tells which.
                Err(NoAnswer::Failed(ureq::Error::Io(cause)))
                    if tls::is_unknown_certificate(&cause)
                        && !has_doubted
                        && managers.recognition.doubt() =>
                {
                    has_doubted = true;
                    continue;
                }
                Err(NoAnswer::Failed(failure)) => {
                    Miss { kind: MissKind::of(&failure), leader: None, error: self.explain(failure, url) }
                }
                Err(NoAnswer::Deposed(leader)) => {
                    let cause = "it is silent, and another manager leads".to_owned();
                    let error = ControlError::Unreachable { url: url.to_owned(), cause };
                    Miss { kind: MissKind::Broken, leader: Some(leader), error }
                }
            };
            if miss.kind == MissKind::Broken && first_break.is_none() {
                first_break = Some(miss.error.clone());
            }
            was_reached |= miss.kind > MissKind::Refused;
            if !was_reached {
                first_sent = None;
            }
            if round.note(miss) && has_time {
                continue;
            }
            let patience =
                retry_timeout.unwrap_or(match managers.are_several() || round.kind == MissKind::NotLeader {
                    true => LEADER_PATIENCE,
                    false => Duration::ZERO,
                });
            let is_patient = |since: Instant| since.elapsed() < patience;
            let goes_on = match round.kind {
                MissKind::Unreachable if managers.are_several() => {
                    is_patient(away_since) && pause(RETRY_PAUSE)
                }
                MissKind::Unreachable => false,
                MissKind::Refused => is_patient(away_since) && pause(RETRY_PAUSE),
                MissKind::NotLeader => {
                    has_time && (attempts.again() || is_patient(away_since) && pause(LEADER_PAUSE))
                }
                MissKind::Broken => {
                    let again = has_time && attempts.again();
                    away_since = Instant::now();
                    again
                }
            };
            if !goes_on {
                return Err(round.into_error(managers));
            }
            round = Round::from(managers, round.next);
        }
    }

    fn explain(&self, failure: ureq::Error, url: &str) -> ControlError {
        let url = url.to_string();
        match failure {
            ureq::Error::Timeout(ureq::Timeout::Connect | ureq::Timeout::Resolve) => {
                ControlError::Unreachable { url, cause: "the connection was not answered".into() }
            }
            ureq::Error::Timeout(_) => {
                let (path, seconds) = (self.path.clone(), self.timeout.as_secs_f64());
                ControlError::Silent { url, path, seconds }
            }
            ureq::Error::Io(cause) => tls::explain(&cause, &url)
                .unwrap_or_else(|| ControlError::Unreachable { url, cause: cause.to_string() }),
            ureq::Error::HostNotFound => {
                ControlError::Unreachable { url, cause: "its host name is unknown here".into() }
            }
            ureq::Error::ConnectionFailed => {
                ControlError::Unreachable { url, cause: "the connection failed".into() }
            }
            ureq::Error::Http(cause) => ControlError::Request { url, cause: cause.to_string() },
            other => ControlError::Protocol { url, cause: other.to_string() },
        }
    }
}

/// Why a manager has not handled a call, and what a further attempt may bring. The greatest of a round decides how it
/// goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum MissKind {
    /// It cannot be called or not be understood.
    Unreachable,
    /// Nothing listens there.
    Refused,
    /// Another leads, or none.
    NotLeader,
    /// The connection broke: perhaps the manager has handled the call.
    Broken,
}

impl MissKind {
    fn of(failure: &ureq::Error) -> MissKind {
        const BROKEN: [ErrorKind; 4] = [
            ErrorKind::ConnectionReset,
            ErrorKind::ConnectionAborted,
            ErrorKind::BrokenPipe,
            ErrorKind::UnexpectedEof,
        ];
        match failure {
            ureq::Error::Io(cause) if cause.kind() == ErrorKind::ConnectionRefused => MissKind::Refused,
            ureq::Error::Io(cause) if BROKEN.contains(&cause.kind()) => MissKind::Broken,
            _ => MissKind::Unreachable,
        }
    }
}

struct Miss {
    kind: MissKind,
    /// The place of the manager that leads, if that is known.
    leader: Option<usize>,
    error: ControlError,
}

impl Miss {
    fn not_leader(refused: ServiceError, url: &str, managers: &Managers) -> Miss {
        let leader = refused.leader.as_ref().and_then(|url| managers.place_of(url));
        let error = ControlError::NoLeader { url: url.to_owned(), cause: refused.message };
        Miss { kind: MissKind::NotLeader, leader, error }
    }
}

/// One call of each manager.
struct Round {
    /// The manager to call now.
    place: usize,
    was_called: Vec<bool>,
    kind: MissKind,
    /// The error of the miss that decides.
    error: Option<ControlError>,
    /// Where the next round begins: at the leader or, if that is not known, at a manager that answers.
    next: usize,
}

impl Round {
    fn from(managers: &Managers, place: usize) -> Round {
        let was_called = vec![false; managers.addresses.len()];
        Round { place, was_called, kind: MissKind::Unreachable, error: None, next: place }
    }

    /// Notes a miss. Returns whether there is a manager left to call in this round, which is then the next.
    fn note(&mut self, miss: Miss) -> bool {
        let Miss { kind, leader, error } = miss;
        self.was_called[self.place] = true;
        if kind == MissKind::NotLeader {
            self.next = self.place;
        }
        self.next = leader.unwrap_or(self.next);
        if self.error.is_none() || kind >= self.kind {
            self.kind = kind;
            self.error = Some(error);
        }
        let count = self.was_called.len();
        let after = (self.place..self.place + count).map(|place| place % count);
        let next = leader.into_iter().chain(after).find(|&place| !self.was_called[place]);
        self.place = next.unwrap_or(self.place);
        next.is_some()
    }

    /// The error of a call that is given up after this round.
    fn into_error(self, managers: &Managers) -> ControlError {
        let url = managers.url.clone();
        match self.error.expect("a round has called a manager") {
            ControlError::Unreachable { cause, .. } => ControlError::Unreachable { url, cause },
            ControlError::NoLeader { cause, .. } => ControlError::NoLeader { url, cause },
            other => other,
        }
    }
}

/// The retries that a call has left.
struct Attempts {
    left: u32,
    pause: Duration,
}

impl Attempts {
    /// Pauses before a retry; false where none is left.
    fn again(&mut self) -> bool {
        if self.left == 0 {
            return false;
        }
        self.left -= 1;
        std::thread::sleep(self.pause);
        self.pause = (self.pause * 2).min(RETRY_PAUSE_MAX);
        true
    }
}

/// Pauses before a retry.
fn pause(pause: Duration) -> bool {
    std::thread::sleep(pause);
    true
}

/// Parses a manager's JSON.
pub(crate) fn decode<T: DeserializeOwned>(answer: &[u8], url: &str) -> Result<T, ControlError> {
    serde_json::from_slice(answer).map_err(|cause| ControlError::Protocol {
        url: url.to_string(),
        cause: format!("its answer cannot be read: {cause}"),
    })
}

fn read_answer(answer: Answer, url: &str) -> Result<Vec<u8>, ControlError> {
    let body = answer.body.map_err(|cause| {
        let cause = format!("its answer broke off: {cause}");
        ControlError::Unreachable { url: url.to_string(), cause }
    })?;
    if answer.status.is_success() {
        return Ok(body);
    }
    match serde_json::from_slice::<ServiceError>(&body) {
        Ok(refusal) => Err(ControlError::Service(refusal)),
        Err(_) => Err(ControlError::Protocol {
            url: url.to_string(),
            cause: format!("it answered {}", answer.status),
        }),
    }
}

/// The refusal of a manager that does not lead.
fn not_leader(answer: &Answer) -> Option<ServiceError> {
    let refused: ServiceError = serde_json::from_slice(answer.body.as_ref().ok()?).ok()?;
    (refused.code == ErrorCode::NotLeader).then_some(refused)
}
