//! The tensors of the members on this host, in memory that member and hub can both reach.

use paramhub_core::chunk::Extent;
use paramhub_core::codec::Codec;
use paramhub_core::exchange::Answer;
use paramhub_kernels::Aggregator;
use paramhub_kernels::shared::Floats;

use super::layout::BLOCK_ELEMENTS;
use crate::local::{CommonParameters, RankArenas};

/// Contributions added up in one pass.
const SOURCES: usize = 8;

/// The arenas of one job's members, for one route. Only workers have arenas. A member's number is its place
/// among the workers that exchange here, and not its rank.
#[derive(Debug)]
pub(crate) struct Arenas {
    /// The arenas of each worker that exchanges here, if it has any.
    of_member: Vec<Option<RankArenas>>,
    /// The members that have an arena, ascending.
    members: Vec<u32>,
    /// The memory from which members of this host read parameters in common, if any does.
    common: Option<CommonParameters>,
    /// The contributions of the current chunk: member and place of each.
    sources: Vec<(u32, usize)>,
    /// The members to whose own arenas the current parameters go; empty between frames.
    targets: Vec<u32>,
}

impl Arenas {
    pub(crate) fn new(workers: u32) -> Self {
        let of_member = (0..workers).map(|_| None).collect();
        let (members, room) = (Vec::new(), workers as usize);
        let (sources, targets) = (Vec::with_capacity(room), Vec::with_capacity(room));
        Arenas { of_member, members, common: None, sources, targets }
    }

    /// Has `member` exchange through these arenas from now on. Returns `true` if they are the first that share
    /// parameters.
    pub(crate) fn attach(&mut self, member: u32, arenas: RankArenas) -> bool {
        let is_first = self.common.is_none() && arenas.common.is_some();
        if is_first {
            self.common.clone_from(&arenas.common);
        }
        self.of_member[member as usize] = Some(arenas);
        self.members.insert(self.members.partition_point(|&other| other < member), member);
        is_first
    }

    /// Has `member` exchange through no arena from now on. Returns its arenas, which take long to unmap if they are
    /// large.
    pub(crate) fn detach(&mut self, member: u32) -> Option<RankArenas> {
        self.members.retain(|&other| other != member);
        self.of_member[member as usize].take()
    }

    /// Returns whether tensors to and from a member stay in an arena; those of sites never do.
    pub(crate) fn has(&self, member: u32) -> bool {
        self.of_member.get(member as usize).is_some_and(Option::is_some)
    }

    /// Returns whether any member has an arena.
    pub(crate) fn has_any(&self) -> bool {
        !self.members.is_empty()
    }

    /// Finds the contributions to a chunk, of those members that have an arena and have contributed.
    pub(crate) fn find_sources(&mut self, extent: &Extent, has_contributed: impl Fn(u32) -> bool) {
        self.sources.clear();
        // A member without an arena has contributed over TCP, and that is in the sum already.
        for &member in self.members.iter().filter(|&&member| has_contributed(member)) {
            let arenas = self.of_member[member as usize].as_ref().expect("a listed member has an arena");
            self.sources.push((member, arenas.layout.gradient_chunk(extent)));
        }
    }

    /// Notes that there are no contributions to find.
    pub(crate) fn find_no_sources(&mut self) {
        self.sources.clear();
    }

    /// Sums a block of the contributions found, from their element `first` on, in the order of members. If it
    /// `adds`, it adds to `sum`; otherwise it overwrites it.
    pub(crate) fn gather(
        &self,
        aggregator: &dyn Aggregator,
        codec: Codec,
        first: usize,
        sum: &mut [f32],
        mut adds: bool,
    ) {
        if self.sources.is_empty() {
            return;
        }
        let at = first * codec.bytes();
        if codec != Codec::F32 {
            let mut wire = [0; BLOCK_ELEMENTS * Codec::F16.bytes()];
            for &(member, place) in &self.sources {
                let wire = &mut wire[..sum.len() * codec.bytes()];
                self.read(member, place + at, wire);
                match std::mem::replace(&mut adds, true) {
                    false => aggregator.assign(sum, wire, codec),
                    true => aggregator.add(sum, wire, codec),
                }
            }
            return;
        }
        for members in self.sources.chunks(SOURCES) {
            let mut sources = [Floats::NONE; SOURCES];
            for (source, &(member, place)) in sources.iter_mut().zip(members) {
                *source = self.of(member).own.floats(place + at, sum.len());
            }
            aggregator.gather(sum, adds, &sources[..members.len()]);
            adds = true;
        }
    }

    /// Notes that the current parameters must be written to the arena of `member`, if the answer has
    /// parameters and the member reads them there.
    pub(crate) fn aim(&mut self, member: u32, answer: Answer) {
        let own = self.of_member[member as usize].as_ref().filter(|arenas| arenas.common.is_none());
        if answer == Answer::Parameters && own.is_some() {
            self.targets.push(member);
        }
    }

    /// Returns whether any member is noted.
    pub(crate) fn has_targets(&self) -> bool {
        !self.targets.is_empty()
    }

    /// Number of places to which [`hand_out`](Self::hand_out) will write the current parameters.
    pub(crate) fn copies(&self, are_new: bool) -> usize {
        self.targets.len() + usize::from(are_new && self.common.is_some())
    }

    /// Notes that the current parameters have been written.
    pub(crate) fn forget_targets(&mut self) {
        self.targets.clear();
    }

    /// The start of a chunk's gradient in the arena of `member`.
    pub(crate) fn gradient_place(&self, member: u32, extent: &Extent) -> usize {
        self.of(member).layout.gradient_chunk(extent)
    }

    /// The start of a chunk's parameters in the arena of `member`.
    pub(crate) fn parameters_place(&self, member: u32, extent: &Extent) -> usize {
        self.of(member).layout.parameters_chunk(extent)
    }

    /// Copies bytes out of the arena of `member`.
    pub(crate) fn read(&self, member: u32, place: usize, wire: &mut [u8]) {
        self.of(member).own.read(place, wire);
    }

    /// Writes a piece of a chunk's parameters, from its element `first` on, to every noted member and, if
    /// they are new, to the common memory.
    pub(crate) fn hand_out(&self, extent: &Extent, first: usize, codec: Codec, wire: &[u8], are_new: bool) {
        let at = first * codec.bytes();
        for &member in &self.targets {
            let arenas = self.of(member);
            arenas.own.stream(arenas.layout.parameters_chunk(extent) + at, wire);
        }
        if let Some(common) = self.common.as_ref().filter(|_| are_new) {
            common.segment.stream(common.layout.parameters_chunk(extent) + at, wire);
        }
    }

    fn of(&self, member: u32) -> &RankArenas {
        self.of_member[member as usize].as_ref().expect("what lies in an arena has one")
    }
}
