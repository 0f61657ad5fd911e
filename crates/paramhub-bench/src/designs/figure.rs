//! The results in the form of figures 13 to 15 of the paper on MPI collectives in dependency engines, and a
//! step of each design as a timeline.

use std::path::Path;

use super::driver::Row;
use super::report::{Line, RanksResults, Setting, Summary};
use super::scenario::{Carrier, Design, KeyOrder, Scenario};
use super::timeline::{self, COLOURS};
use crate::plot::{Column, Group, GroupPanel, Groups, Heading, Panel, Timelines};

/// The designs in the order of the colours.
const DESIGNS: [Design; 4] = [Design::Funnel, Design::ConCom, Design::DepCha, Design::Hub];

impl Summary {
    /// Epoch times over ranks: a panel for each carrier and order, a bar for each design.
    pub(crate) fn groups(&self) -> Groups {
        let lines = || self.ranks.iter().flat_map(|of| &of.rows);
        let has_collectives = lines().any(|line| line.over.is_some());
        let mut panels: Vec<(Option<Carrier>, KeyOrder)> = Vec::new();
        for line in lines().filter(|line| line.over.is_some() || !has_collectives) {
            if !panels.contains(&(line.over, line.order)) {
                panels.push((line.over, line.order));
            }
        }
        // Panels are ordered by carrier, as the carriers came.
        panels.sort_by_key(|(over, _)| lines().position(|line| line.over == *over));
        let mut ranks: Vec<&RanksResults> = self.ranks.iter().collect();
        ranks.sort_by_key(|of| of.ranks);
        let panels = panels.into_iter().map(|(over, order)| {
            let groups = ranks.iter().map(|of| {
                let bars = DESIGNS.iter().enumerate().filter_map(|(series, &design)| {
                    let belongs = |line: &&Line| line.over == over || design == Design::Hub;
                    let mut of_design =
                        of.rows.iter().filter(|line| line.design == design && line.order == order);
                    let line = of_design.find(belongs)?;
                    Some(Column {
                        series,
                        height: line.epoch_seconds,
                        range: (line.epoch_lowest, line.epoch_highest),
                        mark: line.epoch_bound_seconds,
                    })
                });
                Group { name: format!("{} ranks", of.ranks), bars: bars.collect() }
            });
            let over = over.map_or_else(String::new, |over| format!("over {}, ", over.label()));
            GroupPanel { title: format!("{over}keys {}", order.label()), groups: groups.collect() }
        });
        let panels = panels.collect();
        let setting = &self.setting;
        let stretch = self.ranks.first().map_or(1.0, |of| of.stretch);
        let scaled = match (setting.scale, stretch) {
            (1, 1.0) => String::new(),
            (scale, stretch) => {
                format!("; bytes and times divided by {scale}, computation multiplied by {stretch:.1}")
            }
        };
        let Setting { epoch_examples, batch, rounds, steps, .. } = setting;
        Groups {
            heading: Heading {
                title: format!("{}: seconds of an epoch", setting.model),
                notes: vec![format!(
                    "{epoch_examples} examples, batch {batch} a rank; medians of {rounds} turns of {steps} steps, lowest and highest{scaled}"
                )],
            },
            y_label: "seconds".into(),
            series: DESIGNS.map(|design| design.store().to_string()).into(),
            mark: "if only computation and one collective after the other took time".into(),
            panels,
        }
    }
}

/// Writes the traces: a file for each scenario and order, and for each carrier and order a picture of a step.
pub(super) fn write_timelines(
    folder: &Path,
    model: &str,
    scenarios: &[Scenario],
    ranks: u32,
    rows: &[Row],
) -> anyhow::Result<()> {
    let mut pictures: Vec<(Option<Carrier>, KeyOrder)> = Vec::new();
    for row in rows {
        let scenario = scenarios[row.scenario];
        let name = format!("{}-{}-{ranks}.json", scenario.slug(), row.order.slug());
        timeline::write(&folder.join(name), &row.timelines)?;
        let picture = (scenario.over, row.order);
        if !pictures.contains(&picture) {
            pictures.push(picture);
        }
    }
    for (over, order) in pictures {
        let panels = rows.iter().filter(|row| row.order == order).filter_map(|row| {
            let scenario = scenarios[row.scenario];
            let belongs = scenario.over == over || scenario.design == Design::Hub;
            row.timelines.first().filter(|_| belongs)?.panel(scenario.label())
        });
        let carrier = over.map_or("hub", Carrier::label).to_lowercase();
        let name = format!("{carrier}-{}-{ranks}.svg", order.slug());
        steps(model, ranks, order, panels.collect()).write(&folder.join(name))?;
    }
    Ok(())
}

/// A step of each design, one below another.
fn steps(model: &str, ranks: u32, order: KeyOrder, panels: Vec<Panel>) -> Timelines {
    Timelines {
        heading: Heading {
            title: format!("{model}: a step of rank 0 of {ranks}, keys {}", order.label()),
            notes: vec![
                "from the beginning of one step's forward pass to that of the next; each row is a thread"
                    .into(),
            ],
        },
        colours: COLOURS.map(str::to_owned).into(),
        panels,
    }
}
