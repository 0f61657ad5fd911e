//! The choice of an arrangement, and its reason.

use serde::Serialize;

use super::{Arrangement, CostModel, ExchangeCost, Prices};

/// Two lower bounds count as equal if they differ by less: the model is no more precise than that.
const NEGLIGIBLE: f64 = 0.01;

/// Both sides of PHub's condition for summing within each rack first (section 3.4), in seconds, that is times
/// M: N (R-1) / (R B_core) > max(N / B_PBox, 1 / B_wkr) + C with C = (R-1) / (R min(B_PBox, B_core)). N is
/// the number of workers in a rack (the mean, if racks differ), and B_PBox the rate of all interfaces of a
/// rack hub together.
///
/// Both sides count one direction of the traffic through the core, and the right side adds up the two levels
/// as if the second began when the first has ended.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Inequality {
    /// Transfers between racks, where every gradient goes straight to the hub that sums it.
    pub flat_s: f64,
    /// Transfers within a rack, at the slower of hub and worker.
    pub rack_s: f64,
    /// C: transfers between rack hubs.
    pub between_racks_s: f64,
}

impl Inequality {
    /// The right side.
    pub fn hierarchical_s(&self) -> f64 {
        self.rack_s + self.between_racks_s
    }

    /// Returns whether it pays to sum within each rack first.
    pub fn holds(&self) -> bool {
        self.flat_s > self.hierarchical_s()
    }
}

/// The reduction that `--reduction auto` chooses.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReductionChoice {
    /// The reason.
    pub inequality: Inequality,
    /// The arrangement: [`Arrangement::DedicatedHubs`] if the inequality does not hold, otherwise the
    /// hierarchical one with the least lower bound.
    pub chosen: Arrangement,
    /// The candidates, cheapest first: all hierarchical arrangements and the flat one.
    pub candidates: Vec<ExchangeCost>,
}

/// The best of all arrangements.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recommendation {
    /// The arrangement and its cost.
    pub exchange: ExchangeCost,
    /// The reason, in a sentence.
    pub reason: String,
}

impl CostModel {
    /// Both sides of the paper's condition; `None` in a single rack.
    pub fn inequality(&self) -> Option<Inequality> {
        let network = self.network();
        let core = network.rates.core.filter(|_| network.racks > 1)?;
        let model = network.model_bytes as f64;
        let racks = f64::from(network.racks);
        let below = f64::from(network.workers) / racks;
        let hub = network.rates.hub.times(network.hub_interfaces);
        let narrowest = if hub < core { hub } else { core };
        let others = (racks - 1.0) / racks;
        Some(Inequality {
            flat_s: core.seconds(below * others * model),
            rack_s: hub.seconds(below * model).max(network.rates.worker.seconds(model)),
            between_racks_s: narrowest.seconds(others * model),
        })
    }

    /// Applies the paper's condition; `None` in a single rack, and with standbys, which only flat arrangements have. If the condition holds, the lower bound of the
    /// choice is no higher than that of the flat arrangement. If it does not, a hierarchical bound may still
    /// be lower, by as much as the two levels can overlap.
    pub fn choose_reduction(&self) -> Option<ReductionChoice> {
        let inequality = self.inequality().filter(|_| self.network().replicas == 0)?;
        let mut candidates: Vec<ExchangeCost> =
            Arrangement::HIERARCHICAL.iter().map(|&arrangement| self.exchange(arrangement)).collect();
        let hierarchical = cheapest(&candidates, |exchange| exchange.seconds).arrangement;
        let chosen = if inequality.holds() { hierarchical } else { Arrangement::DedicatedHubs };
        candidates.push(self.exchange(Arrangement::DedicatedHubs));
        candidates.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        Some(ReductionChoice { inequality, chosen, candidates })
    }

    /// The best of all arrangements. With `compute_s` and prices, it is the one with the most steps for its
    /// price, else the one with the least lower bound. Among arrangements within a hundredth of the best, or,
    /// without prices, among those that `compute_s` of computation hides entirely, it is the one with the
    /// fewest machines.
    pub fn recommend(&self, compute_s: Option<f64>, prices: Option<&Prices>) -> Recommendation {
        let network = self.network();
        let mut all: Vec<ExchangeCost> =
            self.arrangements().into_iter().map(|arrangement| self.exchange(arrangement)).collect();
        all.sort_by_key(|exchange| exchange.arrangement.hub_machines(network));
        let takes = |exchange: &ExchangeCost| machines(exchange.arrangement.hub_machines(network));
        if let Some((compute_s, prices)) = compute_s.zip(prices) {
            let worth = |exchange: &ExchangeCost| {
                self.value(exchange, compute_s, prices).steps_per_second_per_thousand
            };
            let exchange = cheapest(&all, |exchange| 1.0 / worth(exchange));
            let reason = format!(
                "it makes the most steps for its price, {:.3} a second for each thousand spent on a worker; its exchange takes at \
                 least {}, and it takes {}",
                worth(exchange),
                duration(exchange.seconds),
                takes(exchange),
            );
            return Recommendation { exchange: exchange.clone(), reason };
        }
        let hidden = compute_s.and_then(|compute_s| {
            let exchange = all.iter().find(|exchange| exchange.seconds <= compute_s)?;
            Some((exchange, compute_s))
        });
        if let Some((exchange, compute_s)) = hidden {
            let reason = format!(
                "its exchange takes at least {} and can hide behind {} of computation; it takes {}",
                duration(exchange.seconds),
                duration(compute_s),
                takes(exchange),
            );
            return Recommendation { exchange: exchange.clone(), reason };
        }
        let exchange = cheapest(&all, |exchange| exchange.seconds);
        let mut reason = format!(
            "its lower bound, {}, is the least; it takes {}",
            duration(exchange.seconds),
            takes(exchange)
        );
        if let Some(compute_s) = compute_s {
            reason.push_str(&format!(
                ", and {} of computation cannot hide all of the exchange",
                duration(compute_s)
            ));
        }
        Recommendation { exchange: exchange.clone(), reason }
    }
}

/// The cheapest of these; among those that hardly differ, the first.
fn cheapest(exchanges: &[ExchangeCost], cost: impl Fn(&ExchangeCost) -> f64) -> &ExchangeCost {
    let least = exchanges.iter().map(&cost).fold(f64::INFINITY, f64::min);
    exchanges
        .iter()
        .find(|exchange| cost(exchange) <= least * (1.0 + NEGLIGIBLE))
        .expect("there is an exchange to choose")
}

fn duration(seconds: f64) -> String {
    format!("{:.1} ms", seconds * 1e3)
}

fn machines(count: u32) -> String {
    match count {
        0 => "no machine but the workers'".into(),
        1 => "1 machine for the hub".into(),
        count => format!("{count} machines for hubs"),
    }
}
