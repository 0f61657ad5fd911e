//! What the manager has told ranks: it must hold from then on, whatever becomes of the manager.

use std::collections::BTreeMap;

use paramhub_core::auth::{Incarnation, StreamSecret};
use paramhub_core::service::{ErrorCode, JobState, ServiceConnected, ServiceError, ServiceInitialised};

/// What the manager has told.
#[derive(Debug, Default)]
pub(super) struct Told {
    /// The newest epoch in which a rank has joined.
    epoch: u64,
    /// The process that was told that it has a rank, and the secret that it was given, by epoch and rank.
    holders: BTreeMap<(u64, u32), (Incarnation, Option<StreamSecret>)>,
    /// The racks to which ranks are dealt: the ranks of one are told the same.
    racks: u32,
    /// What all ranks of an epoch were told, by epoch and rack.
    connected: BTreeMap<(u64, u32), String>,
    /// What the ranks of each rack were told when the job began to run.
    initialised: BTreeMap<u32, String>,
}

impl Told {
    /// The record of a job whose ranks are dealt to so many racks.
    pub(super) fn new(racks: u32) -> Told {
        Told { racks, ..Told::default() }
    }

    /// A process is told that it has its rank, and who else is in the job.
    pub(super) fn connected(
        &mut self,
        rank: u32,
        incarnation: Incarnation,
        connected: &ServiceConnected,
    ) -> Result<(), String> {
        let epoch = connected.epoch;
        self.epoch = self.epoch.max(epoch);
        let secret = connected.secrets.as_ref().map(|secrets| secrets.rank);
        let holder = *self.holders.entry((epoch, rank)).or_insert((incarnation, secret));
        if holder.0 != incarnation {
            return Err(format!(
                "two processes are told that they have rank {rank} in epoch {epoch}: {:?} and {incarnation:?}",
                holder.0
            ));
        }
        if holder.1 != secret {
            return Err(format!("rank {rank} is given two secrets in epoch {epoch}"));
        }
        // The hubs of the shares may change while the job runs, and ranks ask for them.
        let (shares, later_hubs) = (Vec::new(), Vec::new());
        let text =
            format!("{:?}", ServiceConnected { secrets: None, shares, later_hubs, ..connected.clone() });
        let before = self.connected.entry((epoch, rank % self.racks)).or_insert_with(|| text.clone());
        match *before == text {
            true => Ok(()),
            false => Err(format!("ranks are told different things of epoch {epoch}: {before} and {text}")),
        }
    }

    /// A rank is told that the job runs.
    pub(super) fn initialised(&mut self, rank: u32, initialised: &ServiceInitialised) -> Result<(), String> {
        // A process that has taken a lost rank is told where it joins.
        let text = format!(
            "{:?}",
            ServiceInitialised { resumed_step: None, joined_running: false, ..initialised.clone() }
        );
        let before = self.initialised.entry(rank % self.racks).or_insert_with(|| text.clone());
        match *before == text {
            true => Ok(()),
            false => Err(format!("ranks are told different placements: {before} and {text}")),
        }
    }

    /// A rank is refused. One that was told that it has its rank must not hear that it does not.
    pub(super) fn refused(
        &self,
        rank: u32,
        incarnation: Incarnation,
        refusal: &ServiceError,
    ) -> Result<(), String> {
        // In later epochs ranks are taken from processes that are lost.
        let holder = self.holders.get(&(self.epoch, rank)).filter(|_| self.epoch == 1);
        let denies = matches!(
            refusal.code,
            ErrorCode::RankTaken | ErrorCode::BadRequest | ErrorCode::WrongNonce | ErrorCode::NotFound
        );
        match denies && holder.is_some_and(|holder| holder.0 == incarnation) {
            false => Ok(()),
            true => Err(format!("rank {rank} was told that it has its rank, and is refused: {refusal}")),
        }
    }

    /// A manager has started, with the job in this state if it knows the job.
    pub(super) fn manager_started(&self, state: Option<JobState>) -> Result<(), String> {
        let is_behind = match state {
            None => true,
            Some(JobState::Connecting) => !self.holders.is_empty(),
            Some(JobState::Initialising) => !self.initialised.is_empty(),
            Some(JobState::Running | JobState::Finished | JobState::Failed) => false,
        };
        match is_behind {
            false => Ok(()),
            true => {
                Err(format!("a manager starts with the job {state:?}, and ranks know that it was further"))
            }
        }
    }
}
