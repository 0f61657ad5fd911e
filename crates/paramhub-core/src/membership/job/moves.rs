//! How an operator moves a job off one of its hubs, which goes on with its other jobs.
//!
//! The job leaves the hub as it leaves one that is [drained](super::drain), and does not come back to it. Another hub becomes the
//! standby of what it had there: the one that the operator has named, if it can.

use serde::{Deserialize, Serialize};

use super::job_hubs::JobHub;
use super::new_standbys::{ASK_AGAIN_AFTER_S, LackingShare};
use super::{Job, join_words};
use crate::membership::Now;
use crate::service::{ErrorCode, JobState, MoveStatus, ServiceError, refusal};
use crate::standbys::{Role, Share};

/// The most hubs to which a job does not come back, so that its record stays small. The oldest order is then forgotten.
const MOVES_MAX: usize = 64;

/// An order to move the job off a hub.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct MoveOrder {
    from: u32,
    /// The hub that is to have what it leaves behind; any other if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    to: Option<u32>,
    /// The shares that it leaves behind.
    shares: Vec<u16>,
}

impl Job {
    /// Moves the job off a hub: to another one, or to whichever has room. Returns whether that is a change: an order may be
    /// repeated.
    ///
    /// # Errors
    /// If the job cannot leave a hub while it runs, or has no part there.
    pub(crate) fn order_move(&mut self, from: u32, to: Option<u32>) -> Result<bool, ServiceError> {
        let name = &self.name;
        if self.state.has_ended() {
            return Err(refusal(ErrorCode::JobEnded, format!("job `{name}` has ended")));
        }
        let cannot =
            |why: &str| Err(refusal(ErrorCode::BadRequest, format!("job `{name}` cannot move: {why}")));
        if self.moves.last().is_some_and(|order| (order.from, order.to) == (from, to)) {
            return Ok(false);
        }
        if self.shares.is_empty() && self.state == JobState::Running {
            return cannot(
                "it has no standbys, which alone let it leave a hub while it runs (`--replicas 1`)",
            );
        }
        if self.state != JobState::Running || self.is_concluding() {
            return cannot("it has not begun yet, or is ending");
        }
        if Some(from) == to {
            return cannot("the two hubs are the same");
        }
        let shares = self.shares_at(from);
        if shares.is_empty() {
            let has_part = |job_hub: &&JobHub| !job_hub.ended && self.parts_of(job_hub.hub) > 0;
            let names: Vec<String> =
                self.job_hubs.iter().filter(has_part).map(|job_hub| job_hub.describe()).collect();
            return cannot(&format!("it has nothing at hub {from}, but at {}", join_words(&names)));
        }
        // A hub that the job has left before may be asked at once.
        for job_hub in self.job_hubs.iter_mut().filter(|job_hub| Some(job_hub.hub) == to) {
            (job_hub.failed_standby, job_hub.failed_further) = (None, None);
        }
        self.moves.retain(|order| order.from != from && Some(order.from) != to);
        if self.moves.len() == MOVES_MAX {
            self.moves.remove(0);
        }
        self.moves.push(MoveOrder { from, to, shares });
        Ok(true)
    }

    /// Whether an operator has moved the job off this hub.
    pub(crate) fn is_moved_off(&self, hub: u32) -> bool {
        self.moves.iter().any(|order| order.from == hub)
    }

    /// The hub that is to become the standby of a share, if an operator has named one and the job has not done without it lately.
    pub(crate) fn destination(&self, lacking: LackingShare, now: Now) -> Option<u32> {
        let has_failed = |hub: u32| {
            let mut entries = self.job_hubs.iter().filter(|job_hub| job_hub.hub == hub);
            let failed = |job_hub: &JobHub| [job_hub.failed_standby, job_hub.failed_further];
            entries.any(|job_hub| {
                failed(job_hub).into_iter().flatten().any(|at| now.seconds_since(at) < ASK_AGAIN_AFTER_S)
            })
        };
        let mut orders = self.moves.iter().rev().filter(|order| order.shares.contains(&lacking.share));
        let to = orders.find_map(|order| order.to)?;
        (to != lacking.served_by && !has_failed(to)).then_some(to)
    }

    /// How far the newest move is.
    ///
    /// # Errors
    /// If there was none.
    pub(crate) fn move_status(&self) -> Result<MoveStatus, ServiceError> {
        let Some(MoveOrder { from, to, shares }) = self.moves.last() else {
            return Err(refusal(
                ErrorCode::NotFound,
                format!(
                    "job `{}` was not moved, or its ranks have gone back to a checkpoint since",
                    self.name
                ),
            ));
        };
        let has_left = self.parts_of(*from) == 0;
        let why = if has_left { String::new() } else { self.stays_because(*from) };
        let position = to.and_then(|to| self.job_hub_index(to)).map(|index| index as u16);
        let has = |share: &u16| {
            let share = &self.shares[usize::from(*share)];
            share.ready_standby() == position || Some(share.served_by) == position
        };
        let has_arrived = position.is_some() && shares.iter().all(has);
        Ok(MoveStatus { from: *from, to: *to, has_left, has_arrived, why, standbys: self.standby_counts() })
    }

    /// The shares with chunks that a hub serves or follows.
    fn shares_at(&self, hub: u32) -> Vec<u16> {
        let Some(position) = self.job_hub_index(hub).map(|index| index as u16) else { return Vec::new() };
        let of_hub = |&(number, share): &(u16, &Share)| {
            share.role(position) != Role::None && !self.is_empty_share(number)
        };
        (0..).zip(&self.shares).filter(of_hub).map(|(number, _)| number).collect()
    }
}
