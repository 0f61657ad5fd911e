//! The features that a job, a rank or a command can ask for, as far as they exclude others.

use std::fmt;
use std::str::FromStr;

/// Declares the features: each has an identifier for programs, and a name, which messages and the page use.
macro_rules! features {
    ($($variant:ident, $id:literal, $name:literal;)*) => {
        /// Something that a job, a rank or a command asks for, or a circumstance that it meets.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Feature {
            $(#[doc = $name] $variant,)*
        }

        impl Feature {
            /// All features.
            pub const ALL: &[Feature] = &[$(Feature::$variant),*];

            /// The identifier, in lower case with hyphens.
            pub const fn id(self) -> &'static str {
                match self { $(Feature::$variant => $id,)* }
            }

            /// The name for people, which can stand in a sentence as a noun.
            pub const fn name(self) -> &'static str {
                match self { $(Feature::$variant => $name,)* }
            }
        }
    };
}

features! {
    // Consistency, sum and optimizer.
    Asynchronous, "asynchronous", "asynchronous consistency";
    BoundedStaleness, "bounded-staleness", "bounded staleness";
    Reproducible, "reproducible", "`reproducible`";
    TwoPhase, "two-phase", "a step in two phases, as clipping by the global norm, LARS and LAMB need";
    RejectNonFinite, "reject-non-finite", "`reject_non_finite`";
    NoOptimizer, "no-optimizer", "the optimizer `mean` or `sum`";
    RegisteredOptimizer, "registered-optimizer", "an optimizer that is registered at hubs";
    WholeChunkOptimizer, "whole-chunk-optimizer", "an optimizer that takes whole chunks only";
    RegisteredAggregator, "registered-aggregator", "an aggregator other than `sum`";
    // Codecs.
    Quantised, "quantised", "quantised keys (`codec` is `one-bit`, `two-bit`, `int8` or another that is registered)";
    QuantisedCodec, "quantised-codec", "`one-bit` or `two-bit` as the codec of a job";
    NoMatrix, "no-matrix", "a job without keys of two dimensions";
    FactorCodec, "factor-codec", "`factor_codec`";
    // Schemes and layers.
    AutoScheme, "auto-scheme", "the scheme auto";
    Factors, "factors", "the scheme factors";
    FactorsToHub, "factors-to-hub", "the scheme factors-to-hub";
    FactorsInPyTorch, "factors-in-pytorch", "the scheme factors of a HubOptimizer";
    LayerWithoutFactors, "layer-without-factors", "a layer that is not fully connected";
    TiedLayer, "tied-layer", "a layer whose weight is tied";
    NoFullyConnectedLayer, "no-fully-connected-layer", "a job without fully connected layers";
    NoPeerAddress, "no-peer-address", "a worker that does not listen for the others";
    PythonPackage, "python-package", "the Python package";
    // Hubs of racks and hosts.
    SeveralSites, "several-sites", "hubs that serve racks or hosts";
    SitesByAuto, "sites-by-auto", "hubs of racks or hosts with the reduction auto";
    SitesInRingOrLine, "sites-in-ring-or-line", "hubs of racks or hosts that sum round a ring or along a line";
    SeveralHubs, "several-hubs", "several hubs";
    UnplacedHubs, "unplaced-hubs", "hubs of which none serves a rack or a host";
    FlatReduction, "flat-reduction", "the reduction flat";
    HierarchicalReduction, "hierarchical-reduction", "the reduction tree, ring, sharded or line";
    OptimizerAtOwner, "optimizer-at-owner", "an optimizer at the owners (`optimize_at`)";
    RoundedSums, "rounded-sums", "`between_sites` other than f32";
    // A job's policies.
    ContinuesOverInterfaces, "continues-over-interfaces", "`on_interface_down = continue`";
    RedialGrace, "redial-grace", "a `redial_grace` other than 0.5 and 0";
    LateLeftOut, "late-left-out", "`stragglers` other than wait";
    Replicas, "replicas", "`replicas`";
    MaxHubs, "max-hubs", "`max_hubs`";
    HubLabel, "hub-label", "`hub_label`";
    ContinuesWithoutWorkers, "continues-without-workers", "`on_worker_loss = continue`";
    Rewinds, "rewinds", "`on_worker_loss = rewind`";
    RewindsByCopies, "rewinds-by-copies", "`on_worker_loss = rewind` without `checkpoint_every`";
    NoRewind, "no-rewind", "`on_worker_loss` other than rewind";
    FailsWithWorkers, "fails-with-workers", "`on_worker_loss = fail`";
    MinWorkers, "min-workers", "`min_workers`";
    Elastic, "elastic", "`max_workers` above the number of workers that it begins with";
    RewindEvery, "rewind-every", "`rewind_every`";
    Linger, "linger", "`linger`";
    SavesProgramStates, "saves-program-states", "`program_state_bytes`";
    EncryptedStreams, "encrypted-streams", "`encrypt`";
    ProgressTimeout, "progress-timeout", "`progress_timeout`";
    Weight, "weight", "`weight`";
    CheckpointEvery, "checkpoint-every", "`checkpoint_every`";
    CheckpointEverySteps, "checkpoint-every-steps", "`checkpoint_every` in steps";
    CheckpointEverySeconds, "checkpoint-every-seconds", "`checkpoint_every` in seconds";
    Resume, "resume", "`resume`";
    NoHubs, "no-hubs", "a job for 0 hubs";
    // Hubs' folders for checkpoints.
    CheckpointFolder, "checkpoint-folder", "`--checkpoints`";
    NoCheckpointFolder, "no-checkpoint-folder", "a hub without a folder for checkpoints";
    CheckpointsKept, "checkpoints-kept", "`--checkpoint-keep`";
    // A worker's own options.
    Tcp, "tcp", "the transport tcp";
    SharedMemory, "shared-memory", "the transport shm";
    SharedParameters, "shared-parameters", "shared parameters";
    SocketBuffers, "socket-buffers", "a size of socket buffers";
    WorkerInterfaces, "worker-interfaces", "a choice of interfaces (`interfaces`)";
    OnlySharedMemory, "only-shared-memory", "the transport shm for all workers";
    // The values of `train --exchange`, and the kinds of key-value stores.
    ExchangeHub, "exchange-hub", "the exchange hub";
    ExchangeLocal, "exchange-local", "the exchange local";
    ExchangeFunnel, "exchange-funnel", "the exchange funnel";
    ExchangeConcom, "exchange-concom", "the exchange concom";
    ExchangeDepcha, "exchange-depcha", "the exchange depcha";
    ChosenConsistency, "chosen-consistency", "`consistency`";
    ChosenScheme, "chosen-scheme", "`scheme`";
    ChosenCodec, "chosen-codec", "`codec`";
    ChosenReduction, "chosen-reduction", "`reduction`";
    ChosenTransport, "chosen-transport", "`transport`";
    ChunkBytes, "chunk-bytes", "`chunk_bytes`";
    ComputeThreads, "compute-threads", "`--compute-threads`";
    CheckedCollectives, "checked-collectives", "checked collectives (`check`)";
    Trace, "trace", "`--trace`";
    OutstandingKeys, "outstanding-keys", "`outstanding`";
    Communicator, "communicator", "a communicator";
    HubMembership, "hub-membership", "a membership in a job of hubs";
    Momentum, "momentum", "`--momentum`";
    AdamOptimizer, "adam-optimizer", "the optimizer adam or adamw";
    Chaos, "chaos", "`--chaos`";
    ChaosSeed, "chaos-seed", "`--chaos-seed`";
    NoChaos, "no-chaos", "a missing `--chaos`";
    // Launchers and hubs' processes.
    DeploymentCc, "deployment-cc", "`--deployment cc`";
    DeploymentCs, "deployment-cs", "`--deployment cs`";
    DeploymentNcc, "deployment-ncc", "`--deployment ncc`";
    DeploymentNcs, "deployment-ncs", "`--deployment ncs`";
    HubCount, "hub-count", "`--hubs`";
    HubCores, "hub-cores", "`--cores`";
    OwnHub, "own-hub", "a missing `--hub URL`";
    RunningHub, "running-hub", "a hub that runs already";
    JobName, "job-name", "`--name`";
    JoinsRunningJob, "joins-running-job", "`--join`";
    RunsMaxWorkers, "runs-max-workers", "`--max-workers` of `paramhub run`";
    UnnamedJob, "unnamed-job", "a missing `--name`";
    Workers, "workers", "`--workers`";
    MaxRestarts, "max-restarts", "`--max-restarts`";
    SeveralHosts, "several-hosts", "`--hosts` above 1";
    OneHost, "one-host", "a single host";
    HostRank, "host-rank", "`--host-rank` above 0";
    NoHostRank, "no-host-rank", "a missing `--host-rank`";
    StartedByRun, "started-by-run", "ranks that `paramhub run` starts";
    StartedByMpi, "started-by-mpi", "ranks that `mpirun` starts";
    JoinedManager, "joined-manager", "a hub that joins a running connection manager";
    ManagerAddress, "manager-address", "an address for the hub's own connection manager";
    HubState, "hub-state", "`--state`";
    ManagerTls, "manager-tls", "`--plain-http` or an option that begins with `--tls`";
    HubDeadAfter, "hub-dead-after", "`--hub-dead-after`";
    CoreRate, "core-rate", "`--core-rate`";
    HubInterfaces, "hub-interfaces", "`--interfaces` of a hub";
    FixedAddresses, "fixed-addresses", "a hub that listens on given addresses only, or has `--advertise`";
}

impl FromStr for Feature {
    type Err = String;

    fn from_str(id: &str) -> Result<Self, String> {
        let found = Feature::ALL.iter().copied().find(|feature| feature.id() == id);
        found.ok_or_else(|| format!("there is no feature `{id}`"))
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A set of features.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Features(u128);

// Each feature is a bit.
const _: () = assert!(Feature::ALL.len() <= u128::BITS as usize);

impl Features {
    /// No feature.
    pub const NONE: Features = Features(0);

    /// The features whose condition holds.
    pub fn of<const N: usize>(conditions: [(Feature, bool); N]) -> Features {
        conditions.into_iter().filter_map(|(feature, is_asked)| is_asked.then_some(feature)).collect()
    }

    /// Returns whether the set has `feature`.
    pub const fn has(self, feature: Feature) -> bool {
        self.0 & (1 << feature as u32) != 0
    }

    /// The features of both sets.
    #[must_use]
    pub const fn and(self, others: Features) -> Features {
        Features(self.0 | others.0)
    }

    /// The set with one more feature.
    #[must_use]
    pub const fn with(self, feature: Feature) -> Features {
        Features(self.0 | 1 << feature as u32)
    }

    /// The features of the set, in the order of their declaration.
    pub fn iter(self) -> impl Iterator<Item = Feature> {
        Feature::ALL.iter().copied().filter(move |&feature| self.has(feature))
    }
}

impl FromIterator<Feature> for Features {
    fn from_iter<I: IntoIterator<Item = Feature>>(features: I) -> Self {
        features.into_iter().fold(Features::NONE, Features::with)
    }
}

impl fmt::Debug for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}
