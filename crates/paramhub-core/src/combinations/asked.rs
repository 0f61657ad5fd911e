//! The features that a job's settings, options and hubs ask for.

use std::time::Duration;

use super::{Conflict, Feature, Features, check, conflict_of};
use crate::checkpoint::Every;
use crate::composition::{BetweenSites, Composition, Crossing, OptimizeAt, Reduction};
use crate::consistency::Consistency;
use crate::key::Key;
use crate::limits::REDIAL_GRACE_S;
use crate::resuming::ResumeTerms;
use crate::scheme::{LayerKind, LayerSettings, Plan, Scheme, SchemeChoice};
use crate::service::{JobOptions, JobPlan, OnWorkerLoss};
use crate::settings::{Settings, is_built_in};

impl Settings {
    /// The features of the job as a whole. Those of a scheme are not among them, because layers have schemes
    /// of their own.
    pub fn features(&self) -> Features {
        let for_matrices = self.codec.filter(|codec| !codec.is_for_shape(&[]));
        let is_for = |key: &Key| for_matrices.is_some_and(|codec| codec.is_for_shape(&key.shape));
        Features::of([
            (Feature::Asynchronous, self.consistency == Consistency::Asynchronous),
            (Feature::BoundedStaleness, matches!(self.consistency, Consistency::BoundedStaleness(_))),
            (Feature::Reproducible, self.reproducible),
            (Feature::TwoPhase, self.is_two_phase()),
            (Feature::RejectNonFinite, self.reject_non_finite),
            (Feature::NoOptimizer, !self.has_parameters()),
            (Feature::RegisteredOptimizer, !is_built_in(&self.optimizer.name)),
            (Feature::RegisteredAggregator, self.aggregator != "sum"),
            (Feature::Quantised, self.quantises()),
            (Feature::QuantisedCodec, for_matrices.is_some()),
            (Feature::NoMatrix, for_matrices.is_some() && !self.keys.keys().iter().any(is_for)),
        ])
    }

    /// Refuses settings that do not combine with one another or with `others`. A conflict about quantised
    /// keys names the first one.
    ///
    /// # Errors
    /// The first conflict.
    pub fn check_with(&self, others: Features) -> Result<(), Conflict> {
        check(self.features().and(others)).map_err(|conflict| match self.quantised_keys().next() {
            Some((key, codec)) if conflict.involves(Feature::Quantised) => {
                conflict.about(format!("key `{}` ({codec})", key.name))
            }
            _ => conflict,
        })
    }

    /// Refuses schemes, of the job or of its layers, that do not combine with the settings or with `others`. A
    /// conflict about a layer names it.
    ///
    /// # Errors
    /// The first conflict.
    pub fn check_schemes_with(&self, others: Features) -> Result<(), Conflict> {
        let asked = self.features().and(others);
        if let Some(conflict) = self.scheme.feature().and_then(|scheme| conflict_of(scheme, asked)) {
            return Err(conflict);
        }
        let of_layer = |layer: &LayerSettings| {
            let conflict = conflict_of(layer.scheme?.feature()?, asked)?;
            Some(conflict.about(format!("layer `{}`", layer.name)))
        };
        self.layers.iter().find_map(of_layer).map_or(Ok(()), Err)
    }
}

impl LayerSettings {
    /// The features of the layer itself.
    pub fn features(&self) -> Features {
        Features::of([
            (Feature::LayerWithoutFactors, self.kind == LayerKind::Other),
            (Feature::TiedLayer, self.tied),
            (Feature::FactorCodec, self.factor_codec.is_some()),
        ])
    }
}

impl Scheme {
    /// The feature of a layer that is exchanged by the scheme; `None` for the hub, which combines with all.
    pub fn feature(self) -> Option<Feature> {
        match self {
            Scheme::Hub => None,
            Scheme::Factors => Some(Feature::Factors),
            Scheme::FactorsToHub => Some(Feature::FactorsToHub),
        }
    }
}

impl SchemeChoice {
    /// The feature of a job or a layer that chooses so; `None` for the hub.
    pub fn feature(self) -> Option<Feature> {
        match self {
            SchemeChoice::Auto => Some(Feature::AutoScheme),
            SchemeChoice::Only(scheme) => scheme.feature(),
        }
    }
}

impl JobOptions {
    /// The features of the options.
    pub fn features(&self) -> Features {
        features_of_reduction(self.reduction, self.optimize_at, self.between_sites).and(Features::of([
            (Feature::ContinuesOverInterfaces, self.continues()),
            (Feature::RedialGrace, self.redial_grace_s != 0.0 && self.redial_grace_s != REDIAL_GRACE_S),
            (Feature::LateLeftOut, self.stragglers.leaves_out()),
            (Feature::Replicas, self.has_standbys()),
            (Feature::MaxHubs, self.max_hubs.is_some()),
            (Feature::HubLabel, self.hub_label.is_some()),
            (Feature::ContinuesWithoutWorkers, self.on_worker_loss == OnWorkerLoss::Continue),
            (Feature::Rewinds, self.rewinds()),
            (Feature::RewindsByCopies, self.rewinds() && !self.outlives_hubs()),
            (Feature::NoRewind, !self.rewinds()),
            (Feature::FailsWithWorkers, !self.outlives_workers()),
            (Feature::MinWorkers, self.min_workers != JobOptions::default().min_workers),
            (Feature::Elastic, self.start_workers.is_some()),
            (Feature::RewindEvery, self.rewind_every != JobOptions::default().rewind_every),
            (Feature::Linger, self.linger_s != JobOptions::default().linger_s),
            (Feature::SavesProgramStates, self.program_state_bytes > 0),
            (Feature::EncryptedStreams, self.encrypt),
            (Feature::ProgressTimeout, self.progress_timeout_s.is_some()),
            (Feature::Weight, self.weight != JobOptions::default().weight),
            (Feature::CheckpointEvery, self.checkpoint_every.is_some()),
            (Feature::CheckpointEverySteps, matches!(self.checkpoint_every, Some(Every::Steps(_)))),
            (Feature::CheckpointEverySeconds, matches!(self.checkpoint_every, Some(Every::Seconds(_)))),
            (Feature::Resume, self.resume.is_some()),
            (Feature::NoHubs, self.hubs == Some(0)),
        ]))
    }
}

impl ResumeTerms {
    /// Which streams of a job are opened again. `job` are the features of its settings, its options and its hubs, and
    /// `schemes` is the plan of its layers. By default streams are dialled again where a job could
    /// [ask for it](Feature::RedialGrace).
    pub fn of(options: &JobOptions, job: Features, schemes: &Plan) -> ResumeTerms {
        let schemes = schemes.layers.iter().filter_map(|planned| planned.scheme.feature());
        let whole = schemes.fold(job, Features::with);
        let is_exact = conflict_of(Feature::RedialGrace, whole).is_none();
        let redial_grace = if is_exact { options.redial_grace() } else { Duration::ZERO };
        ResumeTerms { redial_grace, moves: options.continues(), has_standbys: options.has_standbys() }
    }
}

/// The features of a reduction, of the place where the optimizer runs, and of the encoding of sums between sites.
pub fn features_of_reduction(
    reduction: Reduction,
    optimize_at: OptimizeAt,
    between_sites: BetweenSites,
) -> Features {
    let is_hierarchical = match reduction {
        Reduction::Auto | Reduction::Flat => false,
        Reduction::Tree | Reduction::Ring | Reduction::Sharded | Reduction::Line => true,
    };
    Features::of([
        (Feature::FlatReduction, reduction == Reduction::Flat),
        (Feature::HierarchicalReduction, is_hierarchical),
        (Feature::OptimizerAtOwner, optimize_at == OptimizeAt::Owner),
        (Feature::RoundedSums, between_sites != BetweenSites::F32),
    ])
}

impl Composition {
    /// The features of the hubs that serve a job.
    pub fn features(&self) -> Features {
        let hubs: usize = self.sites.iter().map(|site| site.hubs.len()).sum();
        Features::of([
            (Feature::SeveralSites, !self.is_flat()),
            (Feature::SitesInRingOrLine, self.crossing != Crossing::Sharded && self.tops().len() > 1),
            (Feature::SeveralHubs, hubs > 1),
        ])
    }
}

/// Refuses a job whose settings, options, hubs and schemes do not combine. `schemes` is the plan of its
/// layers. The settings must have been checked.
///
/// # Errors
/// The first conflict.
pub fn check_job(job: &JobPlan, schemes: &Plan) -> Result<(), Conflict> {
    let is_unasked = job.options.reduction == Reduction::Auto && !job.composition.is_flat();
    let hubs = job.composition.features().and(Features::of([(Feature::SitesByAuto, is_unasked)]));
    let options = job.options.features();
    job.settings.check_with(options.and(hubs))?;
    job.settings.check_schemes_with(hubs)?;
    let whole = job.settings.features().and(options).and(hubs);
    for planned in &schemes.layers {
        let conflict = planned.scheme.feature().and_then(|scheme| conflict_of(scheme, whole));
        if let Some(conflict) = conflict {
            let (layer, scheme) = (&planned.layer.name, planned.scheme);
            return Err(conflict.about(format!("layer `{layer}` goes by {scheme}")));
        }
    }
    Ok(())
}
