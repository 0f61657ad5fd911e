//! Calls to etcd: one member at a time, the next when it does not answer.

use std::error::Error as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use etcd_client::{Certificate, Client, ConnectOptions, Error, Identity, TlsOptions};
use tokio::sync::Mutex;
use tokio::time::timeout;

use crate::etcd_address::EtcdAddress;

/// The time that one member may take for one call. A leader that no member answers within a few of these loses the lead.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_millis(800);
/// The same for a write, which waits for the disks of most members.
pub(super) const WRITE_TIMEOUT: Duration = Duration::from_secs(3);
/// The most bytes of an answer: a page of records.
const ANSWER_BYTES_MAX: usize = 128 << 20;

/// The codes of gRPC that say that a call was not handled, or perhaps was.
const CANCELLED: i32 = 1;
const UNKNOWN: i32 = 2;
const DEADLINE_EXCEEDED: i32 = 4;
const ABORTED: i32 = 10;
const UNAVAILABLE: i32 = 14;

/// Why a call failed. The texts are for people.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum CallError {
    /// No member has answered: whether the call had its effect is not known.
    #[error("etcd does not answer: {0}")]
    Unanswered(String),
    /// etcd refuses the call.
    #[error("etcd refuses this: {0}")]
    Refused(String),
    /// What etcd has answered cannot be used.
    #[error("{0}")]
    Unusable(String),
}

/// The members of one etcd.
pub(super) struct Connection {
    members: Vec<Member>,
    options: ConnectOptions,
    /// The member that answered last.
    current: AtomicUsize,
}

struct Member {
    url: String,
    /// Made by the first call to it, since its user is authenticated then.
    client: Mutex<Option<Client>>,
}

impl Connection {
    /// A connection to the members of an address. Dials nothing yet. The error is text for people.
    pub(super) fn new(address: &EtcdAddress) -> Result<Connection, String> {
        let scheme = if address.tls.is_some() { "https" } else { "http" };
        let member =
            |member: &String| Member { url: format!("{scheme}://{member}"), client: Mutex::new(None) };
        // A member that is there but cut off from the others must not answer with what it remembers of them.
        let mut options = ConnectOptions::new()
            .with_connect_timeout(CALL_TIMEOUT)
            .with_require_leader(true)
            .with_auto_token_refresh(true);
        if let Some(user) = &address.user {
            options = options.with_user(user.name.clone(), user.password.clone());
        }
        if let Some(tls) = &address.tls {
            let read = |path: &std::path::Path| {
                std::fs::read(path).map_err(|cause| format!("{}: {cause}", path.display()))
            };
            let mut files = TlsOptions::new().ca_certificate(Certificate::from_pem(read(&tls.authority)?));
            if let Some((certificate, key)) = &tls.own {
                files = files.identity(Identity::from_pem(read(certificate)?, read(key)?));
            }
            options = options.with_tls(files);
        }
        Ok(Connection {
            members: address.members.iter().map(member).collect(),
            options,
            current: AtomicUsize::new(0),
        })
    }

    /// Makes a call, at each member in turn until one answers. Each may take as long as `patience`.
    pub(super) async fn call<T, Answer: Future<Output = Result<T, Error>>>(
        &self,
        patience: Duration,
        call: impl Fn(Client) -> Answer,
    ) -> Result<T, CallError> {
        let first = self.current.load(Ordering::Relaxed);
        let mut unanswered = String::new();
        for index in (first..first + self.members.len()).map(|index| index % self.members.len()) {
            let member = &self.members[index];
            match self.call_member(member, patience, &call).await {
                Ok(answer) => {
                    self.current.store(index, Ordering::Relaxed);
                    return Ok(answer);
                }
                Err(CallError::Unanswered(cause)) => unanswered = cause,
                Err(refused) => return Err(refused),
            }
        }
        Err(CallError::Unanswered(unanswered))
    }

    async fn call_member<T, Answer: Future<Output = Result<T, Error>>>(
        &self,
        member: &Member,
        patience: Duration,
        call: impl Fn(Client) -> Answer,
    ) -> Result<T, CallError> {
        let answer = async {
            let client = {
                let mut slot = member.client.lock().await;
                match &*slot {
                    Some(client) => client.clone(),
                    None => {
                        slot.insert(Client::connect([&member.url], Some(self.options.clone())).await?).clone()
                    }
                }
            };
            call(client).await
        };
        let at = |cause: String| format!("{}: {cause}", member.url);
        let cause = match timeout(patience, answer).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) if is_unanswered(&error) => explain(&error),
            Ok(Err(error)) => return Err(CallError::Refused(at(explain(&error)))),
            Err(_) => format!("no answer within {patience:?}"),
        };
        // Nothing says that the connection still leads anywhere: the next call makes another.
        *member.client.lock().await = None;
        Err(CallError::Unanswered(at(cause)))
    }
}

/// Takes answers of a whole page.
pub(super) fn reader(client: &Client) -> etcd_client::KvClient {
    client.kv_client().max_decoding_message_size(ANSWER_BYTES_MAX)
}

fn is_unanswered(error: &Error) -> bool {
    match error {
        Error::GRpcStatus(status) => {
            [CANCELLED, UNKNOWN, DEADLINE_EXCEEDED, ABORTED, UNAVAILABLE].contains(&(status.code() as i32))
        }
        Error::IoError(_)
        | Error::TransportError(_)
        | Error::WatchError(_)
        | Error::EndpointError(_)
        | Error::Internal(_) => true,
        _ => false,
    }
}

/// What went wrong, from the outermost cause to the innermost.
fn explain(error: &Error) -> String {
    let (mut text, mut cause) = match error {
        Error::GRpcStatus(status) => (status.message().to_owned(), status.source()),
        Error::TransportError(error) => (error.to_string(), error.source()),
        other => (other.to_string(), other.source()),
    };
    while let Some(inner) = cause {
        let inner_text = inner.to_string();
        if !text.ends_with(&inner_text) {
            text = if text.is_empty() { inner_text } else { format!("{text}: {inner_text}") };
        }
        cause = inner.source();
    }
    text
}
