//! The teams: which jobs each has, and what these may take.

use super::{Job, Membership, Now};
use crate::auth::Namespace;
use crate::service::{ErrorCode, JobStatus, ServiceError, TeamAllowance, TeamStatus, refusal};
use crate::teams::{JobUse, TEAMS_MAX, TeamRecord, check_name, full_name, is_of, team_of};

impl Membership {
    /// Adds a team, or replaces its quotas. Jobs that live go on.
    pub fn set_team(&mut self, team: TeamRecord) {
        self.teams.insert(team.name.clone(), team);
    }

    /// Forgets a team.
    pub fn remove_team(&mut self, name: &str) {
        self.teams.remove(name);
    }

    /// Checks that a team of this name may be added or changed.
    ///
    /// # Errors
    /// If the name is unusable, or there are too many teams.
    pub fn check_team_name(&self, name: &str) -> Result<(), ServiceError> {
        check_name(name)?;
        if self.teams.contains_key(name) || self.teams.len() < TEAMS_MAX {
            return Ok(());
        }
        let message = format!("there are {TEAMS_MAX} teams already, the most there can be: remove some");
        Err(refusal(ErrorCode::DoesNotFit, message))
    }

    /// One team.
    ///
    /// # Errors
    /// If there is none of this name.
    pub fn team(&self, name: &str) -> Result<TeamStatus, ServiceError> {
        let team = self.teams.get(name).ok_or_else(|| {
            let message = format!("there is no team `{name}`: make it with `paramhub teams set`");
            refusal(ErrorCode::NotFound, message)
        })?;
        Ok(team.status(&self.uses(name, None)))
    }

    /// All teams by name.
    pub fn teams(&self) -> Vec<TeamStatus> {
        self.teams.values().map(|team| team.status(&self.uses(&team.name, None))).collect()
    }

    /// A job by namespace or by name, as callers of a team see it: jobs of others do not exist.
    ///
    /// # Errors
    /// If the team has no such job.
    pub fn find_for(&self, team: Option<&str>, text: &str) -> Result<&Job, ServiceError> {
        let Some(team) = team else { return self.find(text) };
        let by_namespace = text.parse().ok().and_then(|namespace: Namespace| self.jobs.get(&namespace));
        let own = by_namespace.filter(|job| is_of(team, &job.name));
        own.or_else(|| self.find_named(&full_name(Some(team), text))).ok_or_else(|| Self::no_such_job(text))
    }

    /// The jobs that callers of a team see, oldest first.
    pub fn statuses_for(&self, team: Option<&str>, now: Now) -> Vec<JobStatus> {
        let mut statuses = self.statuses(now);
        statuses.retain(|job| team.is_none_or(|team| is_of(team, &job.name)));
        statuses
    }

    /// What the team of a job, if it is of one, may still have at the job's hubs.
    pub fn allowance(&self, namespace: Namespace) -> TeamAllowance {
        let team = self.jobs.get(&namespace).and_then(|job| self.team_record(&job.name));
        team.map(|team| team.allowances(&self.uses(&team.name, Some(namespace)))).unwrap_or_default()
    }

    /// Checks that the team of a new job may have it.
    pub(super) fn admit_to_team(&self, job: &str, weight: u32) -> Result<(), ServiceError> {
        let Some(team) = self.team_record(job) else { return Ok(()) };
        team.admit(job, weight, &self.uses(&team.name, None))
    }

    /// Fails a job that has more at its hubs together than its team may have, once this hub has allocated. Each hub has compared
    /// its own part with what was left before, but not those of other hubs, and another job may have opened meanwhile.
    pub(super) fn check_team_of(&mut self, namespace: Namespace, hub: u32, now: Now) {
        let Some(job) = self.jobs.get(&namespace).filter(|job| !job.state().has_ended()) else { return };
        let Some(team) = self.team_record(&job.name) else { return };
        let held = team.check_held(&use_of(job), &self.uses(&team.name, Some(namespace)));
        if let Err(message) = held
            && let Some(job) = self.jobs.get_mut(&namespace)
        {
            // A job that runs goes on without a further standby.
            let refused = job.exceeds_team(hub, &message, now);
            let transition = refused.unwrap_or_else(|| job.fail(ErrorCode::DoesNotFit, message, now));
            self.follow(namespace, transition);
        }
    }

    /// What each living job of a team has, except one.
    fn uses(&self, team: &str, except: Option<Namespace>) -> Vec<JobUse<'_>> {
        let begins = format!("{team}/");
        let living = self.living.range(begins.clone()..).take_while(|(name, _)| name.starts_with(&begins));
        let living = living.filter(|(_, namespace)| Some(**namespace) != except);
        let uses = living.map(|(name, namespace)| match self.jobs.get(namespace) {
            Some(job) => use_of(job),
            None => {
                let weight = self.weights_reserved.get(name).copied().unwrap_or_default();
                JobUse { name, weight, memory_bytes: 0, streams: 0 }
            }
        });
        uses.collect()
    }

    fn team_record(&self, job: &str) -> Option<&TeamRecord> {
        team_of(job).and_then(|team| self.teams.get(team))
    }
}

fn use_of(job: &Job) -> JobUse<'_> {
    let (memory_bytes, streams) = job.held();
    JobUse { name: &job.name, weight: job.options.weight, memory_bytes, streams }
}
