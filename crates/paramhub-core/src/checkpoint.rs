//! These types state when hubs write checkpoints of a job, from which one it resumes, and what is known of
//! them.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The shortest and the longest pause between checkpoints, in seconds.
pub const EVERY_SECONDS: std::ops::RangeInclusive<u32> = 1..=604_800;

/// The interval at which a job's checkpoints are due. The text is a number of steps, `1000`, or of seconds,
/// `30s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Every {
    /// After every update whose number this divides.
    Steps(NonZeroU32),
    /// This long after the last checkpoint was begun, within [`EVERY_SECONDS`].
    Seconds(NonZeroU32),
}

/// The checkpoint from which a job resumes: one that a job of the same name has left with its hubs. The text
/// is `latest`, `auto`, or a number of steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Resume {
    /// The newest complete checkpoint.
    Latest,
    /// The newest complete checkpoint of the last run of this name, if that run has not finished. Without one the
    /// job begins anew.
    Auto,
    /// The newest complete checkpoint of that step.
    Step(u32),
}

/// The reason why a text is not a valid [`Every`] or [`Resume`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CheckpointTextError {
    /// The text names no pause.
    #[error(
        "`{0}` does not say how often: expected a number of steps, as in 1000, or of seconds, as in 30s, up to 604800s"
    )]
    Every(String),
    /// The text names no checkpoint.
    #[error("`{0}` names no checkpoint: expected latest, auto or a number of steps, as in 1200")]
    Resume(String),
    /// The text is none that a command takes.
    #[error("`{0}` names no checkpoint: expected latest, a number of steps, as in 1200, auto or never")]
    ResumeChoice(String),
}

impl FromStr for Every {
    type Err = CheckpointTextError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refused = || CheckpointTextError::Every(shortened(text));
        match text.strip_suffix('s') {
            Some(seconds) => {
                let seconds: NonZeroU32 = seconds.parse().map_err(|_| refused())?;
                EVERY_SECONDS.contains(&seconds.get()).then_some(Every::Seconds(seconds)).ok_or_else(refused)
            }
            None => text.parse().map(Every::Steps).map_err(|_| refused()),
        }
    }
}

impl FromStr for Resume {
    type Err = CheckpointTextError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "latest" => Ok(Resume::Latest),
            "auto" => Ok(Resume::Auto),
            _ => text.parse().map(Resume::Step).map_err(|_| CheckpointTextError::Resume(shortened(text))),
        }
    }
}

impl fmt::Display for Every {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Every::Steps(steps) => write!(f, "{steps}"),
            Every::Seconds(seconds) => write!(f, "{seconds}s"),
        }
    }
}

impl fmt::Display for Resume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Resume::Latest => f.write_str("latest"),
            Resume::Auto => f.write_str("auto"),
            Resume::Step(step) => write!(f, "{step}"),
        }
    }
}

impl TryFrom<String> for Every {
    type Error = CheckpointTextError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Every> for String {
    fn from(every: Every) -> Self {
        every.to_string()
    }
}

impl TryFrom<String> for Resume {
    type Error = CheckpointTextError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Resume> for String {
    fn from(resume: Resume) -> Self {
        resume.to_string()
    }
}

/// The value of `--resume` of a command that starts a job and its workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ResumeChoice {
    /// The job begins anew, whatever there is.
    Never,
    /// It goes on from such a checkpoint.
    From(Resume),
}

impl FromStr for ResumeChoice {
    type Err = CheckpointTextError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "never" {
            return Ok(ResumeChoice::Never);
        }
        text.parse().map(ResumeChoice::From).map_err(|_| CheckpointTextError::ResumeChoice(shortened(text)))
    }
}

impl TryFrom<String> for ResumeChoice {
    type Error = CheckpointTextError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<ResumeChoice> for String {
    fn from(choice: ResumeChoice) -> Self {
        match choice {
            ResumeChoice::Never => "never".into(),
            ResumeChoice::From(resume) => resume.to_string(),
        }
    }
}

/// The report of a hub, or of all hubs of a job together, about its checkpoints.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct CheckpointStatus {
    /// The step of the newest checkpoint on the disk; for several hubs, the newest that all of them have
    /// written.
    pub step: Option<u32>,
    /// The time at which it was written, in seconds since the Unix epoch.
    pub written_at: u64,
    /// The size of that checkpoint.
    pub bytes: u64,
    /// The time that it took, from the first copied chunk until the last name was durable; for several hubs,
    /// the slowest.
    pub seconds: f64,
    /// Number of checkpoints that this job has written.
    pub written: u64,
    /// Number of checkpoints that were due but not taken: the previous one was still being written, or the
    /// job was too fast.
    pub skipped: u64,
    /// Number of checkpoints that failed.
    pub failed: u64,
    /// The reason why the newest of these failed; empty once another one was written.
    pub failure: String,
}

impl CheckpointStatus {
    /// The status of a job, from those of its hubs.
    pub fn of_hubs<'a>(hubs: impl IntoIterator<Item = &'a CheckpointStatus>) -> Option<CheckpointStatus> {
        hubs.into_iter().fold(None, |all: Option<CheckpointStatus>, hub| {
            let Some(all) = all else { return Some(hub.clone()) };
            // A checkpoint that only some hubs have written does not count.
            let oldest = if all.step <= hub.step { &all } else { hub };
            Some(CheckpointStatus {
                step: oldest.step,
                written_at: oldest.written_at,
                bytes: all.bytes + hub.bytes,
                seconds: all.seconds.max(hub.seconds),
                written: all.written.min(hub.written),
                skipped: all.skipped.max(hub.skipped),
                failed: all.failed.max(hub.failed),
                failure: if all.failure.is_empty() { hub.failure.clone() } else { all.failure },
            })
        })
    }
}

/// A text from outside, cut to the length that an error repeats.
fn shortened(text: &str) -> String {
    text.chars().take(40).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_and_checkpoints_survive_text_and_others_are_explained() {
        for text in ["1", "1000", "30s", "604800s"] {
            assert_eq!(text.parse::<Every>().unwrap().to_string(), text);
        }
        assert_eq!("30s".parse(), Ok(Every::Seconds(NonZeroU32::new(30).unwrap())));
        for text in ["", "0", "0s", "-1", "604801s", "1m", "s", "4294967296", "1.5s"] {
            let refused = text.parse::<Every>().unwrap_err().to_string();
            assert!(refused.contains("as in 30s"), "{text}: {refused}");
        }
        for (text, resume) in [("latest", Resume::Latest), ("12", Resume::Step(12)), ("auto", Resume::Auto)] {
            assert_eq!(text.parse(), Ok(resume));
            assert_eq!(text.parse(), Ok(ResumeChoice::From(resume)));
            assert_eq!([resume.to_string(), ResumeChoice::From(resume).into()], [text, text]);
        }
        assert_eq!("never".parse(), Ok(ResumeChoice::Never));
        for text in ["", "newest", "-1", "12s", "../12", "never"] {
            assert!(text.parse::<Resume>().unwrap_err().to_string().contains("latest"), "{text}");
        }
        assert!("newest".parse::<ResumeChoice>().unwrap_err().to_string().contains("auto or never"));
        let json = serde_json::to_string(&(Every::Steps(NonZeroU32::MIN), Resume::Step(7))).unwrap();
        assert_eq!(json, r#"["1","7"]"#);
        assert!(serde_json::from_str::<Every>("\"0\"").is_err());
    }

    #[test]
    fn a_job_has_what_all_its_hubs_have() {
        let hub = |step, bytes, seconds| CheckpointStatus {
            step,
            bytes,
            seconds,
            written: u64::from(step.unwrap_or(0)) / 10,
            ..Default::default()
        };
        let both = CheckpointStatus::of_hubs([&hub(Some(20), 5, 0.5), &hub(Some(10), 6, 0.25)]).unwrap();
        assert_eq!((both.step, both.bytes, both.seconds, both.written), (Some(10), 11, 0.5, 1));
        let one_lacks = CheckpointStatus::of_hubs([&hub(None, 0, 0.0), &hub(Some(10), 6, 0.25)]).unwrap();
        assert_eq!(one_lacks.step, None);
        assert_eq!(CheckpointStatus::of_hubs([]), None);
    }
}
