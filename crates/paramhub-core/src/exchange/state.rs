//! The state of one route's chunks.

use std::collections::HashSet;

use super::actions::{Answer, Update};
use super::rewind::KeptVersion;
use super::rules::{ChunkReach, Rules};
use crate::consistency::Consistency;
use crate::standbys::Role;
use crate::stragglers::Quorum;

/// The state of one route's chunks. Slots number the chunks as in [`crate::placement::Placement::chunks`].
#[derive(Clone, Debug)]
pub struct Exchange {
    pub(super) rules: Rules,
    /// Which of the two hubs of the chunks this one is, in a job with standbys.
    pub(super) role: Role,
    pub(super) chunks: Vec<ChunkState>,
    /// The state of member `m` at slot `s`, at `s * members + m`.
    pub(super) members: Vec<MemberState>,
    /// For each member, whether it has left of its own accord or is lost.
    pub(super) departed: Vec<bool>,
    pub(super) departures: u32,
    /// In a job without a quorum: the number of members, counted from the last one, whose places nobody has. Steps end
    /// without them.
    pub(super) absent: u32,
    /// For each member, whether a process has its place.
    pub(super) presence: Vec<Presence>,
    /// For each member, the number of workers whose gradients its contributions sum up: more than one for a site.
    pub(super) workers_of: Vec<u32>,
    /// For each member, the first step to which it contributes: another process contributed to earlier ones.
    pub(super) joined_at: Vec<u32>,
    /// The slots and members for which the sum of the step under way has a contribution of a process that was
    /// lost and whose place another process has taken.
    pub(super) former_contributions: HashSet<(u32, u32)>,
    /// The number of chunks whose sum of step `s` is complete, at `s % 2`, until all are: chunks are one step apart at most.
    pub(super) complete_chunks: [u32; 2],
    /// The newest step of which the sums of all chunks are complete.
    pub(super) complete_step: Option<u32>,
    /// The next slot at which the release under way looks; the number of chunks if there is no release.
    pub(super) release_at: u32,
    /// The step that was released last.
    pub(super) released: Option<u32>,
    /// Whether that step ends without an update.
    pub(super) skips: bool,
    /// Whether rank 0's next release may be that step's once more, since its stream was replaced.
    pub(super) release_may_repeat: bool,
    /// Whether rank 0 may send parameters and state to start from that are here, since its process was replaced before all
    /// were.
    pub(super) start_may_repeat: bool,
    /// The version that the first parameters came with.
    pub(super) start_version: Option<u32>,
    /// For each slot, the copy that the caller keeps; empty if the job never goes back.
    pub(super) kept: Vec<Option<KeptVersion>>,
    /// For each member, how many updates of chunks were made without it; empty if the job waits for all members.
    pub(super) left_out: Vec<u64>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct ChunkState {
    pub(super) reach: ChunkReach,
    /// The number of updates or, if only some members step together, the number of those that they made; its low 32 bits
    /// travel.
    pub(super) version: u64,
    /// Updates since the optimizer's state was zero, which need not have been at version 0.
    pub(super) updates: u64,
    /// Contributions to the step under way of the members that step together; where steps end without late members, the workers
    /// whose gradients these are.
    pub(super) arrived: u32,
    /// The number of contributions that are in the sum; fewer than have come only while some are parked.
    pub(super) folded: u32,
    /// In a job with a quorum: the number of workers that may contribute to the step under way and have not.
    /// They have the parameters that it starts from, or are about to receive them.
    pub(super) awaited: u32,
    /// The number of those workers that were counted in the step before.
    pub(super) prompt: u32,
    pub(super) initialised: bool,
    /// `true` while the standby has not acknowledged the parameters that the chunk starts from.
    pub(super) awaits_standby: bool,
    /// `true` once the chunk has had an update here of the members that step together.
    pub(super) has_moved_on: bool,
    /// `true` if members contribute factors.
    pub(super) takes_factors: bool,
    pub(super) stage: StepStage,
}

/// The progress of the step under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum StepStage {
    /// Some contributions are missing.
    #[default]
    Open,
    /// The sum is complete here and goes to the site above, or to the standby.
    SentUp,
    /// All factors are here, and the sum is being made of them.
    SummingFactors,
    /// The sum is complete, and the chunk waits for its release.
    Held,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MemberState {
    /// The step that the member pushes next. In a job that leaves out late members: the version of the
    /// parameters that it has or waits for.
    pub(super) next_step: u32,
    pub(super) request: MemberRequest,
    /// `true` if the member was counted in the step before, or there was no step before.
    pub(super) is_prompt: bool,
}

/// It is held for each chunk and member, so its size is fixed at 8 bytes.
const _: () = assert!(size_of::<MemberState>() == 8);

/// The request of a member for a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum MemberRequest {
    #[default]
    None,
    /// The member's stream was cut. Whether it waits for an answer is known when it repeats its request or
    /// goes on.
    Cut,
    Waiting(Answer),
    /// The answer may leave but has not begun to.
    Sendable(Answer),
}

/// Whether a process has the place of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    /// One has it, or has left of its own accord.
    Present,
    /// The same, and none had it before.
    Newcomer,
    /// None has had it yet.
    NotYet,
    /// The one that had it is lost.
    Lost,
}

impl ChunkState {
    pub(super) fn new(reach: ChunkReach, initialised: bool) -> Self {
        ChunkState {
            reach,
            version: 0,
            updates: 0,
            arrived: 0,
            folded: 0,
            awaited: 0,
            prompt: 0,
            initialised,
            awaits_standby: false,
            has_moved_on: false,
            takes_factors: false,
            stage: StepStage::Open,
        }
    }

    /// Goes back to an earlier version, which had had this many updates; `None` if the chunk is at it.
    pub(super) fn go_back(&mut self, version: u32, updates: Option<u64>) {
        self.version = u64::from(version);
        self.updates = updates.unwrap_or(self.updates);
    }

    /// Ends the step under way.
    pub(super) fn update(&mut self, step: u32, contributions: u32) -> Update {
        self.version += 1;
        self.has_moved_on = true;
        self.updates += 1;
        self.arrived = 0;
        self.folded = 0;
        self.stage = StepStage::Open;
        Update { step, number: self.updates, contributions, is_apart: false }
    }

    /// Updates the chunk with one member's contribution, beside the step under way of those that step together.
    pub(super) fn update_apart(&mut self, step: u32, contributions: u32) -> Update {
        self.version += u64::from(self.reach.together == 0);
        self.updates += 1;
        Update { step, number: self.updates, contributions, is_apart: true }
    }
}

impl Exchange {
    /// The state of `chunks` chunks. It allocates all the memory it will ever need.
    pub fn new(rules: Rules, chunks: u32) -> Self {
        let together = if rules.consistency == Consistency::Synchronous { rules.members } else { 0 };
        let reach = ChunkReach { members: rules.members, together, has_above: false, site_first: false };
        Self::among_sites(rules, std::iter::repeat_n(reach, chunks as usize))
    }

    /// Does the same as [`Exchange::new`], for a site among others. `reach` states for each chunk which
    /// members contribute to it and whether its sum goes to a site above.
    pub fn among_sites(rules: Rules, reach: impl IntoIterator<Item = ChunkReach>) -> Self {
        let chunks: Vec<ChunkState> =
            reach.into_iter().map(|reach| ChunkState::new(reach, !rules.has_parameters)).collect();
        let mut exchange = Exchange {
            rules,
            role: Role::Serves { has_standby: false },
            members: vec![MemberState::default(); chunks.len() * rules.members as usize],
            departed: vec![false; rules.members as usize],
            departures: 0,
            absent: 0,
            presence: vec![Presence::Present; rules.members as usize],
            workers_of: vec![1; rules.members as usize],
            joined_at: vec![0; rules.members as usize],
            former_contributions: HashSet::new(),
            complete_chunks: [0; 2],
            complete_step: None,
            release_at: chunks.len() as u32,
            released: None,
            skips: false,
            release_may_repeat: false,
            start_may_repeat: false,
            start_version: None,
            kept: vec![None; if rules.rewind_every.is_some() { chunks.len() } else { 0 }],
            left_out: vec![0; if rules.quorum.is_some() { rules.members as usize } else { 0 }],
            chunks,
        };
        exchange.begin_with(rules.first_members);
        exchange.await_all();
        exchange
    }

    /// Sets the number of workers whose gradients each member's contributions sum up. Without this call it is 1.
    pub fn set_workers_of(&mut self, workers_of: impl IntoIterator<Item = u32>) {
        self.workers_of.clear();
        self.workers_of.extend(workers_of);
        debug_assert_eq!(self.workers_of.len(), self.rules.members as usize);
        self.await_all();
    }

    /// Gives the places of this many members, counted from member 0, to processes, and those of the others to nobody.
    pub(super) fn begin_with(&mut self, members: u32) {
        for (member, departed) in (0..).zip(&mut self.departed) {
            *departed = member >= members;
            self.presence[member as usize] = if *departed { Presence::NotYet } else { Presence::Present };
        }
        self.departures = self.rules.members.saturating_sub(members);
        self.absent = if self.rules.quorum.is_none() { self.departures } else { 0 };
    }

    /// Bytes that this state takes.
    pub fn memory_bytes(rules: Rules, chunks: u32) -> u64 {
        let kept = if rules.rewind_every.is_some() { size_of::<Option<KeptVersion>>() } else { 0 };
        let per_chunk = size_of::<ChunkState>() + kept + size_of::<MemberState>() * rules.members as usize;
        u64::from(chunks) * per_chunk as u64
    }

    /// Makes these chunks take [factors](super::Gathering) instead of gradients. The caller does so before
    /// anything else.
    pub fn take_factors(&mut self, slots: impl IntoIterator<Item = u32>) {
        for slot in slots {
            self.chunks[slot as usize].takes_factors = true;
        }
    }

    /// Returns whether members contribute factors to the chunk.
    pub fn takes_factors(&self, slot: u32) -> bool {
        self.chunks[slot as usize].takes_factors
    }

    /// The step that the member contributes to next.
    pub fn next_step(&self, slot: u32, member: u32) -> u32 {
        self.member(slot, member).next_step
    }

    /// The chunk's step under way.
    pub fn step(&self, slot: u32) -> u32 {
        self.chunks[slot as usize].version as u32
    }

    /// Returns whether the chunk has its initial parameters.
    pub fn has_begun(&self, slot: u32) -> bool {
        self.chunks[slot as usize].initialised
    }

    /// Updates of the chunk since its optimizer's state was zero.
    pub fn updates(&self, slot: u32) -> u64 {
        self.chunks[slot as usize].updates
    }

    /// In a synchronous job without a quorum: the number of workers that contribute to each step.
    pub fn contributors(&self) -> u32 {
        self.rules.workers - self.absent
    }

    /// The condition that ends a step of the chunk without some members, if it may. What goes to a site above waits for all.
    pub(super) fn quorum(&self, slot: u32) -> Option<Quorum> {
        self.rules.quorum.filter(|_| !self.chunks[slot as usize].reach.has_above)
    }

    /// Returns whether the chunk may move on without a contribution of this member.
    pub fn moves_on_without(&self, slot: u32, member: u32) -> bool {
        !self.steps_together(slot, member) || self.quorum(slot).is_some()
    }

    /// Returns whether an update with a contribution of this member needs those of others.
    pub fn steps_together(&self, slot: u32, member: u32) -> bool {
        member < self.chunks[slot as usize].reach.together
    }

    /// The number of members that contribute to the chunk, counted from member 0.
    pub(super) fn member_count(&self, slot: u32) -> u32 {
        self.chunks[slot as usize].reach.members
    }

    pub(super) fn member(&self, slot: u32, member: u32) -> MemberState {
        self.members[slot as usize * self.rules.members as usize + member as usize]
    }

    pub(super) fn member_mut(&mut self, slot: u32, member: u32) -> &mut MemberState {
        &mut self.members[slot as usize * self.rules.members as usize + member as usize]
    }
}
