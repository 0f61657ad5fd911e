//! A plan as a table and as JSON.

use comfy_table::{CellAlignment, Table, presets};
use paramhub::cost::{
    Arrangement, CostModel, ExchangeCost, LinkKind, Network, Prices, Recommendation, ReductionChoice, Value,
};
use serde::Serialize;

/// Printed with `--json`. Seconds and bytes are those of one step.
#[derive(Serialize)]
pub(super) struct Report {
    /// `None` where bytes were given instead of a model.
    model: Option<String>,
    network: Network,
    compute_s: Option<f64>,
    prices: Option<Prices>,
    exchanges: Vec<Row>,
    /// The choice of a reduction, with several racks.
    reduction: Option<Reduction>,
    recommendation: Recommendation,
}

#[derive(Serialize)]
struct Row {
    #[serde(flatten)]
    exchange: ExchangeCost,
    hub_machines: u32,
    /// The rate that a machine with a hub must carry, both ways together, to hide the exchange behind the
    /// computation.
    hub_side_bits_per_second: Option<f64>,
    /// The cost of a step, if prices are given.
    value: Option<Value>,
}

#[derive(Serialize)]
struct Reduction {
    #[serde(flatten)]
    choice: ReductionChoice,
    hierarchical_s: f64,
    holds: bool,
}

impl Report {
    /// `compute_s` is needed if prices are given.
    pub(super) fn new(
        name: Option<String>,
        model: &CostModel,
        compute_s: Option<f64>,
        prices: Option<Prices>,
    ) -> Report {
        let network = *model.network();
        let row = |arrangement: Arrangement| {
            let exchange = model.exchange(arrangement);
            let hub_side_bits_per_second = compute_s
                .map(|compute_s| exchange.hub_side_bits_per_second(network.hub_interfaces, compute_s));
            let value =
                compute_s.zip(prices).map(|(compute_s, prices)| model.value(&exchange, compute_s, &prices));
            let hub_machines = arrangement.hub_machines(&network);
            Row { exchange, hub_machines, hub_side_bits_per_second, value }
        };
        let reduction = model.choose_reduction().map(|choice| Reduction {
            hierarchical_s: choice.inequality.hierarchical_s(),
            holds: choice.inequality.holds(),
            choice,
        });
        Report {
            model: name,
            network,
            compute_s,
            prices,
            exchanges: model.arrangements().into_iter().map(row).collect(),
            reduction,
            recommendation: model.recommend(compute_s, prices.as_ref()),
        }
    }

    /// The report as a table for people.
    pub(super) fn text(&self) -> String {
        let mut text = format!("{}\n{}\n", self.heading(), self.table());
        if let Some(reduction) = &self.reduction {
            text.push_str(&reduction.text());
        }
        let Recommendation { exchange, reason } = &self.recommendation;
        text.push_str(&format!(
            "recommended: {}, {}: {reason}.\n",
            exchange.arrangement,
            self.words(exchange)
        ));
        text
    }

    fn heading(&self) -> String {
        let Network { model_bytes, workers, racks, hub_interfaces, replicas, rates, .. } = self.network;
        let mut links = format!("worker {}, hub {hub_interfaces} x {}", rates.worker, rates.hub);
        if let (true, Some(core)) = (racks > 1, rates.core) {
            links.push_str(&format!(", rack to core {core}"));
        }
        format!(
            "{}{} MB of gradients from each of {workers} workers in {}, and as much back{}\nlinks, each way: {links}",
            self.model.as_ref().map(|name| format!("{name}: ")).unwrap_or_default(),
            megabytes(model_bytes as f64),
            if racks == 1 { "1 rack".into() } else { format!("{racks} racks") },
            if replicas > 0 { "; each sum also goes to a standby at another hub" } else { "" },
        )
    }

    fn table(&self) -> Table {
        let has_core = self.network.racks > 1;
        let mut head = vec!["", "hub\nmachines", "MB each way:\nworker", "\nhub"];
        if has_core {
            head.push("\ncore");
        }
        head.extend(["exchange\nat least", "\nlimited by"]);
        if self.compute_s.is_some() {
            head.push("to hide it\nlinks as fast");
        }
        if self.prices.is_some() {
            head.extend(["price a\nworker", "steps/s\nfor 1000"]);
        }
        let mut table = Table::new();
        table.load_style(presets::UTF8_FULL_CONDENSED).set_header(head);
        for Row { exchange, hub_machines, value, .. } in &self.exchanges {
            let carried = |link| exchange.load(link).map(|load| megabytes(load.sent_bytes));
            let shared = || carried(LinkKind::SharedMachine);
            let mut hub = carried(LinkKind::HubInterface).or_else(shared).unwrap_or_default();
            if let Some(parent) = carried(LinkKind::ParentInterface) {
                hub.push_str(&format!(", parent {parent}"));
            }
            let worker = carried(LinkKind::Worker).unwrap_or_else(|| "as hub".into());
            let mut cells = vec![exchange.arrangement.to_string(), hub_machines.to_string(), worker, hub];
            if has_core {
                cells.push(carried(LinkKind::Core).unwrap_or_default());
            }
            cells.extend([milliseconds(exchange.seconds), exchange.limit.to_string()]);
            if let Some(compute_s) = self.compute_s {
                cells.push(beside(exchange.seconds, compute_s));
            }
            if let Some(value) = value {
                cells.push(format!("{:.0}", value.price_per_worker));
                cells.push(format!("{:.3}", value.steps_per_second_per_thousand));
            }
            table.add_row(cells);
        }
        let takes = if has_core { 5 } else { 4 };
        for column in 1..=takes {
            table.column_mut(column).expect("a column of the head").set_cell_alignment(CellAlignment::Right);
        }
        table
    }

    fn words(&self, exchange: &ExchangeCost) -> String {
        let hubs = self.network.hubs;
        match exchange.arrangement {
            Arrangement::HubBesideOneWorker => "a hub beside one worker".into(),
            Arrangement::HubBesideEveryWorker => "a hub beside every worker".into(),
            Arrangement::DedicatedHub => "one dedicated hub".into(),
            Arrangement::DedicatedHubs => format!("{hubs} dedicated hub{}", if hubs == 1 { "" } else { "s" }),
            Arrangement::Tree => "a hub in each rack and a parent above them".into(),
            Arrangement::Ring => "a hub in each rack, in a ring".into(),
            Arrangement::Sharded => "a hub in each rack, each with a part of the model".into(),
        }
    }
}

impl Reduction {
    fn text(&self) -> String {
        let inequality = self.choice.inequality;
        let chosen = match self.choice.chosen {
            Arrangement::DedicatedHubs => "flat".to_owned(),
            hierarchical => hierarchical.to_string(),
        };
        let mut text = format!(
            "across racks, M N (R-1) / (R B_core) {} M max(N / B_hub, 1 / B_worker) + M C:\n  \
             {} for the core, flat, {} {} = {} within a rack + {} between racks; --reduction auto takes {chosen}\n",
            if self.holds { ">" } else { "<=" },
            milliseconds(inequality.flat_s),
            if self.holds { ">" } else { "<=" },
            milliseconds(self.hierarchical_s),
            milliseconds(inequality.rack_s),
            milliseconds(inequality.between_racks_s),
        );
        let flat = self.candidate(Arrangement::DedicatedHubs);
        let least = &self.choice.candidates[0];
        if !self.holds && least.seconds < flat.seconds {
            text.push_str(&format!(
                "  ({} has a lower bound, {} against {}, which counts the two levels as overlapping; try it)\n",
                least.arrangement,
                milliseconds(least.seconds),
                milliseconds(flat.seconds),
            ));
        }
        text
    }

    fn candidate(&self, arrangement: Arrangement) -> &ExchangeCost {
        let mut candidates = self.choice.candidates.iter();
        candidates.find(|exchange| exchange.arrangement == arrangement).expect("all are candidates")
    }
}

fn beside(exchange_s: f64, compute_s: f64) -> String {
    if exchange_s <= compute_s { "as they are".into() } else { format!("{:.2}x", exchange_s / compute_s) }
}

fn megabytes(bytes: f64) -> String {
    format!("{:.1}", bytes / 1e6)
}

fn milliseconds(seconds: f64) -> String {
    format!("{:.1} ms", seconds * 1e3)
}
