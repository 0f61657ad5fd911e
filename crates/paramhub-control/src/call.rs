//! One HTTP exchange: sends the request, reads the answer or refusal, and retries where that is safe.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use paramhub_core::limits::REQUEST_BYTES_MAX;
use paramhub_core::service::{ErrorCode, ServiceError};
use serde::de::DeserializeOwned;
use ureq::http::{Request, Response, StatusCode};
use ureq::{Agent, Body};

use crate::error::ControlError;
use crate::tls::{self, Recognition};

/// The number of retries of a call whose connection broke, or for which the manager has no capacity: a
/// manager with many callers breaks connections before it handles their calls.
const RETRIES: u32 = 6;
/// The pause before the first retry; it doubles with each further one.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// The longest such pause.
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(1);
/// The maximum of bytes in an answer: a hub's plan is a key table with a little around it.
const ANSWER_BYTES_MAX: u64 = REQUEST_BYTES_MAX as u64 + (64 << 20);

/// A request, and how long its answer may take.
pub(crate) struct Call<'a> {
    pub(crate) method: &'static str,
    /// The path, from the first slash on.
    pub(crate) path: &'a str,
    pub(crate) token: Option<&'a str>,
    /// The body in JSON, where the call has one.
    pub(crate) body: Option<Vec<u8>>,
    /// The time from dialling to the last byte of the answer; retries after a broken connection share it.
    pub(crate) timeout: Duration,
    /// `true` if two calls have the same effect as one.
    pub(crate) repeatable: bool,
}

impl Call<'_> {
    /// Makes the call. `retry_timeout` is how long a refused connection is dialled again, from the beginning of the call
    /// and from each break of a connection: the manager may be about to start, or may be restarting.
    pub(crate) fn make(
        &self,
        agent: &Agent,
        url: &str,
        recognition: &Recognition,
        retry_timeout: Duration,
    ) -> Result<Vec<u8>, ControlError> {
        let size = self.body.as_ref().map_or(0, Vec::len);
        if size > REQUEST_BYTES_MAX {
            let cause = format!("it has {size} bytes, more than the {REQUEST_BYTES_MAX} a manager takes");
            return Err(ControlError::Request { url: url.to_string(), cause });
        }
        let mut away_since = Instant::now();
        let mut attempts = Attempts { left: RETRIES, pause: RETRY_PAUSE };
        let (mut first_sent, mut first_break, mut has_doubted) = (None, None, false);
        loop {
            let sent = *first_sent.get_or_insert_with(Instant::now);
            let left = self.timeout.saturating_sub(sent.elapsed());
            let has_time = left > RETRY_PAUSE;
            let answer = match self.attempt(agent, url, left) {
                // A manager without capacity for a caller answers so before it does anything.
                Ok(answer)
                    if answer.status() == StatusCode::SERVICE_UNAVAILABLE && has_time && attempts.again() =>
                {
                    continue;
                }
                Ok(answer) => read_answer(answer, url),
                Err(failure) if is_refused(&failure) && away_since.elapsed() < retry_timeout => {
                    if first_break.is_none() {
                        first_sent = None;
                    }
                    std::thread::sleep(RETRY_PAUSE);
                    continue;
                }
                Err(failure) if is_broken(&failure) && has_time && attempts.again() => {
                    away_since = Instant::now();
                    first_break.get_or_insert(failure);
                    continue;
                }
                // The manager has another authority than the one that is known. A token tells which.
                Err(ureq::Error::Io(cause))
                    if tls::is_unknown_certificate(&cause) && !has_doubted && recognition.doubt() =>
                {
                    has_doubted = true;
                    continue;
                }
                Err(failure) => Err(self.explain(failure, url)),
            };
            return match (answer, first_break) {
                // Perhaps this very call took the name before its connection broke.
                (Err(refused), Some(broken))
                    if !self.repeatable && refused.code() == Some(ErrorCode::NameTaken) =>
                {
                    Err(self.explain(broken, url))
                }
                (answer, _) => answer,
            };
        }
    }

    fn attempt(&self, agent: &Agent, url: &str, left: Duration) -> Result<Response<Body>, ureq::Error> {
        let mut request = Request::builder().method(self.method).uri(format!("{url}{}", self.path));
        if let Some(token) = self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        match &self.body {
            Some(body) => {
                let request = request.header("content-type", "application/json").body(body.as_slice())?;
                agent.run(agent.configure_request(request).timeout_global(Some(left)).build())
            }
            None => {
                let request = request.body(())?;
                agent.run(agent.configure_request(request).timeout_global(Some(left)).build())
            }
        }
    }

    fn explain(&self, failure: ureq::Error, url: &str) -> ControlError {
        let url = url.to_string();
        match failure {
            ureq::Error::Timeout(ureq::Timeout::Connect | ureq::Timeout::Resolve) => {
                ControlError::Unreachable { url, cause: "the connection was not answered".into() }
            }
            ureq::Error::Timeout(_) => {
                let (path, seconds) = (self.path.to_owned(), self.timeout.as_secs_f64());
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

/// Parses a manager's JSON.
pub(crate) fn decode<T: DeserializeOwned>(answer: &[u8], url: &str) -> Result<T, ControlError> {
    serde_json::from_slice(answer).map_err(|cause| ControlError::Protocol {
        url: url.to_string(),
        cause: format!("its answer cannot be read: {cause}"),
    })
}

fn read_answer(mut answer: Response<Body>, url: &str) -> Result<Vec<u8>, ControlError> {
    let status = answer.status();
    let body = answer.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_vec().map_err(|cause| {
        let cause = format!("its answer broke off: {cause}");
        ControlError::Unreachable { url: url.to_string(), cause }
    })?;
    if status.is_success() {
        return Ok(body);
    }
    match serde_json::from_slice::<ServiceError>(&body) {
        Ok(refusal) => Err(ControlError::Service(refusal)),
        Err(_) => {
            Err(ControlError::Protocol { url: url.to_string(), cause: format!("it answered {status}") })
        }
    }
}

fn is_refused(failure: &ureq::Error) -> bool {
    matches!(failure, ureq::Error::Io(cause) if cause.kind() == ErrorKind::ConnectionRefused)
}

fn is_broken(failure: &ureq::Error) -> bool {
    const BROKEN: [ErrorKind; 4] = [
        ErrorKind::ConnectionReset,
        ErrorKind::ConnectionAborted,
        ErrorKind::BrokenPipe,
        ErrorKind::UnexpectedEof,
    ];
    matches!(failure, ureq::Error::Io(cause) if BROKEN.contains(&cause.kind()))
}
