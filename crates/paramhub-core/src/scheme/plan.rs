//! The plan states how each layer of a job is exchanged, why, and what traffic that makes. Every node
//! computes the same plan.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{
    Cluster, ElementBytes, HubPlace, Layer, LayerSettings, LinkBytes, Scheme, SchemeChoice, Traffic,
};
use crate::codec::Codec;
use crate::combinations::{Feature, Features, conflict_of, reason};
use crate::key::{Key, elements_of};
use crate::placement::Spread;
use crate::settings::Settings;

/// The schemes of all layers of a job on its cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Plan {
    /// The cluster of the plan; the encoding in it does not apply, because each layer has its own.
    pub cluster: Cluster,
    /// The layers, in the order of [`Settings::layers`].
    pub layers: Vec<PlannedLayer>,
    /// All keys that are in no layer, together; `None` if every key is in a layer.
    pub rest: Option<PlannedLayer>,
}

/// One layer of a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PlannedLayer {
    /// The layer's name and form.
    pub layer: Layer,
    /// Its keys, by their positions in the table: for a fully connected layer the weight, then the bias if it
    /// has one. Empty for the keys that are in no layer.
    pub keys: Vec<u32>,
    /// The scheme that exchanges it.
    pub scheme: Scheme,
    /// The reason why this scheme was chosen.
    pub why: Why,
    /// The way in which its numbers are encoded.
    pub encoding: ElementBytes,
}

/// The reason why a layer is exchanged by its scheme, or cannot be exchanged by the one that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// The settings ask for it.
    Asked,
    /// The scheme costs least.
    Cheapest,
    /// The layer's gradient has no factors.
    NoFactors,
    /// Another part of the model uses the weight, too.
    Tied,
    /// Steps do not end for all workers at once.
    NotSynchronous,
    /// The step waits for the norm of the whole gradient.
    TwoPhase,
    /// The aggregator is one that only hubs have.
    Aggregator,
    /// The optimizer is one that only hubs have.
    Optimizer,
    /// Hubs serve racks or hosts.
    SeveralSites,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Why::Asked => "as asked",
            Why::Cheapest => "it moves least over the busiest link",
            // Factors between ranks need no hub, but what they cost among sites is unknown.
            Why::SeveralSites => reason(Feature::FactorsToHub, Feature::SeveralSites),
            other => other.obstacle().map_or("", |obstacle| reason(Feature::Factors, obstacle)),
        })
    }
}

impl Why {
    /// The feature that keeps a layer from being exchanged by its factors; `None` if nothing does.
    fn obstacle(self) -> Option<Feature> {
        Why::OBSTACLES.iter().find(|(why, _)| *why == self).map(|(_, features)| features[0])
    }

    /// Returns the reason why a layer cannot be exchanged by a scheme that conflicts with `obstacle`.
    fn of(obstacle: Feature) -> Why {
        let found = Why::OBSTACLES.iter().find(|(_, features)| features.contains(&obstacle));
        found.map(|(why, _)| *why).expect("every obstacle to factors has a reason")
    }

    /// The reasons that the table of [combinations] gives.
    ///
    /// [combinations]: crate::combinations
    const OBSTACLES: [(Why, &[Feature]); 7] = [
        (Why::NoFactors, &[Feature::LayerWithoutFactors]),
        (Why::Tied, &[Feature::TiedLayer]),
        (Why::NotSynchronous, &[Feature::Asynchronous, Feature::BoundedStaleness]),
        (Why::TwoPhase, &[Feature::TwoPhase]),
        (Why::Aggregator, &[Feature::RegisteredAggregator]),
        (Why::Optimizer, &[Feature::RegisteredOptimizer]),
        (Why::SeveralSites, &[Feature::SeveralSites]),
    ];
}

impl Plan {
    /// The layers that go by `scheme`, in the plan's order. `settings` must be those that the plan was made
    /// from.
    pub fn going_by<'a>(
        &'a self,
        scheme: Scheme,
        settings: &'a Settings,
    ) -> impl Iterator<Item = (&'a PlannedLayer, &'a LayerSettings)> {
        self.layers.iter().zip(&settings.layers).filter(move |(planned, _)| planned.scheme == scheme)
    }

    /// Plans a job. The settings must have been checked.
    pub fn new(settings: &Settings, cluster: &Cluster) -> Plan {
        let keys = settings.keys.keys();
        let mut listed = vec![false; if settings.layers.is_empty() { 0 } else { keys.len() }];
        let mut layers = Vec::with_capacity(settings.layers.len());
        for layer in &settings.layers {
            layer.keys.iter().for_each(|&key| listed[key as usize] = true);
            let key = &keys[layer.keys[0] as usize];
            let encoding =
                ElementBytes { factor: bytes(layer.factor_codec(keys)), ..encoding(settings, key) };
            let costed = layer.layer(keys);
            let (scheme, why) = choose(settings, &Cluster { encoding, ..*cluster }, layer, &costed);
            let encoding = match scheme {
                // The key's codec is for gradients, and no gradient travels here; nor is there a change of
                // the parameters to quantise.
                Scheme::FactorsToHub => ElementBytes { parameter: bytes(key.dtype.codec()), ..encoding },
                Scheme::Hub | Scheme::Factors => encoding,
            };
            layers.push(PlannedLayer { layer: costed, keys: layer.keys.clone(), scheme, why, encoding });
        }
        let unlisted: Vec<usize> =
            (0..keys.len()).filter(|&key| !listed.get(key).copied().unwrap_or(false)).collect();
        let rest = unlisted.first().map(|&first| {
            let parameters = unlisted.iter().map(|&key| elements_of(&keys[key])).sum();
            let name = match unlisted.len() {
                1 => "1 other key".to_owned(),
                count if settings.layers.is_empty() => format!("{count} keys"),
                count => format!("{count} other keys"),
            };
            PlannedLayer {
                layer: Layer::other(&name, parameters),
                keys: Vec::new(),
                scheme: Scheme::Hub,
                why: Why::NoFactors,
                encoding: encoding(settings, &keys[first]),
            }
        });
        Plan { cluster: *cluster, layers, rest }
    }

    /// A layer, by its name.
    pub fn layer(&self, name: &str) -> Option<&PlannedLayer> {
        self.layers.iter().find(|planned| planned.layer.name == name)
    }

    /// All layers, then the keys that are in no layer.
    pub fn rows(&self) -> impl Iterator<Item = &PlannedLayer> {
        self.layers.iter().chain(&self.rest)
    }

    /// Returns whether everything goes through the hubs.
    pub fn is_hub_only(&self) -> bool {
        self.layers.iter().all(|planned| planned.scheme == Scheme::Hub)
    }

    /// Bytes that the exchange of one layer by `scheme` puts on the machines; `None` if the scheme cannot
    /// exchange it.
    pub fn traffic(&self, planned: &PlannedLayer, scheme: Scheme) -> Option<Traffic> {
        Cluster { encoding: planned.encoding, ..self.cluster }.traffic(&planned.layer, scheme)
    }

    /// Does the same as [`Self::traffic`], in numbers instead of bytes: parameters moved, as the paper counts
    /// them.
    pub fn numbers(&self, planned: &PlannedLayer, scheme: Scheme) -> Option<Traffic> {
        Cluster { encoding: ElementBytes::NUMBERS, ..self.cluster }.traffic(&planned.layer, scheme)
    }

    /// Returns the time that the planned exchange of one layer keeps the busiest link busy, in bytes of a
    /// worker's link.
    pub fn cost(&self, planned: &PlannedLayer) -> f64 {
        self.traffic(planned, planned.scheme).map_or(0.0, |traffic| self.cluster.busiest(&traffic))
    }

    /// Bytes of a whole step as planned.
    pub fn total(&self) -> Traffic {
        self.sum(|planned| self.traffic(planned, planned.scheme))
    }

    /// Bytes of a whole step in which every layer goes through the hubs.
    pub fn total_by_hub(&self) -> Traffic {
        self.sum(|planned| self.traffic(planned, Scheme::Hub))
    }

    /// Numbers of a whole step as planned.
    pub fn total_numbers(&self) -> Traffic {
        self.sum(|planned| self.numbers(planned, planned.scheme))
    }

    /// Numbers of a whole step in which every layer goes through the hubs.
    pub fn total_numbers_by_hub(&self) -> Traffic {
        self.sum(|planned| self.numbers(planned, Scheme::Hub))
    }

    /// Returns the time that a step keeps the busiest link busy, as planned and through the hubs, in bytes of
    /// a worker's link.
    pub fn costs(&self) -> (f64, f64) {
        (self.cluster.busiest(&self.total()), self.cluster.busiest(&self.total_by_hub()))
    }

    /// Returns the way in which the chunks of each key are dealt to the hubs; empty if all keys go through
    /// the hubs in the same way.
    pub fn spreads(&self, keys: usize) -> Vec<Spread> {
        if self.is_hub_only() {
            return Vec::new();
        }
        let mut spreads = vec![Spread::Chunks; keys];
        for (index, planned) in (0..).zip(&self.layers) {
            let spread = match planned.scheme {
                Scheme::Hub => continue,
                Scheme::Factors => Spread::Aside,
                Scheme::FactorsToHub => Spread::Together(index),
            };
            planned.keys.iter().for_each(|&key| spreads[key as usize] = spread);
        }
        spreads
    }

    fn sum(&self, traffic: impl Fn(&PlannedLayer) -> Option<Traffic>) -> Traffic {
        let none = Traffic { worker: None, hub: None, both: None };
        self.rows().filter_map(traffic).fold(none, |sum, one| Traffic {
            worker: add(sum.worker, one.worker),
            hub: add(sum.hub, one.hub),
            both: add(sum.both, one.both),
        })
    }
}

fn add(a: Option<LinkBytes>, b: Option<LinkBytes>) -> Option<LinkBytes> {
    match (a, b) {
        (Some(a), Some(b)) => Some(LinkBytes { sent: a.sent + b.sent, received: a.received + b.received }),
        (a, b) => a.or(b),
    }
}

fn choose(settings: &Settings, cluster: &Cluster, layer: &LayerSettings, costed: &Layer) -> (Scheme, Why) {
    let choice = layer.scheme.unwrap_or(settings.scheme);
    if choice == SchemeChoice::Only(Scheme::Hub) {
        return (Scheme::Hub, Why::Asked);
    }
    // Forced schemes have been checked. The job's own choice does not apply to layers without factors.
    let by = choice.forced().and_then(Scheme::feature).unwrap_or(Feature::Factors);
    let at_sites = Features::of([(Feature::SeveralSites, cluster.place == HubPlace::Sites)]);
    let asked = layer.features().and(settings.features()).and(at_sites);
    let why_not = conflict_of(by, asked).map(|conflict| Why::of(conflict.other_than(by)));
    match (why_not, choice) {
        (Some(why), _) => (Scheme::Hub, why),
        (None, SchemeChoice::Auto) if at_sites.has(Feature::SeveralSites) => (Scheme::Hub, Why::SeveralSites),
        (None, SchemeChoice::Only(scheme)) => (scheme, Why::Asked),
        (None, SchemeChoice::Auto) => (cluster.best_scheme(costed), Why::Cheapest),
    }
}

/// Returns the way in which the numbers of a layer travel: parameters in the dtype of the layer's key,
/// unless changes to them are quantised, and factors in that dtype, too, unless another codec was asked
/// for.
fn encoding(settings: &Settings, key: &Key) -> ElementBytes {
    let (codec, memory) = (settings.codec_of(key), key.dtype.codec());
    let parameter = if codec.is_quantised() { codec } else { memory };
    ElementBytes { gradient: bytes(codec), parameter: bytes(parameter), factor: bytes(memory) }
}

/// Mean bytes of an element.
fn bytes(codec: Codec) -> f64 {
    // A whole number of blocks, so that the levels of each block count in full.
    const MANY: usize = 1 << 20;
    codec.payload_bytes(MANY) as f64 / MANY as f64
}

#[cfg(test)]
mod tests {
    use super::super::published::FullyConnectedLayer;
    use super::*;
    use crate::consistency::Consistency;
    use crate::key::KeyTable;
    use crate::settings::OptimizerChoice;

    fn settings(samples: u64, scheme: SchemeChoice) -> Settings {
        let keys = vec![
            Key::new("conv.weight", [64, 3, 3, 3]),
            Key::new("fc6.weight", [4096, 4096]),
            Key::new("fc6.bias", [4096]),
            Key::new("fc7.weight", [4096, 4096]),
            Key::new("norm", [64]),
        ];
        let layers = vec![
            LayerSettings::other("conv", [0]),
            LayerSettings::fully_connected("fc6", [1, 2], [4096, 4096, samples]),
            LayerSettings::fully_connected("fc7", [3], [4096, 4096, samples]),
        ];
        Settings { layers, scheme, ..Settings::new(KeyTable::new(keys).unwrap()) }
    }

    fn schemes(settings: &Settings, cluster: &Cluster) -> Vec<(Scheme, Why)> {
        assert_eq!(settings.check(), Ok(()));
        Plan::new(settings, cluster).rows().map(|planned| (planned.scheme, planned.why)).collect()
    }

    const HUB_AS_ASKED: (Scheme, Why) = (Scheme::Hub, Why::Asked);

    /// Section 3.2 computed by a plan: what moves for 4096 x 4096, 32 samples and 8 machines with a worker
    /// and a hub each.
    #[test]
    fn the_example_of_section_3_2() {
        let cluster = Cluster::beside_workers(8);
        let plan = Plan::new(&settings(32, SchemeChoice::Auto), &cluster);
        let fc7 = plan.layer("fc7").unwrap();
        assert_eq!((fc7.scheme, fc7.why), (Scheme::Factors, Why::Cheapest));
        let both = |scheme| {
            let both = plan.numbers(fc7, scheme).unwrap().both.unwrap();
            (both.sent + both.received) / 1e6
        };
        assert!((both(Scheme::Hub) - 58.7).abs() < 0.1, "{}", both(Scheme::Hub));
        assert!((both(Scheme::Factors) - 3.67).abs() < 0.01, "{}", both(Scheme::Factors));
        let problem = FullyConnectedLayer { m: 4096.0, n: 4096.0, k: 32.0, workers: 8.0, servers: 8.0 };
        assert_eq!(Some(both(Scheme::FactorsToHub) * 1e6), problem.adam().both);
        let (planned, by_hub) = plan.costs();
        assert!(planned < by_hub / 10.0, "{planned} against {by_hub}");
    }

    #[test]
    fn auto_takes_factors_where_they_are_smaller_and_the_hub_for_the_rest() {
        let cluster = Cluster::beside_workers(8);
        let found = schemes(&settings(32, SchemeChoice::Auto), &cluster);
        let factors = (Scheme::Factors, Why::Cheapest);
        let no_factors = (Scheme::Hub, Why::NoFactors);
        assert_eq!(found, [no_factors, factors, factors, no_factors]);
        // A model of sequences: 32 sequences of 2048 tokens.
        let found = schemes(&settings(32 * 2048, SchemeChoice::Auto), &cluster);
        assert_eq!(found[1], (Scheme::Hub, Why::Cheapest));
    }

    #[test]
    fn a_job_that_chooses_no_scheme_uses_the_hub_for_all_layers() {
        let said_nothing = settings(1, SchemeChoice::default());
        let cluster = Cluster::beside_workers(4);
        assert!(schemes(&said_nothing, &cluster)[..3].iter().all(|found| *found == HUB_AS_ASKED));
        let plan = Plan::new(&said_nothing, &cluster);
        assert!(plan.is_hub_only() && plan.spreads(5).is_empty());
        let unlisted = Plan::new(&Settings { layers: Vec::new(), ..said_nothing.clone() }, &cluster);
        let rest = unlisted.rest.as_ref().unwrap();
        assert_eq!(
            (rest.layer.name.as_str(), rest.layer.parameters()),
            ("5 keys", said_nothing.keys.elements())
        );
        assert_eq!(unlisted.total(), plan.total());
    }

    #[test]
    fn a_layers_own_choice_goes_before_the_jobs() {
        let cluster = Cluster::beside_workers(8);
        let mut mixed = settings(32, SchemeChoice::Only(Scheme::Factors));
        mixed.layers[1].scheme = Some(SchemeChoice::Only(Scheme::Hub));
        mixed.layers[2].scheme = Some(SchemeChoice::Only(Scheme::FactorsToHub));
        let found = schemes(&mixed, &cluster);
        assert_eq!(
            found[..3],
            [(Scheme::Hub, Why::NoFactors), HUB_AS_ASKED, (Scheme::FactorsToHub, Why::Asked)]
        );
        mixed.layers[1].scheme = None;
        let found = Plan::new(&mixed, &cluster);
        assert_eq!((found.layers[1].scheme, found.layers[1].why), (Scheme::Factors, Why::Asked));
        use Spread::{Aside, Chunks, Together};
        assert_eq!(found.spreads(5), [Chunks, Aside, Aside, Together(2), Chunks]);
    }

    #[test]
    fn auto_takes_the_hub_where_factors_cannot_work() {
        let auto = settings(1, SchemeChoice::Auto);
        let cluster = Cluster::beside_workers(8);
        let because = |settings: &Settings, cluster: &Cluster| {
            let found = schemes(settings, cluster)[1];
            assert_eq!(found.0, Scheme::Hub);
            found.1
        };
        let mut tied = auto.clone();
        tied.layers[1].tied = true;
        assert_eq!(because(&tied, &cluster), Why::Tied);
        let stale = Settings { consistency: Consistency::BoundedStaleness(2), ..auto.clone() };
        assert_eq!(because(&stale, &cluster), Why::NotSynchronous);
        let sgd = OptimizerChoice::named("sgd");
        let clipped = Settings { clip_norm: Some(1.0), optimizer: sgd, ..auto.clone() };
        assert_eq!(because(&clipped, &cluster), Why::TwoPhase);
        let largest = Settings { aggregator: "largest".into(), ..auto.clone() };
        assert_eq!(because(&largest, &cluster), Why::Aggregator);
        let muon = Settings { optimizer: OptimizerChoice::named("muon"), ..auto.clone() };
        assert_eq!(because(&muon, &cluster), Why::Optimizer);
        let sites = Cluster { place: HubPlace::Sites, ..cluster };
        assert_eq!(because(&auto, &sites), Why::SeveralSites);
        let reproducible = Settings { reproducible: true, ..auto };
        assert_eq!(schemes(&reproducible, &cluster)[1].0, Scheme::Factors);
    }

    #[test]
    fn bytes_follow_from_dtypes_and_the_codec() {
        let mut half = settings(8, SchemeChoice::Auto);
        half.codec = Some(Codec::F16);
        let plan = Plan::new(&half, &Cluster::balanced_hub(4));
        let fc7 = plan.layer("fc7").unwrap();
        assert_eq!(fc7.encoding, ElementBytes { gradient: 2.0, parameter: 4.0, factor: 4.0 });
        let mut halved = half.clone();
        halved.layers.iter_mut().for_each(|layer| layer.factor_codec = Some(Codec::BF16));
        let plan_of_halves = Plan::new(&halved, &Cluster::balanced_hub(4));
        let factors = |plan: &Plan| {
            plan.traffic(plan.layer("fc7").unwrap(), Scheme::Factors).unwrap().worker.unwrap().sent
        };
        assert_eq!(factors(&plan_of_halves) * 2.0, factors(&plan));
        let worker = plan.traffic(fc7, Scheme::Hub).unwrap().worker.unwrap();
        assert_eq!((worker.sent, worker.received), (2.0 * 4096.0 * 4096.0, 4.0 * 4096.0 * 4096.0));
        let worker = plan.traffic(fc7, Scheme::Factors).unwrap().worker.unwrap();
        assert_eq!(worker.sent, 3.0 * 8.0 * 8192.0 * 4.0);
    }

    #[test]
    fn a_plan_survives_json() {
        let plan = Plan::new(&settings(32, SchemeChoice::Auto), &Cluster::balanced_hub(3));
        let text = serde_json::to_string(&plan).unwrap();
        assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan);
    }
}
