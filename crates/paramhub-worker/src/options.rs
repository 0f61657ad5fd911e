use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paramhub_core::settings::Settings;
use paramhub_transport::SCRATCH_BYTES_DEFAULT;
use paramhub_transport::interface::Selector;

use crate::error::{Who, WorkerError};

/// How tensors travel between a worker and its hubs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Shared memory to hubs on this host, TCP to others. A hub is on this host if it can be reached over the Unix socket
    /// whose random name it told the connection manager.
    #[default]
    Auto,
    /// TCP, wherever the hub is.
    Tcp,
    /// Shared memory; a hub on another host is an error.
    Shm,
}

impl Transport {
    const ALL: [Transport; 3] = [Transport::Auto, Transport::Tcp, Transport::Shm];
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Transport::Auto => "auto",
            Transport::Tcp => "tcp",
            Transport::Shm => "shm",
        })
    }
}

impl FromStr for Transport {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let named = Transport::ALL.into_iter().find(|transport| transport.to_string() == text);
        named.ok_or_else(|| format!("unknown transport `{text}`: expected auto, tcp or shm"))
    }
}

/// Whether a worker reads the one copy of the parameters that a hub on its host keeps for all its workers there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sharing {
    /// It receives its own.
    #[default]
    Never,
    /// It does if that is possible: [`Job::shares_parameters`](crate::Job::shares_parameters) tells.
    WherePossible,
    /// It does; where that is impossible joining fails.
    Always,
}

/// How this worker waits and what it sets aside. Unlike the job's settings, every rank may choose its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// How long a refused connection to the manager is dialled again, for a manager that is just starting.
    pub manager_patience: Duration,
    /// How long ConnectService may take. Longer than the job's own rendezvous timeout, whose error names the missing ranks.
    pub rendezvous_timeout: Duration,
    /// How long the I/O thread looks for answers before it sleeps. Nothing by default: it would take a processor from the
    /// computation.
    pub spin: Duration,
    /// How tensors travel.
    pub transport: Transport,
    /// The rack this worker is in, where hubs serve racks.
    pub rack: Option<String>,
    /// What hubs that serve a single host know this one by; by default what tells it and its network namespace from all others.
    pub host: Option<String>,
    /// The rank in whose process all hubs of the job run, if they do: errors about a lost hub name it.
    pub hub_rank: Option<u32>,
    /// Where this worker listens for the job's other workers, if they are to reach it: the connection manager tells them.
    pub peer_address: Option<SocketAddr>,
    /// From which of this host's interfaces streams over TCP leave. A stream to a hub's interface number i leaves from number i
    /// modulo n of those n that lead there: of those in its subnet, else of those whose route does. By default the kernel chooses
    /// where only one does.
    pub interfaces: Selector,
    /// Read parameters from the one copy that a hub on this host keeps for all its workers, instead of receiving one's own:
    /// see [`Job::shared_parameters`](crate::Job::shared_parameters). It needs shared memory, a job in step, and a single hub.
    pub shared_parameters: Sharing,
    /// For dialling all streams and their handshakes together.
    pub dial_timeout: Duration,
    /// A stream on which nothing was sent for this long sends a heartbeat; at most a quarter of the job's `dead_after_s`.
    pub heartbeat: Duration,
    /// How long [`Job::leave`](crate::Job::leave) waits for requests under way. Dropping a job waits at most
    /// [`Options::DROP_TIMEOUT`].
    pub leave_timeout: Duration,
    /// Fixes the send buffer of every socket; by default the kernel tunes it. What it holds can no longer be overtaken
    /// by a more urgent key.
    pub socket_send_bytes: Option<usize>,
    /// Fixes the receive buffer of every socket; by default the kernel tunes it.
    pub socket_receive_bytes: Option<usize>,
    /// The I/O thread's receive buffer.
    pub scratch_bytes: usize,
}

impl Options {
    /// How long dropping a job waits for requests under way.
    pub const DROP_TIMEOUT: Duration = Duration::from_secs(5);

    /// The default with what the environment says, for whoever starts a worker and cannot change it: `PARAMHUB_TRANSPORT`
    /// (`auto`, `tcp` or `shm`), `PARAMHUB_INTERFACES` (a [`Selector`]), `PARAMHUB_RACK` and `PARAMHUB_HOST`.
    ///
    /// # Errors
    /// [`WorkerError::Environment`] if a variable cannot be read.
    pub fn from_env() -> Result<Self, WorkerError> {
        let options =
            Self::from_variables(|variable| std::env::var_os(variable).map(|value| value.into_string()))?;
        let named = |variable| std::env::var(variable).ok().filter(|name: &String| !name.is_empty());
        Ok(Options { rack: named(RACK_VARIABLE), host: named(HOST_VARIABLE), ..options })
    }

    fn from_variables(
        read: impl Fn(&'static str) -> Option<Result<String, std::ffi::OsString>>,
    ) -> Result<Self, WorkerError> {
        let default = Options::default();
        let transport = parsed(&read, TRANSPORT_VARIABLE, "auto, tcp or shm, or leave it out")?;
        let expected = "interfaces such as eth0,eth1 or 10.0.0.0/24 or ^docker, or leave it out";
        let interfaces = parsed(&read, INTERFACES_VARIABLE, expected)?;
        Ok(Options {
            transport: transport.unwrap_or(default.transport),
            interfaces: interfaces.unwrap_or(default.interfaces),
            ..default
        })
    }

    /// Whether to ask a hub on this host for its copy of the parameters, one of `hubs`.
    pub(crate) fn wants_shared_parameters(&self, stands_still: bool, hubs: usize) -> bool {
        match self.shared_parameters {
            Sharing::Never => false,
            Sharing::WherePossible => stands_still && hubs == 1,
            Sharing::Always => true,
        }
    }

    /// Refuses what contradicts itself or the job.
    pub(crate) fn check(
        &self,
        who: &Who,
        settings: &Settings,
        stands_still: bool,
    ) -> Result<(), WorkerError> {
        let refused =
            |reason: &str| Err(WorkerError::Misplaced { who: who.clone(), reason: Arc::from(reason) });
        let needs_memory = self.transport == Transport::Shm || self.shared_parameters == Sharing::Always;
        if needs_memory && settings.quantises() {
            return refused(
                "some keys are quantised, but the options ask for shared memory, which carries raw tensors: use the transport \
                 auto or tcp, or let the keys travel as f32",
            );
        }
        if self.shared_parameters != Sharing::Always {
            return Ok(());
        }
        if self.transport == Transport::Tcp {
            return refused(
                "parameters can be shared only through shared memory, but the options ask for tcp: use auto or shm",
            );
        }
        if !stands_still {
            return refused(
                "parameters can be shared only in a synchronous job that waits for all workers: elsewhere the hub writes them while workers read",
            );
        }
        Ok(())
    }
}

/// What says how tensors travel where the program does not.
const TRANSPORT_VARIABLE: &str = "PARAMHUB_TRANSPORT";
/// Names a worker's rack.
pub(crate) const RACK_VARIABLE: &str = "PARAMHUB_RACK";
/// Names a worker's host.
pub(crate) const HOST_VARIABLE: &str = "PARAMHUB_HOST";
/// And from which interfaces.
const INTERFACES_VARIABLE: &str = "PARAMHUB_INTERFACES";

fn parsed<T: FromStr<Err = String>>(
    read: &impl Fn(&'static str) -> Option<Result<String, std::ffi::OsString>>,
    variable: &'static str,
    expected: &'static str,
) -> Result<Option<T>, WorkerError> {
    let problem = match read(variable) {
        None => return Ok(None),
        Some(Ok(text)) => match text.trim().parse() {
            Ok(value) => return Ok(Some(value)),
            Err(problem) => problem,
        },
        Some(Err(_)) => "it is not UTF-8".into(),
    };
    let problem = format!("cannot be read ({problem})").into();
    Err(WorkerError::Environment { variable, problem, expected })
}

impl Default for Options {
    fn default() -> Self {
        Options {
            manager_patience: Duration::from_secs(10),
            rendezvous_timeout: Duration::from_secs(600),
            spin: Duration::ZERO,
            transport: Transport::Auto,
            rack: None,
            host: None,
            hub_rank: None,
            peer_address: None,
            interfaces: Selector::Auto,
            shared_parameters: Sharing::Never,
            dial_timeout: Duration::from_secs(10),
            heartbeat: Duration::from_secs(1),
            leave_timeout: Duration::from_secs(30),
            socket_send_bytes: None,
            socket_receive_bytes: None,
            scratch_bytes: SCRATCH_BYTES_DEFAULT,
        }
    }
}

/// When `wait` is over; a wait without end, such as [`Duration::MAX`], is over in a century.
pub(crate) fn deadline(wait: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    Instant::now() + wait.min(CENTURY)
}

#[cfg(test)]
mod tests {

    use paramhub_core::key::{Key, KeyTable};

    use super::*;

    #[test]
    fn the_environment_may_choose_transport_and_interfaces() {
        let with = |variable: &'static str, text: &str| {
            Options::from_variables(|asked| (asked == variable).then(|| Ok(text.to_owned())))
        };
        let read = |text: &str| with("PARAMHUB_TRANSPORT", text);
        assert_eq!(Options::from_variables(|_| None).unwrap(), Options::default());
        let chosen = with("PARAMHUB_INTERFACES", " eth0,10.1.0.0/16 ").unwrap();
        assert_eq!(chosen.interfaces.to_string(), "eth0,10.1.0.0/16");
        let refused = with("PARAMHUB_INTERFACES", "10.1.0.0/99").unwrap_err().to_string();
        assert!(refused.starts_with("PARAMHUB_INTERFACES cannot be read"), "{refused}");
        for transport in Transport::ALL {
            assert_eq!(read(&format!(" {transport}\n")).unwrap().transport, transport);
        }
        let refused = read("ipc").unwrap_err().to_string();
        assert!(refused.starts_with("PARAMHUB_TRANSPORT cannot be read"), "{refused}");
        assert!(refused.contains("unknown transport `ipc`: expected auto, tcp or shm"), "{refused}");
    }

    #[test]
    fn parameters_are_shared_over_shared_memory_and_in_step_only() {
        let who = Who { job: "digits".into(), rank: 2 };
        let settings = Settings::new(KeyTable::new(vec![Key::new("w", [4])]).unwrap());
        let check = |transport, stands_still| {
            let options = Options { transport, shared_parameters: Sharing::Always, ..Options::default() };
            options.check(&who, &settings, stands_still)
        };
        for transport in [Transport::Auto, Transport::Shm] {
            check(transport, true).unwrap();
            let refused = check(transport, false).unwrap_err().to_string();
            assert!(refused.starts_with("job `digits`, rank 2: parameters can be shared"), "{refused}");
        }
        let refused = check(Transport::Tcp, true).unwrap_err().to_string();
        assert!(refused.ends_with("but the options ask for tcp: use auto or shm"), "{refused}");
    }

    #[test]
    fn a_wait_without_end_has_a_deadline_all_the_same() {
        assert!(deadline(Duration::MAX) > Instant::now() + Duration::from_secs(1 << 30));
        assert!(deadline(Duration::ZERO) <= Instant::now());
    }
}
