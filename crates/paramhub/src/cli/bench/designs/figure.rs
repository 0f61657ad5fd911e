//! The results as the paper draws them (figures 13 to 15), and a step of each design as a timeline.

use std::path::Path;

use super::conduct::Row;
use super::contestant::{Carrier, Contestant, Design, KeyOrder};
use super::report::{Line, Summary};
use super::timeline::{self, COLOURS};
use crate::cli::bench::plot::{Column, Group, GroupPanel, Groups, Heading, Panel, Timelines};

/// In the order of colours.
const DESIGNS: [Design; 4] = [Design::Funnel, Design::ConCom, Design::DepCha, Design::Hub];

/// Epoch times over ranks: a panel for each carrier and order, a bar for each design.
pub(super) fn epochs(summary: &Summary) -> Groups {
    let mut panels: Vec<(Option<Carrier>, KeyOrder)> = Vec::new();
    for line in summary.ranks.iter().flat_map(|of| &of.rows) {
        let panel = (line.over, line.order);
        if !panels.contains(&panel) && line.design != Design::Hub {
            panels.push(panel);
        }
    }
    if panels.is_empty() {
        panels =
            summary.ranks.iter().flat_map(|of| &of.rows).map(|line| (None, line.order)).take(1).collect();
    }
    let setting = &summary.setting;
    let panels = panels.into_iter().map(|(over, order)| {
        let belongs = |line: &&Line| line.order == order && (line.over == over || line.design == Design::Hub);
        let groups = summary.ranks.iter().map(|of| {
            let columns = DESIGNS.iter().enumerate().filter_map(|(series, &design)| {
                let line = of.rows.iter().find(|line| belongs(line) && line.design == design)?;
                Some(Column {
                    series,
                    height: line.epoch_seconds,
                    range: (line.epoch_lowest, line.epoch_highest),
                    mark: line.epoch_bound_seconds,
                })
            });
            Group { name: format!("{} ranks", of.ranks), bars: columns.collect() }
        });
        let over = over.map_or("the hub", Carrier::label);
        let title = format!("over {over}, keys {}", order.label());
        GroupPanel { title, groups: groups.collect() }
    });
    let panels = panels.collect();
    Groups {
        heading: Heading {
            title: format!("{}: seconds of an epoch", setting.model),
            notes: vec![format!(
                "{} examples, batch {} a rank; medians of {} turns of {} steps, lowest and highest",
                setting.epoch_examples, setting.batch, setting.rounds, setting.steps
            )],
        },
        y_label: "seconds".into(),
        series: DESIGNS.map(|design| design.store().to_string()).into(),
        mark: "if only computation and one collective after the other took time".into(),
        panels,
    }
}

/// Writes what was traced: a file for each contestant and order, and for each carrier and order a picture of a step.
pub(super) fn write_timelines(
    folder: &Path,
    model: &str,
    contestants: &[Contestant],
    ranks: u32,
    rows: &[Row],
) -> anyhow::Result<()> {
    let mut pictures: Vec<(Option<Carrier>, KeyOrder)> = Vec::new();
    for row in rows {
        let contestant = contestants[row.contestant];
        let name = format!("{}-{}-{ranks}.json", contestant.slug(), row.order.slug());
        timeline::write(&folder.join(name), &row.timelines)?;
        let picture = (contestant.over, row.order);
        if !pictures.contains(&picture) {
            pictures.push(picture);
        }
    }
    for (over, order) in pictures {
        let panels = rows.iter().filter(|row| row.order == order).filter_map(|row| {
            let contestant = contestants[row.contestant];
            let belongs = contestant.over == over || contestant.design == Design::Hub;
            row.timelines.first().filter(|_| belongs)?.panel(contestant.label())
        });
        let carrier = over.map_or("hub", Carrier::label).to_lowercase();
        let name = format!("{carrier}-{}-{ranks}.svg", order.slug());
        steps(model, ranks, order, panels.collect()).write(&folder.join(name))?;
    }
    Ok(())
}

/// A step of each, below one another.
fn steps(model: &str, ranks: u32, order: KeyOrder, panels: Vec<Panel>) -> Timelines {
    Timelines {
        heading: Heading {
            title: format!("{model}: a step of rank 0 of {ranks}, keys {}", order.label()),
            notes: vec![
                "from the beginning of one step's forward pass to that of the next; each lane is a thread"
                    .into(),
            ],
        },
        colours: COLOURS.map(str::to_owned).into(),
        panels,
    }
}
