//! The measurements, as matrices and as JSON.

use comfy_table::{CellAlignment, Table, presets};
use paramhub_mesh::{Bandwidths, Pairs, Rate};
use serde::Serialize;

use super::places::Place;

/// Printed with `--json`. A row of a matrix sends, a column receives; the diagonal is null.
#[derive(Serialize)]
pub(super) struct Report {
    members: Vec<Member>,
    /// Whether disjoint pairs were measured at the same time.
    together: bool,
    /// Rates while nothing went the other way.
    alone_mbit_per_s: Matrix,
    /// Rates while the other way was used, too.
    both_mbit_per_s: Matrix,
    slowest: Option<Way>,
}

type Matrix = Vec<Vec<Option<f64>>>;

#[derive(Serialize)]
struct Member {
    rank: usize,
    host: String,
    address: String,
}

#[derive(Serialize)]
struct Way {
    from: usize,
    to: usize,
    mbit_per_s: f64,
}

impl Report {
    pub(super) fn new(places: &[Place], pairs: Pairs, measured: &Bandwidths) -> Report {
        let matrix = |rate: &dyn Fn(usize, usize) -> Option<Rate>| -> Matrix {
            let row = |from| (0..measured.size()).map(|to| rate(from, to).map(mbit_per_s)).collect();
            (0..measured.size()).map(row).collect()
        };
        let member = |(rank, place): (usize, &Place)| Member {
            rank,
            host: place.host.clone(),
            address: place.address.ip().to_string(),
        };
        Report {
            members: places.iter().enumerate().map(member).collect(),
            together: pairs == Pairs::Together,
            alone_mbit_per_s: matrix(&|from, to| measured.alone(from, to)),
            both_mbit_per_s: matrix(&|from, to| measured.both(from, to)),
            slowest: measured.slowest().map(|(from, to, rate)| Way {
                from,
                to,
                mbit_per_s: mbit_per_s(rate),
            }),
        }
    }

    /// The report as a table for people.
    pub(super) fn text(&self) -> String {
        let when = if self.together { "disjoint pairs at the same time" } else { "one pair after the other" };
        let mut text = format!("Mbit/s of payload over one TCP connection, rows to columns, {when}\n");
        for (title, matrix) in [("alone", &self.alone_mbit_per_s), ("both ways", &self.both_mbit_per_s)] {
            text.push_str(&format!("{}\n", self.table(title, matrix)));
        }
        if let Some(Way { from, to, mbit_per_s }) = self.slowest {
            text.push_str(&format!("slowest, both ways used: {from} to {to}, {mbit_per_s:.0} Mbit/s\n"));
        }
        text
    }

    fn table(&self, title: &str, matrix: &Matrix) -> Table {
        let mut table = Table::new();
        let columns = self.members.iter().map(|member| format!("to {}", member.rank));
        table.load_style(presets::UTF8_BORDERS_ONLY);
        table.set_header(std::iter::once(title.to_owned()).chain(columns));
        for (member, row) in self.members.iter().zip(matrix) {
            let name = format!("{} {} ({})", member.rank, member.host, member.address);
            let cell = |rate: &Option<f64>| rate.map_or("-".into(), |rate| format!("{rate:.0}"));
            table.add_row(std::iter::once(name).chain(row.iter().map(cell)));
        }
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table
    }
}

fn mbit_per_s(rate: Rate) -> f64 {
    // Rounded to kilobits: the measurement is no more exact.
    (rate.bits_per_second() / 1e3).round() / 1e3
}
