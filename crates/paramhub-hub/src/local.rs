//! The memory that workers of this host share with their hub.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use paramhub_core::arena::ArenaLayout;
use paramhub_core::combinations::{Feature, Features, conflict_of};
use paramhub_core::settings::Settings;
use paramhub_transport::shm::{RING_BYTES_DEFAULT, Segment, rings_bytes};

/// The memory of a stream over shared memory.
#[derive(Clone, Debug)]
pub(crate) struct LocalMemory {
    pub(crate) rings: Arc<Segment>,
    pub(crate) arenas: RankArenas,
}

/// The arenas of a rank.
#[derive(Clone, Debug)]
pub(crate) struct RankArenas {
    /// Its own arena: gradients, and parameters unless it reads the common ones.
    pub(crate) own: Arc<Segment>,
    pub(crate) layout: Arc<ArenaLayout>,
    /// The memory where it reads parameters in common with the other workers of this host, if it does.
    pub(crate) common: Option<CommonParameters>,
}

/// Parameters that all workers of a host read from the same memory.
#[derive(Clone, Debug)]
pub(crate) struct CommonParameters {
    pub(crate) segment: Arc<Segment>,
    pub(crate) layout: Arc<ArenaLayout>,
}

/// One job's shared memory.
pub(crate) struct JobMemory {
    layout: Arc<ArenaLayout>,
    common_layout: Arc<ArenaLayout>,
    /// The features of the job at this site, with which shared memory and shared parameters must combine.
    job: Features,
    /// The arena of each rank here, one for all its streams.
    own: HashMap<u32, Arc<Segment>>,
    common: Option<Arc<Segment>>,
}

/// The message about a wrong number of descriptors. The system drops descriptors without notice if the
/// receiver has no numbers left for them.
fn wrong_descriptors(count: usize) -> String {
    let cause = if count < 2 {
        ": this hub's process may have none left; if so, raise its limit (ulimit -n, or LimitNOFILE= of its systemd unit)"
    } else {
        ""
    };
    format!("{count} descriptors came with it instead of 2{cause}")
}

impl JobMemory {
    /// `job` has the features of the job's settings and options, and of the site's hubs.
    pub(crate) fn new(settings: &Settings, job: Features) -> Self {
        JobMemory {
            layout: Arc::new(ArenaLayout::new(settings)),
            common_layout: Arc::new(ArenaLayout::parameters_only(settings)),
            job,
            own: HashMap::new(),
            common: None,
        }
    }

    /// Takes the arena and the rings that a stream of `rank` sent, or returns what is wrong with them.
    pub(crate) fn attach(
        &mut self,
        rank: u32,
        descriptors: Vec<OwnedFd>,
        shares_parameters: bool,
    ) -> Result<LocalMemory, String> {
        let [arena, rings] =
            <[OwnedFd; 2]>::try_from(descriptors).map_err(|found| wrong_descriptors(found.len()))?;
        let rings = Segment::adopt(rings, rings_bytes(RING_BYTES_DEFAULT))
            .map_err(|error| format!("its rings cannot be used: {error}"))?;
        let arena = Segment::adopt(arena, self.layout.bytes() as usize)
            .map_err(|error| format!("its arena cannot be used: {error}"))?;
        let own = match self.own.get(&rank) {
            Some(own) if own.identity() == arena.identity() => own.clone(),
            Some(_) => return Err("its streams bring different arenas".into()),
            None => self.own.entry(rank).or_insert(Arc::new(arena)).clone(),
        };
        let common = if shares_parameters { Some(self.common()?) } else { None };
        let arenas = RankArenas { own, layout: self.layout.clone(), common };
        Ok(LocalMemory { rings: Arc::new(rings), arenas })
    }

    /// Forgets the arena of a rank whose process is lost: another process brings its own.
    pub(crate) fn forget(&mut self, rank: u32) {
        self.own.remove(&rank);
    }

    /// Refuses shared parameters if the job does not combine with them.
    pub(crate) fn check_sharing(&self) -> Result<(), String> {
        conflict_of(Feature::SharedParameters, self.job).map_or(Ok(()), |conflict| Err(conflict.to_string()))
    }

    fn common(&mut self) -> Result<CommonParameters, String> {
        self.check_sharing()?;
        let segment = match &self.common {
            Some(segment) => segment.clone(),
            None => {
                let segment = Segment::create("paramhub-parameters", self.common_layout.bytes() as usize);
                let sealed = segment.and_then(|segment| segment.seal_writing().map(|()| Arc::new(segment)));
                let segment = sealed.map_err(|error| format!("the hub has no memory to share: {error}"))?;
                self.common.insert(segment).clone()
            }
        };
        Ok(CommonParameters { segment, layout: self.common_layout.clone() })
    }
}

impl LocalMemory {
    /// The descriptor of the common parameters, for the worker to map.
    pub(crate) fn common_descriptor(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.arenas.common.as_ref().map(|common| common.segment.as_fd())
    }
}
