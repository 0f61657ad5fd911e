use std::time::{Duration, Instant};

use paramhub_transport::SCRATCH_BYTES_DEFAULT;

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

/// How this worker waits and what it sets aside. Unlike the job's settings, every rank may choose its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// How long a refused connection to the manager is dialled again, for a manager that is just starting.
    pub manager_patience: Duration,
    /// How long ConnectService may take. Longer than the job's own rendezvous timeout, whose error names the missing ranks.
    pub rendezvous_timeout: Duration,
    /// How tensors travel.
    pub transport: Transport,
    /// Read parameters from the one copy that a hub on this host keeps for all its workers, instead of receiving one's own:
    /// see [`Job::shared_parameters`](crate::Job::shared_parameters). It needs shared memory and a job with a single hub.
    pub shared_parameters: bool,
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
}

impl Default for Options {
    fn default() -> Self {
        Options {
            manager_patience: Duration::from_secs(10),
            rendezvous_timeout: Duration::from_secs(600),
            transport: Transport::Auto,
            shared_parameters: false,
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
    use super::*;

    #[test]
    fn a_wait_without_end_has_a_deadline_all_the_same() {
        assert!(deadline(Duration::MAX) > Instant::now() + Duration::from_secs(1 << 30));
        assert!(deadline(Duration::ZERO) <= Instant::now());
    }
}
