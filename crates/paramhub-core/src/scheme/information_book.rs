//! Poseidon's information book (section 4.1): the cluster, the model and the chosen schemes, the same on
//! every node.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{Cluster, ElementBytes, HubPlace, LayerType, Plan, PlannedLayer, Scheme, Traffic, Why};
use crate::limits::PROPERTIES_MAX;
use crate::placement::HubShape;

/// Every node of a job has this information once InitService has been answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(as = Book))]
pub struct InformationBook {
    /// The job's name.
    pub job: String,
    /// The workers and hubs that take part.
    pub roster: Roster,
    /// The model's layers and the scheme of each.
    pub plan: Plan,
}

/// The workers and hubs of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Roster {
    /// The workers, by rank.
    pub workers: Vec<WorkerEntry>,
    /// The hubs, site by site, in the order in which a site's placement counts them.
    pub hubs: Vec<HubEntry>,
    /// The place where the hubs run.
    pub place: HubPlace,
}

/// A worker of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct WorkerEntry {
    /// Its rank.
    pub rank: u32,
    /// The name of its host, as the worker reported it.
    pub host: String,
    /// The address at which it listens for the other workers, as `address:port`; `None` if it does not
    /// listen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub address: Option<SocketAddr>,
    /// Its machine: machines are numbered in the order of their first ranks. A worker whose machine is
    /// unknown counts as a machine of its own.
    pub machine: u32,
}

/// A hub of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct HubEntry {
    /// The addresses at which it listens, as `host:port`.
    pub addresses: Vec<String>,
    /// The site it is at.
    pub site: u16,
    /// `true` if a worker of the job is on its machine.
    pub is_beside_worker: bool,
}

impl Roster {
    /// The roster of a job at one site, under the assumption that its hubs run beside workers.
    pub fn beside_workers(workers: u32, hubs: &[HubShape]) -> Roster {
        let worker = |rank| WorkerEntry { rank, host: String::new(), address: None, machine: rank };
        let hub = |shape| HubEntry { addresses: addresses(shape), site: 0, is_beside_worker: true };
        Roster {
            workers: (0..workers).map(worker).collect(),
            hubs: hubs.iter().map(hub).collect(),
            place: HubPlace::BesideWorkers,
        }
    }

    /// The cluster for which costs are computed. If all ranks are on one machine, its link is idle, so each
    /// rank counts as a machine of its own: what would cross links is copied instead.
    pub fn cluster(&self) -> Cluster {
        let (workers, hubs) = (self.workers.len() as u32, self.hubs.len() as u32);
        let machines = self.workers.iter().map(|worker| worker.machine + 1).max().unwrap_or(0);
        let machines = if machines <= 1 { workers } else { machines };
        let hubs = match self.place {
            HubPlace::BesideWorkers => hubs.min(machines),
            HubPlace::Dedicated { .. } | HubPlace::Sites => hubs,
        };
        Cluster { workers, machines, hubs, place: self.place, encoding: ElementBytes::F32 }
    }
}

/// The addresses of a hub's interfaces, each once.
pub fn addresses(shape: &HubShape) -> Vec<String> {
    let mut addresses: Vec<String> = Vec::new();
    for interface in &shape.interfaces {
        if !addresses.contains(&interface.address) {
            addresses.push(interface.address.clone());
        }
    }
    addresses
}

impl HubPlace {
    /// Returns the place where the hubs of a job at one site run: beside workers if at least one does, since
    /// the busiest machine then has both; otherwise dedicated. The rates of the links follow from the weights
    /// of the interfaces, with each address counted once: a worker's link is assumed to be as wide as the
    /// narrowest address, and a hub as wide as the average hub.
    pub fn of_hubs<'a>(hubs: impl IntoIterator<Item = &'a HubShape>, is_any_beside_worker: bool) -> HubPlace {
        if is_any_beside_worker {
            return HubPlace::BesideWorkers;
        }
        let (mut count, mut all, mut least) = (0_u32, 0_u64, u64::MAX);
        for hub in hubs {
            count += 1;
            let mut by_host: BTreeMap<&str, u64> = BTreeMap::new();
            for interface in &hub.interfaces {
                let host = interface.address.rsplit_once(':').map_or(&*interface.address, |(host, _)| host);
                let weight = by_host.entry(host).or_default();
                *weight = (*weight).max(interface.weight.into());
            }
            all += by_host.values().sum::<u64>();
            least = least.min(by_host.values().copied().min().unwrap_or(u64::MAX));
        }
        let width = if count == 0 { 1.0 } else { all as f64 / f64::from(count) / least.max(1) as f64 };
        HubPlace::Dedicated { width }
    }
}

/// The scheme of a layer, and the other possible schemes: the answer to BestScheme.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct BestScheme {
    /// The layer.
    pub layer: String,
    /// The scheme that exchanges it.
    pub scheme: Scheme,
    /// The reason why this scheme was chosen.
    pub why: Why,
    /// Bytes that each scheme would put on the machines in a step; schemes that cannot exchange the layer are
    /// left out.
    pub traffic: BTreeMap<Scheme, Traffic>,
}

/// The value of one property.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Found<'a> {
    /// `workers`
    Workers(&'a [WorkerEntry]),
    /// `hubs`
    Hubs(&'a [HubEntry]),
    /// `place`
    Place(HubPlace),
    /// `layers`: their names
    Names(Vec<&'a str>),
    /// `layers.NAME`
    Layer(&'a PlannedLayer),
    /// `layers.NAME.keys`
    Keys(&'a [u32]),
    /// `layers.NAME.outputs`, `.inputs`, `.samples` and `.parameters`; none where the layer has no such number
    Number(Option<u64>),
    /// `layers.NAME.type`
    Type(&'static str),
    /// `layers.NAME.scheme`
    Scheme(Scheme),
    /// `layers.NAME.why`
    Why(Why),
}

/// The reason why the book has no answer.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum InformationBookError {
    /// No such layer.
    #[error(
        "job `{job}` has no layer `{layer}`: `layers` lists them; keys that are in no layer go through the hubs"
    )]
    Layer {
        /// The job.
        job: String,
        /// The name asked for, shortened.
        layer: String,
    },
    /// No such property.
    #[error(
        "the information book has no property `{0}`: it has workers, hubs, place, layers, layers.NAME and layers.NAME.FIELD, \
         where FIELD is type, outputs, inputs, samples, parameters, keys, scheme or why"
    )]
    Property(String),
    /// Too many properties in one query.
    #[error(
        "{0} properties are too many for one query: ask for up to {PROPERTIES_MAX}, or for the whole book"
    )]
    TooMany(usize),
}

const FIELDS: [&str; 8] = ["type", "outputs", "inputs", "samples", "parameters", "keys", "scheme", "why"];

impl InformationBook {
    /// The paper's Query: the value of each property, by its name.
    ///
    /// # Errors
    /// If there is no such property or layer, or too many are asked for.
    pub fn query<'a, 'b>(
        &'a self,
        properties: &[&'b str],
    ) -> Result<BTreeMap<&'b str, Found<'a>>, InformationBookError> {
        if properties.len() > PROPERTIES_MAX {
            return Err(InformationBookError::TooMany(properties.len()));
        }
        properties.iter().map(|property| Ok((*property, self.find(property)?))).collect()
    }

    /// The paper's BestScheme: how a layer is exchanged.
    ///
    /// # Errors
    /// If there is no such layer.
    pub fn best_scheme(&self, layer: &str) -> Result<BestScheme, InformationBookError> {
        let planned = self.layer(layer)?;
        let traffic = Scheme::ALL
            .into_iter()
            .filter_map(|scheme| Some((scheme, self.plan.traffic(planned, scheme)?)))
            .collect();
        Ok(BestScheme { layer: layer.to_owned(), scheme: planned.scheme, why: planned.why, traffic })
    }

    fn layer(&self, name: &str) -> Result<&PlannedLayer, InformationBookError> {
        self.plan
            .layer(name)
            .ok_or_else(|| InformationBookError::Layer { job: self.job.clone(), layer: shortened(name) })
    }

    fn find(&self, property: &str) -> Result<Found<'_>, InformationBookError> {
        match property {
            "workers" => return Ok(Found::Workers(&self.roster.workers)),
            "hubs" => return Ok(Found::Hubs(&self.roster.hubs)),
            "place" => return Ok(Found::Place(self.roster.place)),
            "layers" => {
                let names = self.plan.layers.iter().map(|planned| planned.layer.name.as_str());
                return Ok(Found::Names(names.collect()));
            }
            _ => {}
        }
        let unknown = || InformationBookError::Property(shortened(property));
        let rest = property.strip_prefix("layers.").ok_or_else(unknown)?;
        // Names of layers may contain dots.
        if let Some(planned) = self.plan.layer(rest) {
            return Ok(Found::Layer(planned));
        }
        match rest.rsplit_once('.') {
            Some((name, field)) if FIELDS.contains(&field) => {
                field_of(self.layer(name)?, field).ok_or_else(unknown)
            }
            _ => self.layer(rest).map(Found::Layer),
        }
    }
}

fn field_of<'a>(planned: &'a PlannedLayer, field: &str) -> Option<Found<'a>> {
    let sizes = match planned.layer.kind {
        LayerType::FullyConnected { outputs, inputs, samples, .. } => Some([outputs, inputs, samples]),
        LayerType::Other { .. } => None,
    };
    Some(match field {
        "type" => Found::Type(if sizes.is_some() { "fully-connected" } else { "other" }),
        "outputs" => Found::Number(sizes.map(|sizes| sizes[0])),
        "inputs" => Found::Number(sizes.map(|sizes| sizes[1])),
        "samples" => Found::Number(sizes.map(|sizes| sizes[2])),
        "parameters" => Found::Number(Some(planned.layer.parameters())),
        "keys" => Found::Keys(&planned.keys),
        "scheme" => Found::Scheme(planned.scheme),
        "why" => Found::Why(planned.why),
        _ => return None,
    })
}

/// The text of a query, cut to the length that a message repeats.
fn shortened(text: &str) -> String {
    text.chars().take(64).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{LayerSettings, SchemeChoice};
    use super::*;
    use crate::key::{Key, KeyTable};
    use crate::placement::InterfaceShape;
    use crate::settings::Settings;

    fn shape(interfaces: &[(&str, u32)]) -> HubShape {
        let interface = |&(address, weight): &(&str, u32)| InterfaceShape {
            address: address.into(),
            cores: vec![0],
            weight,
        };
        HubShape { interfaces: interfaces.iter().map(interface).collect(), local: None, between_hubs: None }
    }

    fn information_book() -> InformationBook {
        let keys = vec![Key::new("conv", [9]), Key::new("w", [512, 256]), Key::new("b", [512])];
        let layers = vec![
            LayerSettings::other("features.0", [0]),
            LayerSettings::fully_connected("fc.6", [1, 2], [512, 256, 4]),
        ];
        let settings =
            Settings { layers, scheme: SchemeChoice::Auto, ..Settings::new(KeyTable::new(keys).unwrap()) };
        let roster = Roster::beside_workers(4, &[shape(&[("10.0.0.1:7771", 10), ("10.0.0.1:7771", 10)])]);
        let plan = Plan::new(&settings, &roster.cluster());
        InformationBook { job: "digits".into(), roster, plan }
    }

    #[test]
    fn ranks_of_one_machine_are_counted_together_unless_there_is_no_other() {
        let on = |machines: &[u32]| {
            let hubs = [shape(&[("10.0.0.1:7771", 10)]), shape(&[("10.0.0.2:7771", 10)])];
            let mut roster = Roster::beside_workers(machines.len() as u32, &hubs);
            roster.workers.iter_mut().zip(machines).for_each(|(worker, &machine)| worker.machine = machine);
            let cluster = roster.cluster();
            [cluster.workers, cluster.machines, cluster.hubs]
        };
        assert_eq!(on(&[0, 0, 1, 1, 0]), [5, 2, 2]);
        assert_eq!(on(&[0, 1, 2]), [3, 3, 2]);
        assert_eq!(on(&[0, 0, 0]), [3, 3, 2], "no link is busy, so each stands for a machine");
        assert_eq!(on(&[0]), [1, 1, 1]);
    }

    #[test]
    fn properties_are_found_by_name() {
        let information_book = information_book();
        let asked = [
            "workers",
            "hubs",
            "place",
            "layers",
            "layers.fc.6.scheme",
            "layers.fc.6.outputs",
            "layers.features.0.outputs",
            "layers.fc.6.keys",
            "layers.features.0",
        ];
        let found = serde_json::to_value(information_book.query(&asked).unwrap()).unwrap();
        assert_eq!(found["workers"].as_array().unwrap().len(), 4);
        let hub = serde_json::json!([{"addresses": ["10.0.0.1:7771"], "site": 0, "is_beside_worker": true}]);
        assert_eq!((&found["hubs"], &found["place"]), (&hub, &serde_json::json!("beside-workers")));
        assert_eq!(found["layers"], serde_json::json!(["features.0", "fc.6"]));
        assert_eq!(found["layers.fc.6.scheme"], "factors");
        assert_eq!(found["layers.fc.6.outputs"], 512);
        assert_eq!(found["layers.features.0.outputs"], serde_json::Value::Null);
        assert_eq!(found["layers.fc.6.keys"], serde_json::json!([1, 2]));
        assert_eq!(found["layers.features.0"]["scheme"], "hub");
    }

    #[test]
    fn an_unknown_property_or_layer_is_named() {
        let information_book = information_book();
        let refused = |property| information_book.query(&[property]).unwrap_err().to_string();
        assert!(refused("batch").contains("no property `batch`: it has workers, hubs"));
        assert!(refused("layers.fc7.scheme").contains("`digits` has no layer `fc7`"));
        assert!(refused("layers.fc7").contains("no layer `fc7`"));
        assert_eq!(
            information_book.query(&["hubs"; PROPERTIES_MAX + 1]),
            Err(InformationBookError::TooMany(PROPERTIES_MAX + 1))
        );
        assert!(information_book.best_scheme("w").unwrap_err().to_string().contains("no layer `w`"));
    }

    #[test]
    fn best_scheme_says_what_the_others_would_move() {
        let information_book = information_book();
        let best = information_book.best_scheme("fc.6").unwrap();
        assert_eq!((best.scheme, best.why), (Scheme::Factors, Why::Cheapest));
        assert_eq!(best.traffic.keys().copied().collect::<Vec<_>>(), Scheme::ALL);
        let both = best.traffic[&Scheme::Factors].both.unwrap();
        assert_eq!(both.sent, 3.0 * 4.0 * (512.0 + 256.0) * 4.0);
        let text = serde_json::to_string(&best).unwrap();
        assert_eq!(serde_json::from_str::<BestScheme>(&text).unwrap(), best);
        assert_eq!(information_book.best_scheme("features.0").unwrap().traffic.len(), 1);
        let text = serde_json::to_string(&information_book).unwrap();
        assert_eq!(serde_json::from_str::<InformationBook>(&text).unwrap(), information_book);
    }

    #[test]
    fn a_dedicated_hub_is_as_wide_as_its_links_are_together() {
        let wide = shape(&[("10.0.0.1:7771", 10), ("10.0.0.1:7771", 10), ("10.0.1.1:7771", 10)]);
        let narrow = shape(&[("10.0.0.2:7771", 5)]);
        assert_eq!(HubPlace::of_hubs([&wide], false), HubPlace::Dedicated { width: 2.0 });
        assert_eq!(HubPlace::of_hubs([&wide, &narrow], false), HubPlace::Dedicated { width: 2.5 });
        assert_eq!(HubPlace::of_hubs([&wide], true), HubPlace::BesideWorkers);
    }

    #[test]
    fn no_more_hubs_than_workers_are_beside_workers() {
        let hubs = vec![shape(&[("10.0.0.1:7771", 1)]); 3];
        assert_eq!(Roster::beside_workers(2, &hubs).cluster().hubs, 2);
        let dedicated =
            Roster { place: HubPlace::Dedicated { width: 1.0 }, ..Roster::beside_workers(2, &hubs) };
        assert_eq!(dedicated.cluster().hubs, 3);
    }
}
