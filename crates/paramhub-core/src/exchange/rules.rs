//! The rules that hold for all chunks of a job, and the members that a chunk has.

use crate::consistency::Consistency;
use crate::stragglers::Quorum;

/// The rules that hold for all chunks of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Ranks in the job, at whichever site they exchange.
    pub workers: u32,
    /// The number of members here: workers by rank, then [sites](crate::composition). A flat job has workers
    /// only.
    pub members: u32,
    /// The first member that is a site; equal to `members` if none is.
    pub first_site: u32,
    /// The member that is rank 0, if rank 0 exchanges here.
    pub rank_0: Option<u32>,
    /// The rule for the time at which contributions take effect and answers may leave.
    pub consistency: Consistency,
    /// `true` if contributions are summed in the order of members.
    pub reproducible: bool,
    /// `true` if rank 0 must send the initial parameters, to this site or to another one that passes them on.
    pub has_parameters: bool,
    /// `true` if a complete chunk is held until rank 0 releases the step. Such a job is synchronous and has
    /// parameters.
    pub two_phase: bool,
    /// In a job whose steps may end without some members: the condition that ends a chunk's step. Such a job is
    /// synchronous, has one phase, and is not reproducible. Among sites it holds at the chunks that this one owns.
    pub quorum: Option<Quorum>,
    /// The number of members that are there from the beginning, counted from member 0. Others may take the places of the
    /// rest while the job runs, in a job with the quorum [`Quorum::NotLost`], or when all [begin
    /// again](super::Exchange::rewind).
    pub first_members: u32,
    /// In a job that goes [back](super::Exchange::rewind) when a member is lost: the number of updates from one copy of
    /// a chunk to the next. Such a job is synchronous, has one site, and has no quorum.
    pub rewind_every: Option<u32>,
}

/// The members and sites that a chunk's sum involves. It may differ from chunk to chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkReach {
    /// The number of members that contribute to the chunk, counted from member 0.
    pub members: u32,
    /// The number of members, counted from member 0, that step together: an update needs the contributions of all of them.
    /// Every contribution of the others is an update of its own.
    pub together: u32,
    /// `true` if the sum goes on to a site above, or first to a standby.
    pub has_above: bool,
    /// `true` if sums in the order of members begin with the last member: a site whose ranks come before those here.
    pub site_first: bool,
}
