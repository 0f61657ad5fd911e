//! Teams that share hubs: the names of their jobs, and their quotas.
//!
//! The jobs of team `vision` are those whose names begin with `vision/`, whoever created them. So a team can
//! neither take another's names nor read its checkpoints, which belong to names.

use serde::{Deserialize, Serialize};

use crate::service::{Allowance, ErrorCode, ServiceError, TeamAllowance, TeamQuotas, TeamStatus, refusal};

/// The most teams.
pub const TEAMS_MAX: usize = 256;
/// The most bytes of a team's name.
const NAME_BYTES_MAX: usize = 32;
/// The number of a team's jobs that a message lists.
const JOBS_LISTED: usize = 4;

/// The record of a team, which the store keeps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TeamRecord {
    /// Its name.
    pub name: String,
    /// What its living jobs may have together.
    pub quotas: TeamQuotas,
}

/// What a living job of a team has of its quotas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct JobUse<'a> {
    pub(crate) name: &'a str,
    pub(crate) weight: u32,
    pub(crate) memory_bytes: u64,
    pub(crate) streams: u64,
}

/// Checks a team's name. Of names that differ in case alone, folders of checkpoints may not differ.
///
/// # Errors
/// If it is unusable.
pub fn check_name(name: &str) -> Result<(), ServiceError> {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_-".contains(&byte);
    if (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(allowed) {
        return Ok(());
    }
    let shown: String = name.chars().take(NAME_BYTES_MAX).collect();
    let message = format!(
        "{shown:?} is no team's name: it must have 1 to {NAME_BYTES_MAX} lower-case letters, digits, `_` or `-`"
    );
    Err(refusal(ErrorCode::BadRequest, message))
}

/// The name of a job in full, as a caller of this team may give it with or without the team's.
pub fn full_name(team: Option<&str>, name: &str) -> String {
    match team {
        Some(team) if !is_of(team, name) => format!("{team}/{name}"),
        _ => name.to_owned(),
    }
}

/// The full name of a job that a caller of this team creates.
///
/// # Errors
/// If nothing is left of it without the team's name.
pub fn name_of_new(team: Option<&str>, name: &str) -> Result<String, ServiceError> {
    let full = full_name(team, name);
    match team {
        Some(team) if full.len() == team.len() + 1 => {
            let message = format!("the name of a job of team `{team}` needs something after `{full}`");
            Err(refusal(ErrorCode::BadRequest, message))
        }
        _ => Ok(full),
    }
}

/// Returns whether a job is a team's, by the job's full name.
pub fn is_of(team: &str, job: &str) -> bool {
    team_of(job) == Some(team)
}

/// The name of the team that a job of this full name would be of, if there is such a team.
pub(crate) fn team_of(job: &str) -> Option<&str> {
    job.split_once('/').map(|(team, _)| team)
}

impl TeamRecord {
    /// The team with what its living jobs have.
    pub(crate) fn status(&self, uses: &[JobUse]) -> TeamStatus {
        TeamStatus {
            name: self.name.clone(),
            quotas: self.quotas,
            jobs: uses.len() as u32,
            weight: total(uses.iter().map(|job| u64::from(job.weight))),
            memory_bytes: total(uses.iter().map(|job| job.memory_bytes)),
            streams: total(uses.iter().map(|job| job.streams)),
        }
    }

    /// Checks that the team may have one more job, of this name and weight.
    pub(crate) fn admit(&self, job: &str, weight: u32, uses: &[JobUse]) -> Result<(), ServiceError> {
        let refuse = |message| Err(refusal(ErrorCode::DoesNotFit, message));
        let name = &self.name;
        if let Some(most) = self.quotas.jobs
            && uses.len() >= most as usize
        {
            let names = uses.iter().map(|job| format!("`{}`", job.name)).collect();
            let has = match uses.is_empty() {
                true => ": ".to_owned(),
                false => format!(", and has {}: end one with `paramhub jobs stop`, or ", listed(names)),
            };
            return refuse(format!(
                "team `{name}` may have {most} jobs at once{has}have the quota raised with `paramhub teams set`"
            ));
        }
        let weights: Vec<(&str, u64)> = uses.iter().map(|job| (job.name, u64::from(job.weight))).collect();
        let allowance = self.quotas.weight.map(|most| {
            let remedy = "give the new one less weight";
            self.allowance(u64::from(most), weights, |weight| format!("weight {weight}"), remedy)
        });
        Allowance::check(allowance.as_ref(), u64::from(weight))
            .or_else(|terms| refuse(format!("job `{job}` would have weight {weight}, and {terms}")))
    }

    /// What a job may have at hubs, besides these others.
    pub(crate) fn allowances(&self, others: &[JobUse]) -> TeamAllowance {
        let memory = |most| {
            let used = others.iter().map(|job| (job.name, job.memory_bytes)).collect();
            let remedy = "use an optimizer with less state or a smaller model";
            self.allowance(most, used, |bytes| format!("{} MiB of memory", mebibytes(bytes)), remedy)
        };
        let streams = |most| {
            let used = others.iter().map(|job| (job.name, job.streams)).collect();
            let remedy = "use fewer workers";
            self.allowance(most, used, |streams| format!("{streams} streams"), remedy)
        };
        TeamAllowance {
            memory_bytes: self.quotas.memory_bytes.map(memory),
            streams: self.quotas.streams.map(streams),
        }
    }

    /// Checks what a job has at all of its hubs together.
    pub(crate) fn check_held(&self, job: &JobUse, others: &[JobUse]) -> Result<(), String> {
        let JobUse { name, memory_bytes, streams, .. } = *job;
        let TeamAllowance { memory_bytes: memory_left, streams: streams_left } = self.allowances(others);
        Allowance::check(memory_left.as_ref(), memory_bytes).map_err(|terms| {
            format!("job `{name}` needs {} MiB at its hubs, and {terms}", mebibytes(memory_bytes))
        })?;
        Allowance::check(streams_left.as_ref(), streams)
            .map_err(|terms| format!("job `{name}` would open {streams} streams to its hubs, and {terms}"))
    }

    fn allowance(
        &self,
        most: u64,
        mut used: Vec<(&str, u64)>,
        show: impl Fn(u64) -> String,
        remedy: &str,
    ) -> Allowance {
        used.retain(|&(_, amount)| amount > 0);
        used.sort_by_key(|&(_, amount)| std::cmp::Reverse(amount));
        let left = most.saturating_sub(total(used.iter().map(|&(_, amount)| amount)));
        let shares = used.iter().map(|&(job, amount)| format!("`{job}` has {}", show(amount))).collect();
        let of_which = match used.is_empty() {
            true => ": ".to_owned(),
            false => format!(", of which {}: end one with `paramhub jobs stop`, ", listed(shares)),
        };
        let terms = format!(
            "the jobs of team `{}` may have {} together{of_which}{remedy}, or have the quota raised with `paramhub teams set`",
            self.name,
            show(most)
        );
        Allowance { left, terms }
    }
}

fn total(amounts: impl Iterator<Item = u64>) -> u64 {
    amounts.fold(0, u64::saturating_add)
}

/// Lists the first of many.
fn listed(mut words: Vec<String>) -> String {
    let more = words.len().saturating_sub(JOBS_LISTED);
    words.truncate(JOBS_LISTED);
    match more {
        0 => words.join(", "),
        more => format!("{} and {more} more", words.join(", ")),
    }
}

fn mebibytes(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn team(quotas: TeamQuotas) -> TeamRecord {
        TeamRecord { name: "vision".into(), quotas }
    }

    fn job(name: &str, weight: u32, mebibytes: u64, streams: u64) -> JobUse<'_> {
        JobUse { name, weight, memory_bytes: mebibytes << 20, streams }
    }

    #[test]
    fn a_team_has_the_jobs_whose_names_begin_with_its_own() {
        for (job, full) in [("a", "vision/a"), ("vision/a", "vision/a"), ("speech/a", "vision/speech/a")] {
            assert_eq!(full_name(Some("vision"), job), full);
        }
        for (job, full) in
            [("visionary/a", "vision/visionary/a"), ("../a", "vision/../a"), ("/a", "vision//a")]
        {
            assert_eq!(full_name(Some("vision"), job), full);
        }
        assert_eq!(full_name(None, "speech/a"), "speech/a");
        for other in ["vision", "visionary/a", "Vision/a", "/vision/a", "speech/vision/a"] {
            assert!(!is_of("vision", other), "{other}");
        }
        for empty in ["", "vision/"] {
            assert_eq!(name_of_new(Some("vision"), empty).unwrap_err().code, ErrorCode::BadRequest);
        }
        assert_eq!(name_of_new(Some("vision"), "vision").unwrap(), "vision/vision");
        for wrong in ["", "a/b", "A", "a b", "..", &"x".repeat(33)] {
            assert!(check_name(wrong).is_err(), "{wrong:?}");
        }
        assert!(check_name("vision-2_b").is_ok());
    }

    #[test]
    fn jobs_at_once_and_their_weights_are_bounded_together() {
        let vision = team(TeamQuotas { jobs: Some(2), weight: Some(4), ..TeamQuotas::default() });
        let a = job("vision/a", 3, 0, 0);
        assert!(vision.admit("vision/b", 1, &[a]).is_ok());
        let refused = vision.admit("vision/b", 2, &[a]).unwrap_err();
        assert_eq!(refused.code, ErrorCode::DoesNotFit);
        assert_eq!(
            refused.message,
            "job `vision/b` would have weight 2, and the jobs of team `vision` may have weight 4 together, of which `vision/a` has \
             weight 3: end one with `paramhub jobs stop`, give the new one less weight, or have the quota raised with `paramhub \
             teams set`"
        );
        let refused = vision.admit("vision/c", 1, &[a, job("vision/b", 1, 0, 0)]).unwrap_err();
        assert!(
            refused
                .message
                .starts_with("team `vision` may have 2 jobs at once, and has `vision/a`, `vision/b`: "),
            "{}",
            refused.message
        );
        let none = team(TeamQuotas { jobs: Some(0), ..TeamQuotas::default() });
        assert_eq!(
            none.admit("vision/a", 1, &[]).unwrap_err().message,
            "team `vision` may have 0 jobs at once: have the quota raised with `paramhub teams set`"
        );
        assert!(team(TeamQuotas::default()).admit("vision/c", 100, &[a; 100]).is_ok());
    }

    #[test]
    fn memory_and_streams_of_all_hubs_count() {
        let vision =
            team(TeamQuotas { memory_bytes: Some(1000 << 20), streams: Some(10), ..TeamQuotas::default() });
        let a = job("vision/a", 1, 600, 8);
        let allowed = vision.allowances(&[a]);
        assert_eq!(
            (allowed.memory_bytes.as_ref().unwrap().left, allowed.streams.unwrap().left),
            (400 << 20, 2)
        );
        assert!(allowed.memory_bytes.unwrap().terms.contains("`vision/a` has 600 MiB of memory"));
        assert_eq!(vision.check_held(&job("vision/b", 1, 400, 2), &[a]), Ok(()));
        let refused = vision.check_held(&job("vision/b", 1, 401, 2), &[a]).unwrap_err();
        assert!(
            refused.starts_with("job `vision/b` needs 401 MiB at its hubs, and the jobs of team"),
            "{refused}"
        );
        let refused = vision.check_held(&job("vision/b", 1, 0, 3), &[a]).unwrap_err();
        assert!(
            refused.contains("may have 10 streams together, of which `vision/a` has 8 streams"),
            "{refused}"
        );
        assert_eq!(
            vision.check_held(&job("vision/b", 1, 1001, 0), &[]).unwrap_err(),
            "job `vision/b` needs 1001 MiB at its hubs, and the jobs of team `vision` may have 1000 MiB of memory together: \
             use an optimizer with less state or a smaller model, or have the quota raised with `paramhub teams set`"
        );
        // A quota that was lowered beneath what is in use leaves nothing.
        let lower = team(TeamQuotas { streams: Some(1), ..TeamQuotas::default() });
        assert_eq!(lower.allowances(&[a]).streams.unwrap().left, 0);
    }

    #[test]
    fn a_message_lists_few_of_many_jobs() {
        let names: Vec<String> = (0..100).map(|number| format!("vision/{number}")).collect();
        let uses: Vec<JobUse> = names.iter().map(|name| job(name, 1, 1, 1)).collect();
        let vision = team(TeamQuotas { jobs: Some(100), streams: Some(100), ..TeamQuotas::default() });
        let refused = vision.admit("vision/more", 1, &uses).unwrap_err().message;
        assert!(refused.contains("`vision/3` and 96 more: ") && refused.len() < 400, "{refused}");
    }
}
