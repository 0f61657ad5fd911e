//! The tensors of ranks on this host, where both sides can reach them.

use paramhub_core::chunk::Extent;
use paramhub_core::codec::Codec;
use paramhub_core::exchange::Answer;
use paramhub_kernels::Aggregator;
use paramhub_kernels::shared::Floats;

use super::plan::BLOCK_ELEMENTS;
use crate::local::{CommonParameters, RankArenas};

/// Contributions added up in one pass.
const SOURCES: usize = 8;

/// The arenas of one job's ranks, as one route sees them.
#[derive(Debug)]
pub(crate) struct Arenas {
    of_rank: Vec<Option<RankArenas>>,
    /// Ranks that have one, ascending.
    ranks: Vec<u32>,
    /// Where ranks of this host read parameters in common, if any does.
    common: Option<CommonParameters>,
    /// Of the contributions at hand: rank and place.
    sources: Vec<(u32, usize)>,
    /// Ranks in whose own arenas the parameters at hand belong; empty between frames.
    targets: Vec<u32>,
}

impl Arenas {
    pub(crate) fn new(workers: u32) -> Self {
        let of_rank = (0..workers).map(|_| None).collect();
        let (ranks, room) = (Vec::new(), workers as usize);
        let (sources, targets) = (Vec::with_capacity(room), Vec::with_capacity(room));
        Arenas { of_rank, ranks, common: None, sources, targets }
    }

    /// From now on `rank` exchanges through these; `true` if they are the first that share parameters.
    pub(crate) fn attach(&mut self, rank: u32, arenas: RankArenas) -> bool {
        let is_first = self.common.is_none() && arenas.common.is_some();
        if is_first {
            self.common.clone_from(&arenas.common);
        }
        self.of_rank[rank as usize] = Some(arenas);
        self.ranks.insert(self.ranks.partition_point(|&other| other < rank), rank);
        is_first
    }

    /// Whether tensors to and from `rank` stay in an arena.
    pub(crate) fn has(&self, rank: u32) -> bool {
        self.of_rank[rank as usize].is_some()
    }

    /// Whether any rank has one.
    pub(crate) fn has_any(&self) -> bool {
        !self.ranks.is_empty()
    }

    /// Finds where the contributions to a chunk lie: of every rank that has an arena, or of the `only` one.
    pub(crate) fn find_sources(&mut self, extent: &Extent, only: Option<u32>) {
        self.sources.clear();
        // Of one rank alone that came over TCP, everything is in the sum already.
        for &rank in self.ranks.iter().filter(|&&rank| only.is_none_or(|only| only == rank)) {
            let arenas = self.of_rank[rank as usize].as_ref().expect("a listed rank has an arena");
            self.sources.push((rank, arenas.layout.gradient_chunk(extent)));
        }
    }

    /// There is nothing to be found.
    pub(crate) fn find_no_sources(&mut self) {
        self.sources.clear();
    }

    /// Sums a block of the contributions found, from their element `first` on, in rank order; it `adds` to what is in `sum`
    /// or begins it.
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
            for &(rank, place) in &self.sources {
                let wire = &mut wire[..sum.len() * codec.bytes()];
                self.read(rank, place + at, wire);
                match std::mem::replace(&mut adds, true) {
                    false => aggregator.assign(sum, wire, codec),
                    true => aggregator.add(sum, wire, codec),
                }
            }
            return;
        }
        for ranks in self.sources.chunks(SOURCES) {
            let mut sources = [Floats::NONE; SOURCES];
            for (source, &(rank, place)) in sources.iter_mut().zip(ranks) {
                *source = self.of(rank).own.floats(place + at, sum.len());
            }
            aggregator.gather(sum, adds, &sources[..ranks.len()]);
            adds = true;
        }
    }

    /// Notes that the parameters at hand are to be written to the arena of `rank`, if they answer it and it reads them
    /// there.
    pub(crate) fn aim(&mut self, rank: u32, answer: Answer) {
        let own = self.of_rank[rank as usize].as_ref().filter(|arenas| arenas.common.is_none());
        if answer == Answer::Parameters && own.is_some() {
            self.targets.push(rank);
        }
    }

    /// Whether any rank was aimed at.
    pub(crate) fn has_targets(&self) -> bool {
        !self.targets.is_empty()
    }

    /// Places that [`hand_out`](Self::hand_out) will write the parameters at hand to.
    pub(crate) fn copies(&self, are_new: bool) -> usize {
        self.targets.len() + usize::from(are_new && self.common.is_some())
    }

    /// The parameters at hand are where they belong.
    pub(crate) fn forget_targets(&mut self) {
        self.targets.clear();
    }

    /// Where the gradient of a chunk starts in the arena of `rank`.
    pub(crate) fn gradient_place(&self, rank: u32, extent: &Extent) -> usize {
        self.of(rank).layout.gradient_chunk(extent)
    }

    /// Where the parameters of a chunk start in the arena of `rank`.
    pub(crate) fn parameters_place(&self, rank: u32, extent: &Extent) -> usize {
        self.of(rank).layout.parameters_chunk(extent)
    }

    /// Copies bytes out of the arena of `rank`.
    pub(crate) fn read(&self, rank: u32, place: usize, wire: &mut [u8]) {
        self.of(rank).own.read(place, wire);
    }

    /// Writes a piece of a chunk of the parameters, from its element `first` on, to every rank aimed at, and to the common
    /// place where they are new.
    pub(crate) fn hand_out(&self, extent: &Extent, first: usize, codec: Codec, wire: &[u8], are_new: bool) {
        let at = first * codec.bytes();
        for &rank in &self.targets {
            let arenas = self.of(rank);
            arenas.own.stream(arenas.layout.parameters_chunk(extent) + at, wire);
        }
        if let Some(common) = self.common.as_ref().filter(|_| are_new) {
            common.segment.stream(common.layout.parameters_chunk(extent) + at, wire);
        }
    }

    fn of(&self, rank: u32) -> &RankArenas {
        self.of_rank[rank as usize].as_ref().expect("what lies in an arena has one")
    }
}
