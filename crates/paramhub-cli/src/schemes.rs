//! A plan of schemes as a table: the scheme of each layer, beside the alternatives.

use comfy_table::{CellAlignment, Table, presets};
use paramhub::scheme::{HubPlace, LayerType, LinkBytes, Plan, PlannedLayer, Scheme, Traffic};

/// The table for people: numbers that the busiest machine of each kind moves in a step, sent and received
/// together.
pub(super) fn text(plan: &Plan) -> String {
    let (planned, by_hub) = plan.costs();
    let mut text = format!("{}\n{}\n", heading(plan), table(plan));
    if planned < by_hub {
        text.push_str(&format!(
            "the busiest link carries {} MB one way in a step, through the hubs alone {} MB: {:.2} times as much\n",
            megabytes(planned),
            megabytes(by_hub),
            by_hub / planned,
        ));
    } else {
        text.push_str(&format!("the busiest link carries {} MB one way in a step\n", megabytes(planned)));
    }
    for planned in plan.rows().filter(|planned| !planned.keys.is_empty()) {
        text.push_str(&format!("{}: {}, {}\n", planned.layer.name, planned.scheme, planned.why));
    }
    text
}

fn heading(plan: &Plan) -> String {
    let cluster = &plan.cluster;
    let hubs = if cluster.hubs == 1 { "1 hub".to_owned() } else { format!("{} hubs", cluster.hubs) };
    let place = match cluster.place {
        HubPlace::BesideWorkers => "beside workers".to_owned(),
        HubPlace::Dedicated { width } => {
            format!("on machines of their own, each with {width:.2} times a worker's bandwidth")
        }
        HubPlace::Sites => "at several sites".to_owned(),
    };
    format!(
        "{} workers, {hubs} {place}; parameters moved in a step, sent and received: worker / hub / both",
        cluster.workers
    )
}

fn table(plan: &Plan) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    table.set_header(["layer", "size", "scheme", "by hub", "by factors", "by factors-to-hub"]);
    for planned in plan.rows() {
        let mut row = vec![planned.layer.name.clone(), size(planned), planned.scheme.to_string()];
        row.extend(Scheme::ALL.map(|scheme| traffic_cell(plan.numbers(planned, scheme))));
        table.add_row(row);
    }
    let total = |name: &str, traffic| {
        vec![
            name.to_owned(),
            String::new(),
            String::new(),
            traffic_cell(Some(traffic)),
            String::new(),
            String::new(),
        ]
    };
    table.add_row(total("in all, through the hubs", plan.total_numbers_by_hub()));
    table.add_row(total("in all, as planned", plan.total_numbers()));
    for column in 3..6 {
        table.column_mut(column).expect("every row has six cells").set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn size(planned: &PlannedLayer) -> String {
    match planned.layer.kind {
        LayerType::FullyConnected { outputs, inputs, samples, .. } => {
            format!("{outputs} x {inputs}, {samples} samples")
        }
        LayerType::Other { parameters } => parameters.to_string(),
    }
}

/// The numbers that a worker, a hub and a machine with both move, as Poseidon's table 1 has them.
fn traffic_cell(traffic: Option<Traffic>) -> String {
    let Some(Traffic { worker, hub, both }) = traffic else { return "-".to_owned() };
    [worker, hub, both].map(millions).join(" / ")
}

fn millions(moved: Option<LinkBytes>) -> String {
    moved.map_or_else(|| "-".to_owned(), |moved| format!("{:.2}M", (moved.sent + moved.received) / 1e6))
}

fn megabytes(bytes: f64) -> String {
    format!("{:.1}", bytes / 1e6)
}
