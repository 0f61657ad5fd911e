//! This module records which process holds which rank of a job.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::auth::{Epoch, Incarnation, RankClaim};
use crate::service::ConnectService;

use super::COME_BACK_S;
use super::rank_texts::{describe_process, printable};
use crate::membership::Now;

/// The assignment of each rank.
pub(super) struct RankAssignments {
    assignments: Vec<RankAssignment>,
    assigned: u32,
    submitted: u32,
    next_ticket: u64,
    /// The epoch with which the job began, or began again.
    first_epoch: u64,
    newest_epoch: u64,
}

enum RankAssignment {
    Unassigned,
    /// Its process waited as long as it may and went away. This differs from a rank that never came.
    GaveUp,
    Assigned(RankHolder),
    /// The job is over. Only the fact that the rank had come is kept.
    WasAssigned,
}

/// What the store keeps of the process that holds a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct RankRecord {
    incarnation: Incarnation,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    claim: Option<RankClaim>,
    host: String,
    process: u32,
    finished: bool,
    /// The epoch since which it holds the rank, or since which it is lost.
    #[serde(default = "first_epoch", skip_serializing_if = "is_first_epoch")]
    since: u64,
    /// The epoch since which it had the rank, if it is lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    held_since: Option<u64>,
    #[serde(default, skip_serializing_if = "is_member")]
    standing: Standing,
    /// The step at which it joined the running job, if it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    joined_at: Option<u32>,
}

fn first_epoch() -> u64 {
    Epoch::FIRST
}

fn is_first_epoch(epoch: &u64) -> bool {
    *epoch == first_epoch()
}

fn is_member(standing: &Standing) -> bool {
    *standing == Standing::Member
}

/// Whether a process takes part in its job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Standing {
    /// It does, or waits for the job to begin.
    #[default]
    Member,
    /// It is lost, and another process may take the rank.
    Lost,
    /// It takes the rank of a process that was lost.
    Joining,
}

/// The process that holds a rank.
pub(super) struct RankHolder {
    incarnation: Incarnation,
    /// The claim of the process; `None` for a worker of protocol version 1.
    claim: Option<RankClaim>,
    /// The process that had the rank before, and since when it had it, if that is known. What it has seen still counts.
    before: Option<(Incarnation, u64)>,
    host: String,
    process: u32,
    /// The ticket of the process's newest call.
    ticket: u64,
    submitted: bool,
    /// `true` if the process has finished its work: without a hub, or it has left one, in a job whose ranks others may take.
    finished: bool,
    /// When a connection on which it waited broke, or when a process that is joining last called.
    lost_at: Option<Now>,
    /// The epoch since which it holds the rank, or since which it is lost.
    pub(super) since: u64,
    /// The epoch since which it has the rank or, if it is lost, had it: its secret is of that epoch. 0 if no process has
    /// had the rank yet.
    held_since: u64,
    /// Whether no other process had the rank before.
    pub(super) is_first: bool,
    pub(super) standing: Standing,
    /// The step at which it joined the running job, if it did.
    pub(super) joined_at: Option<u32>,
}

impl RankAssignments {
    /// The ranks of a job of this many workers that begins with the first of them. The others are lost until a process
    /// takes them.
    pub(super) fn new(workers: u32, first_workers: u32, first_epoch: u64) -> Self {
        let mut assignments = RankAssignments {
            assignments: (0..workers).map(|_| RankAssignment::Unassigned).collect(),
            assigned: 0,
            submitted: 0,
            next_ticket: 1,
            first_epoch,
            newest_epoch: first_epoch,
        };
        assignments.begin_with(first_workers);
        assignments
    }

    /// Has a job that waits for its ranks wait for this many, beginning with rank 0, and for all of them anew.
    pub(super) fn begin_with(&mut self, first_workers: u32) {
        for (rank, assignment) in (0..).zip(&mut self.assignments) {
            *assignment = match rank < first_workers {
                true => RankAssignment::Unassigned,
                false => RankAssignment::Assigned(RankHolder::nobody()),
            };
        }
        self.assigned = self.assignments.len() as u32 - first_workers;
    }

    /// Has a job wait for this many ranks anew, in an epoch that begins with this.
    pub(super) fn begin_again(&mut self, first_workers: u32, epoch: u64) {
        self.begin_with(first_workers);
        self.submitted = 0;
        (self.first_epoch, self.newest_epoch) = (epoch, epoch);
    }

    /// The epoch since which each rank has or had its process, of those that have had one.
    pub(super) fn held_since(&self) -> BTreeMap<u32, u64> {
        let held = |rank| self.holder(rank).filter(|holder| !holder.is_nobody());
        let ranks = 0..self.assignments.len() as u32;
        ranks.filter_map(|rank| held(rank).map(|holder| (rank, holder.held_since))).collect()
    }

    /// The processes that hold the ranks, by rank, for the store. The processes of a job that is over are not recorded.
    pub(super) fn record(&self) -> Vec<RankRecord> {
        let holders = (0..).map_while(|rank| self.holder(rank));
        let record = |holder: &RankHolder| RankRecord {
            incarnation: holder.incarnation,
            claim: holder.claim,
            host: holder.host.clone(),
            process: holder.process,
            finished: holder.finished,
            since: holder.since,
            held_since: Some(holder.held_since).filter(|&held_since| held_since != holder.since),
            standing: holder.standing,
            joined_at: holder.joined_at,
        };
        holders.map(record).collect()
    }

    /// Restores the processes that an earlier manager recorded. They have yet to hand in their settings, unless the
    /// job runs.
    pub(super) fn restore(&mut self, ranks: Vec<RankRecord>, now: Now) {
        self.assigned = ranks.len() as u32;
        self.newest_epoch = ranks.iter().map(|record| record.since).max().unwrap_or(first_epoch());
        let holder = |record: RankRecord| RankHolder {
            incarnation: record.incarnation,
            claim: record.claim,
            before: None,
            host: record.host,
            process: record.process,
            ticket: 0,
            submitted: record.standing == Standing::Lost,
            finished: record.finished,
            lost_at: (record.standing == Standing::Joining).then_some(now),
            since: record.since,
            held_since: record.held_since.unwrap_or(record.since),
            is_first: false,
            standing: record.standing,
            joined_at: record.joined_at,
        };
        self.assignments = ranks.into_iter().map(|record| RankAssignment::Assigned(holder(record))).collect();
    }

    /// Marks the ranks that had connected to a job that ended under an earlier manager.
    pub(super) fn restore_ended(&mut self, connected: &[u32], newest_epoch: u64) {
        self.newest_epoch = newest_epoch.max(first_epoch());
        for &rank in connected {
            if let Some(assignment) = self.assignments.get_mut(rank as usize) {
                *assignment = RankAssignment::WasAssigned;
            }
        }
    }

    pub(super) fn holder(&self, rank: u32) -> Option<&RankHolder> {
        match self.assignments.get(rank as usize)? {
            RankAssignment::Assigned(holder) => Some(holder),
            _ => None,
        }
    }

    /// The host of an assigned rank's process, as that process reported it.
    pub(super) fn host(&self, rank: u32) -> &str {
        self.holder(rank).map_or("", |holder| &holder.host)
    }

    /// Assigns a rank, or renews its ticket where the same process calls again.
    pub(super) fn assign(&mut self, call: &ConnectService, now: Now) -> u64 {
        if self.holder(call.rank).is_some() {
            let ticket = self.renew_ticket(call.rank);
            // One that is joining gets its answer at once, and no connection tells any more whether it is there.
            let joining = self.holder_mut(call.rank).filter(|holder| holder.standing == Standing::Joining);
            joining.into_iter().for_each(|holder| holder.lost_at = Some(now));
            return ticket;
        }
        let holder = self.new_holder(call, self.first_epoch, Standing::Member);
        let ticket = holder.ticket;
        self.assignments[call.rank as usize] = RankAssignment::Assigned(holder);
        self.assigned += 1;
        ticket
    }

    /// Gives a lost rank to another process, in an epoch that begins with it.
    pub(super) fn replace(&mut self, call: &ConnectService, now: Now) -> u64 {
        let since = self.begin_epoch();
        let holder = self.new_holder(call, since, Standing::Joining);
        let ticket = holder.ticket;
        let holder = RankHolder { submitted: true, lost_at: Some(now), ..holder };
        self.assignments[call.rank as usize] = RankAssignment::Assigned(holder);
        ticket
    }

    fn new_holder(&mut self, call: &ConnectService, since: u64, standing: Standing) -> RankHolder {
        let is_first = self.holder(call.rank).is_none_or(RankHolder::is_nobody);
        RankHolder {
            incarnation: call.incarnation,
            claim: call.claim,
            before: self.holder(call.rank).and_then(RankHolder::former),
            host: printable(&call.host),
            process: call.process,
            ticket: self.draw_ticket(),
            submitted: false,
            finished: false,
            lost_at: None,
            since,
            held_since: since,
            is_first,
            standing,
            joined_at: None,
        }
    }

    pub(super) fn holder_mut(&mut self, rank: u32) -> Option<&mut RankHolder> {
        match self.assignments.get_mut(rank as usize)? {
            RankAssignment::Assigned(holder) => Some(holder),
            _ => None,
        }
    }

    /// The ranks whose processes have this standing, ascending.
    pub(super) fn standing(&self, standing: Standing) -> Vec<u32> {
        self.ranks(|assignment| {
            matches!(assignment, RankAssignment::Assigned(holder) if holder.standing == standing)
        })
    }

    /// The newest epoch in which a rank has changed, or the first.
    pub(super) fn newest_epoch(&self) -> u64 {
        self.newest_epoch
    }

    /// Begins an epoch.
    pub(super) fn begin_epoch(&mut self) -> u64 {
        self.newest_epoch += 1;
        self.newest_epoch
    }

    /// Begins no epoch up to this one any more: there has been one.
    pub(super) fn reach_epoch(&mut self, epoch: u64) {
        self.newest_epoch = self.newest_epoch.max(epoch);
    }

    /// Gives an assigned rank's newest call its ticket; older calls cannot change the assignment any more.
    pub(super) fn renew_ticket(&mut self, rank: u32) -> u64 {
        let ticket = self.draw_ticket();
        if let RankAssignment::Assigned(holder) = &mut self.assignments[rank as usize] {
            holder.ticket = ticket;
            holder.lost_at = None;
        }
        ticket
    }

    pub(super) fn release(&mut self, rank: u32, ticket: u64) {
        if self.owns(rank, ticket) {
            self.set_unassigned(rank, RankAssignment::Unassigned);
        }
    }

    pub(super) fn give_up(&mut self, rank: u32, ticket: u64) {
        if self.owns(rank, ticket) {
            self.set_unassigned(rank, RankAssignment::GaveUp);
        }
    }

    pub(super) fn clear(&mut self, rank: u32) {
        self.set_unassigned(rank, RankAssignment::Unassigned);
    }

    pub(super) fn mark_lost(&mut self, rank: u32, ticket: u64, now: Now) {
        if !self.owns(rank, ticket) {
            return;
        }
        if let RankAssignment::Assigned(holder) = &mut self.assignments[rank as usize] {
            holder.lost_at = Some(now);
        }
    }

    /// The process of a rank has to call, as if the connection on which it waited had broken now, or earlier if it has.
    pub(super) fn miss(&mut self, rank: u32, now: Now) {
        if let Some(holder) = self.holder_mut(rank) {
            holder.lost_at.get_or_insert(now);
        }
    }

    /// The processes that are joining and have not been heard, on any connection, for this long.
    pub(super) fn joining_for(&self, seconds: f64, now: Now) -> Vec<u32> {
        let is_silent =
            |holder: &RankHolder| holder.standing == Standing::Joining && holder.is_silent(seconds, now);
        self.ranks(|assignment| matches!(assignment, RankAssignment::Assigned(holder) if is_silent(holder)))
    }

    /// A rank whose connection broke in InitService and which has not come back in time.
    pub(super) fn come_back_expired(&self, now: Now) -> Option<(usize, &RankHolder)> {
        self.assignments.iter().enumerate().find_map(|(rank, assignment)| match assignment {
            RankAssignment::Assigned(holder) if now.seconds_since(holder.lost_at?) >= COME_BACK_S => {
                Some((rank, holder))
            }
            _ => None,
        })
    }

    pub(super) fn mark_submitted(&mut self, rank: u32) {
        if let RankAssignment::Assigned(holder) = &mut self.assignments[rank as usize] {
            self.submitted += u32::from(!holder.submitted);
            holder.submitted = true;
        }
    }

    pub(super) fn has_any_submitted(&self) -> bool {
        self.submitted > 0
    }

    pub(super) fn finish(&mut self, rank: u32) {
        if let RankAssignment::Assigned(holder) = &mut self.assignments[rank as usize] {
            holder.finished = true;
        }
    }

    pub(super) fn finished(&self) -> Vec<u32> {
        self.ranks(|assignment| matches!(assignment, RankAssignment::Assigned(holder) if holder.finished))
    }

    pub(super) fn have_all_finished(&self) -> bool {
        self.assignments
            .iter()
            .all(|assignment| matches!(assignment, RankAssignment::Assigned(holder) if holder.finished))
    }

    pub(super) fn are_all_assigned(&self) -> bool {
        self.assigned as usize == self.assignments.len()
    }

    pub(super) fn have_all_submitted(&self) -> bool {
        self.not_submitted().is_empty()
    }

    pub(super) fn absent(&self) -> Vec<u32> {
        self.ranks(|assignment| matches!(assignment, RankAssignment::Unassigned))
    }

    pub(super) fn gave_up(&self) -> Vec<u32> {
        self.ranks(|assignment| matches!(assignment, RankAssignment::GaveUp))
    }

    pub(super) fn connected(&self) -> Vec<u32> {
        self.ranks(|assignment| match assignment {
            RankAssignment::Assigned(holder) => holder.standing != Standing::Lost,
            RankAssignment::WasAssigned => true,
            RankAssignment::Unassigned | RankAssignment::GaveUp => false,
        })
    }

    pub(super) fn not_submitted(&self) -> Vec<u32> {
        self.ranks(|assignment| !matches!(assignment, RankAssignment::Assigned(holder) if holder.submitted))
    }

    /// Drops host names and the like of a job that is over.
    pub(super) fn forget_processes(&mut self) {
        for assignment in &mut self.assignments {
            *assignment = match assignment {
                RankAssignment::Assigned(holder) if holder.is_nobody() => RankAssignment::Unassigned,
                RankAssignment::Assigned(_) | RankAssignment::WasAssigned => RankAssignment::WasAssigned,
                RankAssignment::Unassigned | RankAssignment::GaveUp => RankAssignment::Unassigned,
            };
        }
    }

    /// The assigned ranks without a claim, ascending.
    pub(super) fn of_version_1(&self) -> Vec<u32> {
        self.ranks(|assignment| {
            matches!(assignment, RankAssignment::Assigned(holder) if holder.claim.is_none() && !holder.is_nobody())
        })
    }

    fn owns(&self, rank: u32, ticket: u64) -> bool {
        self.holder(rank).is_some_and(|holder| holder.ticket == ticket)
    }

    fn set_unassigned(&mut self, rank: u32, assignment: RankAssignment) {
        self.assignments[rank as usize] = assignment;
        self.assigned -= 1;
    }

    fn draw_ticket(&mut self) -> u64 {
        self.next_ticket += 1;
        self.next_ticket
    }

    fn ranks(&self, wanted: impl Fn(&RankAssignment) -> bool) -> Vec<u32> {
        (0u32..)
            .zip(&self.assignments)
            .filter(|(_, assignment)| wanted(assignment))
            .map(|(rank, _)| rank)
            .collect()
    }
}

impl RankHolder {
    /// What stands for the process of a rank that none has had yet.
    fn nobody() -> RankHolder {
        RankHolder {
            incarnation: Incarnation([0; 16]),
            claim: None,
            before: None,
            host: String::new(),
            process: 0,
            ticket: 0,
            submitted: true,
            finished: false,
            lost_at: None,
            since: first_epoch(),
            held_since: 0,
            is_first: false,
            standing: Standing::Lost,
            joined_at: None,
        }
    }

    /// Whether no process has had the rank yet.
    pub(super) fn is_nobody(&self) -> bool {
        self.held_since == 0
    }

    /// Whether this is the process of that incarnation.
    pub(super) fn is(&self, incarnation: Incarnation) -> bool {
        self.incarnation == incarnation
    }

    /// Whether the call comes from this process. An incarnation is no secret, since streams carry it, but a
    /// claim is.
    pub(super) fn has_called(&self, call: &ConnectService) -> bool {
        let has_same_claim = match (&self.claim, &call.claim) {
            (Some(mine), Some(given)) => mine.matches(given),
            (None, None) => true,
            _ => false,
        };
        self.is(call.incarnation) && has_same_claim
    }

    /// Whether the process has finished its work.
    pub(super) fn has_finished(&self) -> bool {
        self.finished
    }

    /// Whether it has not been heard, on any connection, for this long.
    pub(super) fn is_silent(&self, seconds: f64, now: Now) -> bool {
        self.lost_at.is_some_and(|at| now.seconds_since(at) >= seconds)
    }

    /// The epoch since which it had the rank that it has lost, if it has.
    pub(super) fn lost_what_it_held_since(&self) -> Option<u64> {
        (self.standing == Standing::Lost && !self.is_nobody()).then_some(self.held_since)
    }

    /// The process that had the rank and has lost it, and since when it had it.
    pub(super) fn former(&self) -> Option<(Incarnation, u64)> {
        match self.lost_what_it_held_since() {
            Some(since) => Some((self.incarnation, since)),
            None => self.before,
        }
    }

    /// Whether the process has claimed its rank, and so has a secret of its own.
    pub(super) fn has_claim(&self) -> bool {
        self.claim.is_some()
    }
}

impl std::fmt::Display for RankHolder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&describe_process(&self.host, self.process))
    }
}
