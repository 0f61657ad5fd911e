//! Opens a stream: dials a hub and proves, both ways, knowledge of the job's nonce.

use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use paramhub_core::auth::Nonce;
use paramhub_core::wire::{CHALLENGE_BYTES, Hello, VERDICT_BYTES, Verdict, stream_proofs};
use paramhub_transport::socket::{dial, read_exact_by, write_all_by};

use crate::error::{Who, WorkerError};

/// What the streams of one job have in common.
pub(crate) struct Dialler<'a> {
    pub(crate) who: &'a Who,
    pub(crate) nonce: &'a Nonce,
    /// For all streams together.
    pub(crate) deadline: Instant,
}

impl Dialler<'_> {
    /// A stream to `hub` (`host:port`) over which frames may travel. The challenge of `hello` is drawn here.
    pub(crate) fn open(&self, hub: &Arc<str>, hello: Hello) -> Result<TcpStream, WorkerError> {
        let mut socket = self.connect(hub)?;
        let mut challenge = [0; CHALLENGE_BYTES];
        getrandom::fill(&mut challenge)
            .map_err(|error| self.fail(hub, format!("the system gives no random numbers: {error}")))?;
        let verdict = self
            .shake_hands(&mut socket, &Hello { challenge, ..hello })
            .map_err(|error| self.fail(hub, format!("the handshake failed: {error}")))?;
        let (expected, verdict) = verdict;
        match Verdict::decode(&verdict) {
            Ok(Verdict::Welcome { proof }) if proof.matches(&expected) => Ok(socket),
            Ok(Verdict::Welcome { .. }) => Err(self.fail(
                hub,
                "it does not know the job's nonce: something else than the job's hub answers there".into(),
            )),
            Ok(Verdict::Refused { refusal, message }) => Err(WorkerError::Refused {
                who: self.who.clone(),
                hub: Arc::clone(hub),
                refusal,
                message: message.into(),
            }),
            Err(error) => Err(self.fail(hub, format!("it does not answer like a paramhub hub: {error}"))),
        }
    }

    /// Tries every address the name stands for.
    fn connect(&self, hub: &Arc<str>) -> Result<TcpStream, WorkerError> {
        let addresses = hub
            .to_socket_addrs()
            .map_err(|error| self.fail(hub, format!("the address is no use: {error}")))?;
        let mut refused = "its name stands for no address".to_owned();
        for address in addresses {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                refused =
                    "no time was left to dial it: the streams before it took all of the dial timeout".into();
                break;
            }
            match dial(address, left.max(Duration::from_millis(1))) {
                Ok(socket) => return Ok(socket),
                Err(error) => refused = error.to_string(),
            }
        }
        Err(self.fail(hub, refused))
    }

    /// Returns the proof the hub owes and the verdict it gave.
    fn shake_hands(
        &self,
        socket: &mut TcpStream,
        hello: &Hello,
    ) -> io::Result<(paramhub_core::auth::Proof, [u8; VERDICT_BYTES])> {
        write_all_by(socket, &hello.encode(), self.deadline)?;
        let mut hub_challenge = [0; CHALLENGE_BYTES];
        read_exact_by(socket, &mut hub_challenge, self.deadline)?;
        let (mine, theirs) = stream_proofs(self.nonce, hello, &hub_challenge);
        write_all_by(socket, &mine.0, self.deadline)?;
        let mut verdict = [0; VERDICT_BYTES];
        read_exact_by(socket, &mut verdict, self.deadline)?;
        Ok((theirs, verdict))
    }

    fn fail(&self, hub: &Arc<str>, reason: String) -> WorkerError {
        WorkerError::Dial { who: self.who.clone(), hub: Arc::clone(hub), reason: reason.into() }
    }
}
