//! The memory that workers of this host share with their hub.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use paramhub_core::arena::ArenaLayout;
use paramhub_core::settings::Settings;
use paramhub_transport::shm::{RING_BYTES_DEFAULT, Segment, rings_bytes};

/// What a stream over shared memory works with.
#[derive(Clone, Debug)]
pub(crate) struct LocalMemory {
    pub(crate) rings: Arc<Segment>,
    pub(crate) arenas: RankArenas,
}

/// A rank's tensors.
#[derive(Clone, Debug)]
pub(crate) struct RankArenas {
    /// Its own: gradients, and parameters unless it reads the common ones.
    pub(crate) own: Arc<Segment>,
    pub(crate) layout: Arc<ArenaLayout>,
    /// Where it reads parameters in common with the other workers of this host, if it does.
    pub(crate) common: Option<CommonParameters>,
}

/// Parameters that all workers of a host read in one place.
#[derive(Clone, Debug)]
pub(crate) struct CommonParameters {
    pub(crate) segment: Arc<Segment>,
    pub(crate) layout: Arc<ArenaLayout>,
}

/// One job's shared memory.
pub(crate) struct JobMemory {
    layout: Arc<ArenaLayout>,
    common_layout: Arc<ArenaLayout>,
    /// Chunks of a key may be anywhere; the hub that writes the common parameters must have them all.
    is_only_hub: bool,
    /// Until every worker has contributed to the next step.
    stands_still: bool,
    /// Some keys travel as no arena holds them.
    quantises: bool,
    /// Of every rank here, one for all its streams.
    own: HashMap<u32, Arc<Segment>>,
    common: Option<Arc<Segment>>,
}

/// The system drops descriptors that a receiver has no numbers for, and says nothing.
fn wrong_descriptors(count: usize) -> String {
    let cause = if count < 2 {
        ": this hub's process may have none left; if so, raise its limit (ulimit -n, or LimitNOFILE= of its systemd unit)"
    } else {
        ""
    };
    format!("{count} descriptors came with it instead of 2{cause}")
}

impl JobMemory {
    /// `stands_still` is [`JobOptions::stands_still`](paramhub_core::service::JobOptions::stands_still).
    pub(crate) fn new(settings: &Settings, hubs: usize, stands_still: bool) -> Self {
        JobMemory {
            layout: Arc::new(ArenaLayout::new(settings)),
            common_layout: Arc::new(ArenaLayout::parameters_only(settings)),
            is_only_hub: hubs == 1,
            stands_still,
            quantises: settings.quantises(),
            own: HashMap::new(),
            common: None,
        }
    }

    /// Takes what a stream of `rank` brought, its arena and its rings, or says what is wrong with it.
    pub(crate) fn attach(
        &mut self,
        rank: u32,
        descriptors: Vec<OwnedFd>,
        shares_parameters: bool,
    ) -> Result<LocalMemory, String> {
        if self.quantises {
            return Err("some keys are quantised, and shared memory carries raw tensors: use TCP".into());
        }
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

    fn common(&mut self) -> Result<CommonParameters, String> {
        if !self.stands_still {
            let why = "parameters can be shared only in a synchronous job that waits for all workers, where they stand still \
                       between steps";
            return Err(why.into());
        }
        if !self.is_only_hub {
            return Err("parameters can be shared only where the job has a single hub".into());
        }
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
    /// What the worker maps to read common parameters.
    pub(crate) fn common_descriptor(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.arenas.common.as_ref().map(|common| common.segment.as_fd())
    }
}
