//! `paramhub plan`: which deployment for this model and this network.

mod prices;
mod report;
mod schemes;

use std::path::PathBuf;
use std::str::FromStr;

use clap::{ArgGroup, Args, value_parser};
use paramhub::Codec;
use paramhub::cost::{CostModel, Network, Rate, Rates};
use paramhub::limits::{HUBS_MAX, INTERFACES_MAX};
use paramhub_harness::models::{Model, element_type};

use super::Usage;
use crate::ExitCode;
use crate::config::{Bytes, Deployment};
use prices::GivenPrices;

/// Say which deployment of hubs suits a model and a network
///
/// Computes for each deployment what every kind of link carries in a step, how long the exchange takes at least, and what
/// limits it; with several racks also whether to sum within each rack first. Nothing is measured: `paramhub probe` measures
/// what links carry. Links are taken to be full duplex.
#[derive(Args)]
#[command(group = ArgGroup::new("size").required(true).args(["model", "keys", "bytes"]))]
pub(super) struct PlanFlags {
    /// Whose tensors: cifar-quick, alexnet, vgg11, vgg19, googlenet, inception_v3, inception-bn, resnet18, resnet50, resnet152, vgg19-22k
    /// or transformer-1.1b
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// A JSON file of tensors: {"model", "tensors": [{"name", "shape"}, ..]} or the bare list. The weight of a fully
    /// connected layer, outputs by inputs, has "type": "fully-connected", too, and its bias comes next
    #[arg(long, value_name = "FILE")]
    keys: Option<PathBuf>,
    /// Bytes of gradients that a worker sends in a step, as in 100M
    #[arg(long, value_name = "BYTES")]
    bytes: Option<Bytes>,
    /// Element type of gradients and parameters: f32, bf16 or f16 [default: f32]
    #[arg(long, conflicts_with = "bytes")]
    dtype: Option<Codec>,
    /// Workers in all
    #[arg(long, value_name = "N")]
    workers: u32,
    /// Racks, over which the workers are spread evenly
    #[arg(long, value_name = "R", default_value_t = 1)]
    racks: u32,
    /// What links carry each way, as in worker=10gbit,hub=25gbit,core=10gbit: a worker's machine, one interface of a
    /// dedicated hub [default: the worker's], and a rack's link to the core
    #[arg(long, value_name = "RATES", required_unless_present = "schemes")]
    rates: Option<GivenRates>,
    /// Interfaces of each dedicated hub
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = value_parser!(u32).range(1..=INTERFACES_MAX as i64))]
    interfaces: u32,
    /// Dedicated hubs of NCS [default: one in each rack; in a single rack one for each worker]
    #[arg(long, value_name = "S", value_parser = value_parser!(u32).range(1..=HUBS_MAX as i64))]
    hubs: Option<u32>,
    /// Standbys of each chunk, 0 or 1: with 1 each hub sends its sums to another hub, too
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "schemes", value_parser = value_parser!(u32).range(0..=1))]
    replicas: u32,
    /// Computation of a step, behind which the exchange can hide
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    compute_ms: Option<f64>,
    /// Prices in one currency, as in worker=6913,worker-port=260,hub=8407,hub-port=163,switch-port=165,cable=31: machines
    /// without network, a port of their cards and of a switch, a cable. With oversubscription=2 the racks' links to the
    /// core are half as wide. Adds what a step costs
    #[arg(long, value_name = "PRICES", requires = "compute_ms")]
    prices: Option<GivenPrices>,
    /// Say instead by which scheme each layer of the model would go, and what moves: through the hubs, or as factors between
    /// the workers
    #[arg(long, requires = "batch", conflicts_with_all = ["bytes", "compute_ms", "prices"])]
    schemes: bool,
    /// Samples of one worker in a step: the batch, and in a model of sequences the batch times their length
    #[arg(long, value_name = "K", requires = "schemes", value_parser = value_parser!(u64).range(1..))]
    batch: Option<u64>,
    /// Where the hubs run, for --schemes [default: cs]
    #[arg(long, value_enum, value_name = "WHERE", requires = "schemes")]
    deployment: Option<Deployment>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The values of `--rates`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct GivenRates {
    worker: Rate,
    hub: Option<Rate>,
    core: Option<Rate>,
}

impl FromStr for GivenRates {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (mut worker, mut hub, mut core) = (None, None, None);
        for given in text.split(',') {
            let form = || format!("`{given}`: write NAME=RATE, where NAME is worker, hub or core");
            let (name, rate) = given.split_once('=').ok_or_else(form)?;
            let place = match name.trim() {
                "worker" => &mut worker,
                "hub" => &mut hub,
                "core" => &mut core,
                _ => return Err(form()),
            };
            let rate: Rate = rate.parse().map_err(|error| format!("{}: {error}", name.trim()))?;
            if place.replace(rate).is_some() {
                return Err(format!("{} is given twice", name.trim()));
            }
        }
        let worker = worker.ok_or("the worker's is missing, as in worker=10gbit")?;
        Ok(GivenRates { worker, hub, core })
    }
}

pub(super) fn plan(flags: &PlanFlags) -> anyhow::Result<ExitCode> {
    if flags.schemes {
        return schemes::plan(flags);
    }
    let (name, bytes) = flags.size()?;
    let compute_s = flags.compute_s()?;
    let rates = flags.rates.expect("they are required without --schemes");
    let hub = rates.hub.unwrap_or(rates.worker);
    let network = Network {
        racks: flags.racks,
        hubs: flags.hubs.unwrap_or(if flags.racks > 1 { flags.racks } else { flags.workers.max(1) }),
        hub_interfaces: flags.interfaces,
        replicas: flags.replicas,
        ..Network::new(bytes, flags.workers, Rates { worker: rates.worker, hub, core: rates.core })
    };
    let model = CostModel::new(network).map_err(|error| Usage(error.to_string()))?;
    let prices = flags.prices.map(|GivenPrices(prices)| prices);
    let report = report::Report::new(name, &model, compute_s, prices);
    if flags.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{}", report.text());
    }
    Ok(ExitCode::SUCCESS)
}

impl PlanFlags {
    fn size(&self) -> anyhow::Result<(Option<String>, u64)> {
        if let Some(bytes) = self.bytes {
            return Ok((None, bytes.0));
        }
        let model = self.tensors()?;
        let name = model.name.clone();
        Ok((Some(name), model.keys(element_type(self.dtype.unwrap_or(Codec::F32))?, None, 1)?.bytes()))
    }

    fn tensors(&self) -> anyhow::Result<Model> {
        match (&self.model, &self.keys) {
            (Some(name), _) => Model::named(name),
            (None, Some(path)) => Model::read(path),
            (None, None) => unreachable!("the group is required"),
        }
    }

    fn compute_s(&self) -> Result<Option<f64>, Usage> {
        match self.compute_ms {
            Some(ms) if !(ms.is_finite() && ms > 0.0) => {
                Err(Usage(format!("--compute-ms {ms}: a step computes for some time above zero")))
            }
            ms => Ok(ms.map(|ms| ms / 1e3)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_named_in_any_order() {
        let rates: GivenRates = "core=250mbit, worker=500mbit".parse().unwrap();
        assert_eq!(rates.worker.bits_per_second(), 5e8);
        assert_eq!((rates.hub, rates.core.map(Rate::bits_per_second)), (None, Some(2.5e8)));
        for (wrong, reason) in [
            ("", "NAME=RATE"),
            ("10gbit", "NAME=RATE"),
            ("rack=10gbit", "worker, hub or core"),
            ("hub=10gbit", "the worker's is missing"),
            ("worker=10gbit,worker=1gbit", "worker is given twice"),
            ("worker=fast", "worker: `fast` is no rate"),
        ] {
            let refused = wrong.parse::<GivenRates>().unwrap_err();
            assert!(refused.contains(reason), "{wrong}: {refused}");
        }
    }
}
