//! The layers of a job that are exchanged by factors between the workers.

use paramhub_core::scheme::{LayerType, Plan, Scheme};
use paramhub_core::settings::Settings;

use crate::layer::FactorLayer;

/// A layer whose scheme in the plan is `factors`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedFactors {
    /// The layer, for the exchange.
    pub layer: FactorLayer,
    /// The position of the weight in the key table.
    pub weight: u32,
    /// The position of the bias in the key table.
    pub bias: Option<u32>,
}

/// The layers of a job whose scheme is `factors`, in the plan's order, which is the same at all ranks.
pub fn planned_factors(settings: &Settings, plan: &Plan) -> Vec<PlannedFactors> {
    let keys = settings.keys.keys();
    let made = plan.going_by(Scheme::Factors, settings).map(|(planned, asked)| {
        let LayerType::FullyConnected { outputs, inputs, samples, .. } = planned.layer.kind else {
            unreachable!("only fully connected layers are planned by factors");
        };
        let (weight, bias) = (planned.keys[0], planned.keys.get(1).copied());
        let of = |key: u32| &keys[key as usize];
        // Lengths of tensors in memory fit into `usize`.
        let length = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
        let layer = FactorLayer {
            name: planned.layer.name.as_str().into(),
            key: of(weight).name.as_str().into(),
            shape: (length(outputs), length(inputs)),
            samples: length(samples),
            has_bias: bias.is_some(),
            codec: asked.factor_codec(keys),
            parameter_codec: of(weight).dtype.codec(),
            groups: [of(weight).group, of(bias.unwrap_or(weight)).group],
        };
        PlannedFactors { layer, weight, bias }
    });
    made.collect()
}

#[cfg(test)]
mod tests {
    use paramhub_core::codec::{Codec, Dtype};
    use paramhub_core::key::{Key, KeyTable};
    use paramhub_core::scheme::{Cluster, LayerSettings, SchemeChoice};

    use super::*;

    #[test]
    fn layers_that_go_by_factors_keep_their_keys_types_and_groups() {
        let half = |key: Key| Key { dtype: Dtype::BF16, ..key };
        let keys = vec![
            Key::new("conv", [64, 27]),
            half(Key::new("fc.weight", [512, 256])),
            half(Key { group: 1, ..Key::new("fc.bias", [512]) }),
            Key::new("last", [10, 512]),
        ];
        let layers = vec![
            LayerSettings::other("conv", [0]),
            LayerSettings::fully_connected("last", [3], [10, 512, 4]).with_factors_in(Codec::F16),
            LayerSettings::fully_connected("fc", [1, 2], [512, 256, 4]),
        ];
        let optimizer = paramhub_core::settings::OptimizerChoice {
            groups: vec![Default::default()],
            ..Default::default()
        };
        let table = KeyTable::new(keys).unwrap();
        let settings = Settings { layers, scheme: SchemeChoice::Auto, optimizer, ..Settings::new(table) };
        settings.check().unwrap();
        let plan = Plan::new(&settings, &Cluster::beside_workers(4));
        let planned = planned_factors(&settings, &plan);
        let fc = FactorLayer {
            codec: Codec::BF16,
            parameter_codec: Codec::BF16,
            groups: [0, 1],
            key: "fc.weight".into(),
            ..FactorLayer::new("fc", (512, 256), 4).with_bias()
        };
        assert_eq!(planned.last(), Some(&PlannedFactors { layer: fc, weight: 1, bias: Some(2) }));
        let last = &planned[0].layer;
        assert_eq!((&*last.name, last.codec, last.parameter_codec), ("last", Codec::F16, Codec::F32));
        assert!(planned.iter().all(|planned| &*planned.layer.name != "conv"));
    }
}
