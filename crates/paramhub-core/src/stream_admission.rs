//! What a hub asks of a stream before it admits it: the secret with which the caller must prove itself, and that
//! the stream is the newest of the job's epoch. A stream that was delayed on its way must not displace one that
//! was opened after it.

mod job_streams;

use thiserror::Error;

use crate::auth::{Epoch, Nonce, StreamSecret};
use crate::wire::{Attempt, Caller, Hello};
pub use job_streams::{JobStreams, StreamOrigin, StreamPlace, StreamTerms};

/// The secrets of a job's streams, as a hub knows them.
#[derive(Clone, Debug)]
pub struct StreamSecrets {
    /// The job's nonce.
    pub nonce: Nonce,
    /// The epoch with which the job began.
    pub epoch: Epoch,
    /// The newest epoch of which the hub has heard.
    pub newest_epoch: u64,
    /// The ranks whose workers speak protocol version 1, ascending. The manager has given them no secrets, so
    /// their streams are proved with the nonce.
    pub version_1_ranks: Vec<u32>,
}

impl StreamSecrets {
    /// The secret with which a caller must prove its stream; `None` for a caller that may open none. A rank
    /// speaks one version for the life of the job, so that nobody with the nonce alone can be taken for a rank
    /// that has a secret.
    pub fn of(&self, hello: &Hello, version: u16) -> Option<StreamSecret> {
        match hello.caller {
            Caller::Worker { rank, .. } => {
                let is_version_1 = self.version_1_ranks.binary_search(&rank).is_ok();
                match (version, is_version_1) {
                    (1, true) => Some(self.nonce.into()),
                    (1, false) | (_, true) => None,
                    // A former process of the rank proves itself too, so that it hears why it is refused.
                    (_, false) => Some(self.epoch.of_rank(rank, self.epoch_named_by(hello))),
                }
            }
            Caller::Hub { .. } => Some(self.epoch.secret.of_hubs()),
            Caller::Prober => None,
        }
    }

    fn epoch_named_by(&self, hello: &Hello) -> u64 {
        match hello.attempt {
            Attempt::Numbered { epoch, .. } if epoch <= self.newest_epoch => epoch,
            Attempt::Numbered { .. } | Attempt::Unnumbered { .. } => self.epoch.number,
        }
    }
}

/// Why a stream is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum StaleStream {
    /// It belongs to another epoch of the job than the one since which its caller is in the job.
    #[error(
        "its stream belongs to epoch {given} of the job, and the rank belongs to the process that holds it since epoch {current}"
    )]
    Epoch {
        /// The epoch of the stream.
        given: u64,
        /// The epoch since which the rank has its process, or the job's first.
        current: u64,
    },
    /// A newer stream is open, or was.
    #[error("its stream is attempt {given}, and attempt {newest} has come before")]
    Attempt {
        /// The attempt of the stream.
        given: u32,
        /// The newest attempt so far.
        newest: u32,
    },
    /// The attempts of the route are used up.
    #[error("its stream has been opened too often")]
    TooMany,
}

/// Returns the number of a stream if the stream may count. `epoch` is the epoch since which its caller is in
/// the job, and `newest` the number of the caller's last stream, `None` if there was none. Whether a first
/// stream may come beside another is not decided here: that would be of another process.
///
/// # Errors
/// If the stream is of another epoch or not newer.
pub fn check_attempt(epoch: u64, newest: Option<u32>, attempt: Attempt) -> Result<u32, StaleStream> {
    match (attempt, newest) {
        (Attempt::Numbered { epoch: given, .. }, _) if given != epoch => {
            Err(StaleStream::Epoch { given, current: epoch })
        }
        (Attempt::Numbered { number: given @ 1.., .. }, Some(newest)) if given <= newest => {
            Err(StaleStream::Attempt { given, newest })
        }
        (Attempt::Numbered { number, .. }, _) => Ok(number),
        (Attempt::Unnumbered { resumes: false }, _) => Ok(0),
        (Attempt::Unnumbered { resumes: true }, newest) => {
            newest.unwrap_or(0).checked_add(1).ok_or(StaleStream::TooMany)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::{EpochSecret, Incarnation, Namespace};
    use crate::wire::Capabilities;

    fn hello(caller: Caller) -> Hello {
        Hello {
            caller,
            interface: 0,
            core: 0,
            standby_route: None,
            offered: Capabilities::default(),
            required: Capabilities::default(),
            attempt: Attempt::first(1),
            namespace: Namespace([1; 16]),
            incarnation: Incarnation([2; 16]),
            placement: [3; 32],
            challenge: [4; 32],
        }
    }

    fn numbered(epoch: u64, number: u32) -> Attempt {
        Attempt::Numbered { epoch, number }
    }

    #[test]
    fn only_newer_streams_of_the_same_epoch_count() {
        assert_eq!(check_attempt(5, None, numbered(5, 0)), Ok(0));
        assert_eq!(check_attempt(5, Some(3), numbered(5, 4)), Ok(4));
        assert_eq!(check_attempt(5, None, numbered(5, 7)), Ok(7), "the hub has lost what came before");
        for given in [1, 3] {
            let stale = StaleStream::Attempt { given, newest: 3 };
            assert_eq!(check_attempt(5, Some(3), numbered(5, given)), Err(stale));
        }
        for given in [4, 6] {
            let stale = StaleStream::Epoch { given, current: 5 };
            assert_eq!(check_attempt(5, Some(3), numbered(given, 9)), Err(stale));
        }
    }

    #[test]
    fn streams_without_numbers_count_in_the_order_in_which_they_come() {
        let (first, again) = (Attempt::Unnumbered { resumes: false }, Attempt::Unnumbered { resumes: true });
        assert_eq!(check_attempt(5, None, first), Ok(0));
        assert_eq!(check_attempt(5, Some(0), again), Ok(1));
        assert_eq!(check_attempt(5, Some(1), again), Ok(2));
        assert_eq!(check_attempt(5, None, again), Ok(1));
        assert_eq!(check_attempt(5, Some(u32::MAX), again), Err(StaleStream::TooMany));
    }

    #[test]
    fn the_nonce_proves_the_streams_of_ranks_without_a_secret_only() {
        let secrets = StreamSecrets {
            nonce: Nonce([9; 32]),
            epoch: Epoch { number: 1, secret: EpochSecret([8; 32]) },
            newest_epoch: 1,
            version_1_ranks: vec![1],
        };
        let of =
            |rank, version| secrets.of(&hello(Caller::Worker { rank, shares_parameters: false }), version);
        assert_eq!(of(0, 2), Some(secrets.epoch.secret.of_rank(0)));
        assert_eq!(of(1, 1), Some(StreamSecret(secrets.nonce.0)));
        assert_eq!((of(0, 1), of(1, 2)), (None, None));
        assert_eq!(secrets.of(&hello(Caller::Prober), 2), None);
        let hub = secrets.of(&hello(Caller::Hub { site: 0, route: 0 }), 2);
        assert_eq!(hub, Some(secrets.epoch.secret.of_hubs()));
    }
}
