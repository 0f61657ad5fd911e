//! The treatment of a worker that is late in a step.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The rule by which the steps of a job wait for every worker, or not. Each chunk decides by itself: its step
/// ends with the contributions that it has, the mean is over those, and a later contribution is dropped
/// whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Stragglers {
    /// A step ends when all workers have contributed.
    #[default]
    Wait,
    /// A step ends a while after the median contribution, with the contributions that are there. The while is
    /// this fraction of the time that the median contribution took; more than 0, at most
    /// [`Stragglers::FRACTION_MAX`]. Poseidon (Zhang et al., 2017, section 4.1) drops stragglers without
    /// stating when a worker is one.
    Drop(f64),
    /// A step ends when all but this many workers have contributed: the backup workers of Chen et al.,
    /// "Revisiting distributed synchronous SGD" (2016).
    Backup(u32),
}

/// The condition that ends a chunk's step although contributions are missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quorum {
    /// This many contributions.
    Count(u32),
    /// A clock that runs from the median contribution on.
    Clock,
    /// Contributions of all members that are not lost. If fewer than this many members are left, no step ends.
    NotLost {
        /// The least number of members that are not lost.
        least: u32,
    },
}

impl Quorum {
    /// Returns whether a step may end without a member that is merely late.
    pub fn leaves_out(self) -> bool {
        match self {
            Quorum::Count(_) | Quorum::Clock => true,
            Quorum::NotLost { .. } => false,
        }
    }
}

impl Stragglers {
    /// The largest [`Drop`](Stragglers::Drop) fraction.
    pub const FRACTION_MAX: f64 = 1000.0;
    /// A contribution this soon after the median is never late: threads wake with less precision than that.
    pub const GRACE_MIN: Duration = Duration::from_millis(1);

    /// Returns whether a step may end without some workers.
    pub fn leaves_out(self) -> bool {
        self != Stragglers::Wait
    }

    /// Returns the condition that ends a step in a job of this many workers; `None` if it waits for all of
    /// them.
    pub fn quorum(self, workers: u32) -> Option<Quorum> {
        match self {
            Stragglers::Wait => None,
            Stragglers::Drop(_) => Some(Quorum::Clock),
            Stragglers::Backup(backup) => Some(Quorum::Count(workers.saturating_sub(backup).max(1))),
        }
    }

    /// Returns the time that contributions may come after the median one, which took `median`; `None` if no
    /// clock decides.
    pub fn grace(self, median: Duration) -> Option<Duration> {
        let Stragglers::Drop(fraction) = self else { return None };
        let grace = Duration::try_from_secs_f64(median.as_secs_f64() * fraction).unwrap_or(Duration::MAX);
        Some(grace.max(Self::GRACE_MIN))
    }

    /// Refuses a policy that a job of this many workers cannot have, and names one that it could.
    ///
    /// # Errors
    /// The second half of a sentence: what is wrong and what would fit.
    pub fn check(self, workers: u32) -> Result<(), String> {
        match self {
            Stragglers::Backup(backup) if backup >= workers => Err(match workers {
                1 => "its only worker would be left out of every step: use stragglers = wait".into(),
                _ => format!(
                    "{backup} of its {workers} workers would be left out of every step, so that no worker contributed: use \
                     backup:{} or less",
                    workers - 1
                ),
            }),
            _ => Ok(()),
        }
    }

    /// Refuses a policy that could never leave out a rack or host, whose workers are left out together. `fewest` is the number of
    /// workers of the smallest one.
    ///
    /// # Errors
    /// As [`Stragglers::check`].
    pub fn check_sites(self, fewest: u32) -> Result<(), String> {
        match self {
            Stragglers::Backup(backup) if backup < fewest => Err(format!(
                "a rack or host is left out with all its workers, and none has fewer than {fewest}: use backup:{fewest} or more, \
                 or the reduction flat"
            )),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Stragglers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stragglers::Wait => f.write_str("wait"),
            Stragglers::Drop(fraction) => write!(f, "drop:{fraction}"),
            Stragglers::Backup(backup) => write!(f, "backup:{backup}"),
        }
    }
}

impl FromStr for Stragglers {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let most = Self::FRACTION_MAX;
        if text == "wait" {
            return Ok(Stragglers::Wait);
        }
        if let Some(fraction) = text.strip_prefix("drop:") {
            let fits = |fraction: &f64| *fraction > 0.0 && *fraction <= most;
            return fraction.parse().ok().filter(fits).map(Stragglers::Drop).ok_or_else(|| {
                format!("`{text}`: the fraction must be a number above 0 and up to {most}, as in drop:0.5")
            });
        }
        if let Some(backup) = text.strip_prefix("backup:") {
            return backup.parse().ok().filter(|&backup| backup > 0).map(Stragglers::Backup).ok_or_else(
                || format!("`{text}`: the workers to do without must be a number above 0, as in backup:1"),
            );
        }
        Err(format!(
            "`{text}` is not what can be done about stragglers: expected wait, drop:FRACTION or backup:N"
        ))
    }
}

impl TryFrom<String> for Stragglers {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Stragglers> for String {
    fn from(stragglers: Stragglers) -> Self {
        stragglers.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_values_read_back_and_nonsense_is_refused() {
        for text in ["wait", "drop:0.5", "drop:1000", "backup:1", "backup:31"] {
            let read: Stragglers = text.parse().unwrap();
            assert_eq!(read.to_string(), text);
            let json = serde_json::to_string(&read).unwrap();
            assert_eq!(json, format!("{text:?}"));
            assert_eq!(serde_json::from_str::<Stragglers>(&json).unwrap(), read);
        }
        let odd = ["", "drop", "drop:", "drop:0", "drop:-1", "drop:nan", "drop:inf", "drop:1001", "backup:0"];
        for text in odd.into_iter().chain(["backup:-1", "backup:1.5", "Wait", "backup"]) {
            let refused = text.parse::<Stragglers>().unwrap_err();
            assert!(refused.contains(&format!("`{text}`")), "{refused}");
        }
    }

    #[test]
    fn a_step_needs_a_contribution() {
        assert_eq!(Stragglers::Wait.quorum(4), None);
        assert_eq!(Stragglers::Backup(1).quorum(4), Some(Quorum::Count(3)));
        assert_eq!(Stragglers::Drop(0.5).quorum(4), Some(Quorum::Clock));
        assert_eq!(Stragglers::Backup(3).check(4), Ok(()));
        let refused = Stragglers::Backup(4).check(4).unwrap_err();
        assert!(refused.ends_with("use backup:3 or less"), "{refused}");
        assert!(Stragglers::Backup(1).check(1).unwrap_err().contains("stragglers = wait"));
        assert_eq!(Stragglers::Drop(0.5).check(1), Ok(()));
    }

    #[test]
    fn backup_workers_are_a_whole_site_at_least() {
        assert_eq!(Stragglers::Backup(2).check_sites(2), Ok(()));
        assert_eq!(Stragglers::Drop(0.5).check_sites(8), Ok(()));
        let refused = Stragglers::Backup(2).check_sites(3).unwrap_err();
        assert!(refused.ends_with("use backup:3 or more, or the reduction flat"), "{refused}");
    }

    #[test]
    fn the_grace_follows_the_median_but_for_the_shortest() {
        let drop = Stragglers::Drop(0.5);
        assert_eq!(drop.grace(Duration::from_millis(80)), Some(Duration::from_millis(40)));
        assert_eq!(drop.grace(Duration::from_micros(80)), Some(Stragglers::GRACE_MIN));
        assert_eq!(Stragglers::Drop(1000.0).grace(Duration::MAX), Some(Duration::MAX));
        assert_eq!(Stragglers::Backup(1).grace(Duration::from_millis(80)), None);
    }
}
