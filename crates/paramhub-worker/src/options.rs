use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::{Duration, Instant};

use paramhub_core::combinations::{Feature, Features, conflict_of};
use paramhub_core::liveness::HEARTBEAT;
use paramhub_core::service::JobOptions;
use paramhub_core::settings::Settings;
use paramhub_transport::SCRATCH_BYTES_DEFAULT;
use paramhub_transport::interface::Selector;

use crate::error::{WorkerError, WorkerId};

/// How tensors travel between a worker and its hubs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Shared memory to hubs on this host, TCP to others. A hub is on this host if it can be reached over the
    /// Unix socket whose random name it gave to the connection manager.
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

/// Whether a worker reads the one copy of the parameters that a hub on its host keeps for all its workers
/// there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ParameterSharing {
    /// The worker receives its own copy.
    #[default]
    Never,
    /// The worker reads the shared copy if that is possible:
    /// [`Job::shares_parameters`](crate::Job::shares_parameters) says whether it does.
    WherePossible,
    /// The worker reads the shared copy; where that is impossible joining fails.
    Always,
}

/// How long this worker waits, and how much memory it reserves. Unlike with the job's settings, every rank
/// may choose its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// How long the worker retries a refused connection to the manager, which may be just starting.
    pub manager_retry_timeout: Duration,
    /// How long ConnectService may take. Longer than the job's own rendezvous timeout, whose error names the
    /// missing ranks.
    pub rendezvous_timeout: Duration,
    /// How long the I/O thread polls for answers before it sleeps. Zero by default: polling would take a
    /// processor from the computation.
    pub spin: Duration,
    /// How tensors travel.
    pub transport: Transport,
    /// The rack this worker is in, where hubs serve racks.
    pub rack: Option<String>,
    /// The name by which hubs that serve a single host know this host; by default an identifier that is
    /// unique to the host and its network namespace.
    pub host: Option<String>,
    /// The rank in whose process all hubs of the job run, if they do: errors about a lost hub name it.
    pub hub_rank: Option<u32>,
    /// The number of ranks that a launcher has started together with this one, in a job whose ranks go back and may then
    /// be more or fewer: see [`ConnectService::workers`](paramhub_core::service::ConnectService::workers).
    pub started_workers: Option<u32>,
    /// The address at which this worker listens for the job's other workers, if they are to reach it: the
    /// connection manager gives it to them.
    pub peer_address: Option<SocketAddr>,
    /// The interfaces of this host that streams over TCP leave by. Of the n interfaces that lead to a hub, a
    /// stream to the hub's interface number i leaves by number i modulo n; those are the ones in the hub's
    /// subnet if there are any, else the ones whose route leads there. By default the kernel chooses where
    /// only one does.
    pub interfaces: Selector,
    /// Whether to read parameters from the one copy that a hub on this host keeps for all its workers,
    /// instead of receiving a private copy: see [`Job::shared_parameters`](crate::Job::shared_parameters). It
    /// needs shared memory, a job in step, and a single hub.
    pub shared_parameters: ParameterSharing,
    /// The time for dialling all streams and for their handshakes together.
    pub dial_timeout: Duration,
    /// A stream on which nothing was sent for this long sends a heartbeat; at most a quarter of the job's
    /// `dead_after_s`.
    pub heartbeat: Duration,
    /// How long [`Job::leave`](crate::Job::leave) waits for requests under way. Dropping a job waits at most
    /// [`Options::DROP_TIMEOUT`].
    pub leave_timeout: Duration,
    /// Fixes the send buffer of every socket; by default the kernel tunes it. A more urgent key can no longer
    /// overtake the data in that buffer.
    pub socket_send_bytes: Option<usize>,
    /// Fixes the receive buffer of every socket; by default the kernel tunes it.
    pub socket_receive_bytes: Option<usize>,
    /// The I/O thread's receive buffer.
    pub scratch_bytes: usize,
}

impl Options {
    /// How long dropping a job waits for requests under way.
    pub const DROP_TIMEOUT: Duration = Duration::from_secs(5);

    /// The default with the environment's values, for a program that its user cannot change:
    /// `PARAMHUB_TRANSPORT` (`auto`, `tcp` or `shm`), `PARAMHUB_INTERFACES` (a [`Selector`]), `PARAMHUB_RACK`
    /// and `PARAMHUB_HOST`.
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

    /// Whether to ask a hub on this host for its copy of the parameters, in a job with these features.
    pub(crate) fn wants_shared_parameters(&self, job: Features) -> bool {
        match self.shared_parameters {
            ParameterSharing::Never => false,
            ParameterSharing::WherePossible => conflict_of(Feature::SharedParameters, job).is_none(),
            ParameterSharing::Always => true,
        }
    }

    /// The features of the options.
    fn features(&self) -> Features {
        let fixes_buffers = self.socket_send_bytes.is_some() || self.socket_receive_bytes.is_some();
        Features::of([
            (Feature::Tcp, self.transport == Transport::Tcp),
            (Feature::SharedMemory, self.transport == Transport::Shm),
            (Feature::SharedParameters, self.shared_parameters == ParameterSharing::Always),
            (Feature::SocketBuffers, fixes_buffers),
        ])
    }

    /// Refuses options that do not combine with one another, or with the job and its `hubs`.
    pub(crate) fn check(
        &self,
        who: &WorkerId,
        settings: &Settings,
        job_options: &JobOptions,
        hubs: usize,
    ) -> Result<(), WorkerError> {
        let hubs = Features::of([(Feature::SeveralHubs, hubs > 1)]);
        let others = self.features().and(job_options.features()).and(hubs);
        settings.check_with(others).map_err(|conflict| WorkerError::Misused {
            who: who.clone(),
            reason: conflict.to_string().into(),
        })
    }
}

/// How tensors travel, where the program does not choose.
const TRANSPORT_VARIABLE: &str = "PARAMHUB_TRANSPORT";
/// A worker's rack.
pub(crate) const RACK_VARIABLE: &str = "PARAMHUB_RACK";
/// A worker's host.
pub(crate) const HOST_VARIABLE: &str = "PARAMHUB_HOST";
/// The interfaces that streams leave by.
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
            manager_retry_timeout: Duration::from_secs(10),
            rendezvous_timeout: Duration::from_secs(600),
            spin: Duration::ZERO,
            transport: Transport::Auto,
            rack: None,
            host: None,
            hub_rank: None,
            started_workers: None,
            peer_address: None,
            interfaces: Selector::Auto,
            shared_parameters: ParameterSharing::Never,
            dial_timeout: Duration::from_secs(10),
            heartbeat: HEARTBEAT,
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
    use paramhub_core::codec::Codec;
    use paramhub_core::combinations::Caller;
    use paramhub_core::consistency::Consistency;
    use paramhub_core::key::{Key, KeyTable};
    use paramhub_core::stragglers::Stragglers;

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
    fn options_that_do_not_combine_are_refused_with_every_reason_of_the_table() {
        let who = WorkerId { job: "digits".into(), rank: 2 };
        let shared = |transport| Options {
            transport,
            shared_parameters: ParameterSharing::Always,
            ..Options::default()
        };
        let [auto, tcp, shm] = [Transport::Auto, Transport::Tcp, Transport::Shm].map(shared);
        let buffers =
            Options { transport: Transport::Shm, socket_send_bytes: Some(1 << 16), ..Options::default() };
        let key = Key::new("w", [4]);
        let plain = Settings::new(KeyTable::new(vec![key.clone()]).unwrap());
        let quantised = Settings::new(KeyTable::new(vec![key.in_codec(Codec::ONE_BIT)]).unwrap());
        let stale = Settings { consistency: Consistency::BoundedStaleness(1), ..plain.clone() };
        let late = JobOptions { stragglers: Stragglers::Backup(1), ..JobOptions::default() };
        let usual = JobOptions::default();
        let replicas = JobOptions { replicas: 1, ..usual };
        for options in [&auto, &shm] {
            for settings in [&plain, &quantised] {
                options.check(&who, settings, &usual, 1).unwrap();
            }
        }
        let refused: Vec<String> = [
            (&tcp, &plain, &usual, 1),
            (&auto, &stale, &usual, 1),
            (&auto, &plain, &late, 1),
            (&auto, &plain, &usual, 2),
            (&auto, &plain, &replicas, 2),
            (&buffers, &plain, &usual, 1),
        ]
        .map(|(options, settings, job_options, hubs)| {
            options.check(&who, settings, job_options, hubs).unwrap_err().to_string()
        })
        .into();
        for text in &refused {
            assert!(text.starts_with("job `digits`, rank 2: "), "{text}");
        }
        for rule in Caller::Worker.rules() {
            let is_shown = |text: &String| text.ends_with(&format!("{}; {}", rule.why, rule.remedy));
            assert!(refused.iter().any(is_shown), "no example meets {rule:?}");
        }
    }

    #[test]
    fn a_wait_without_end_has_a_deadline_all_the_same() {
        assert!(deadline(Duration::MAX) > Instant::now() + Duration::from_secs(1 << 30));
        assert!(deadline(Duration::ZERO) <= Instant::now());
    }
}
