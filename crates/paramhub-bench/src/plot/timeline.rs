//! Timelines: panels of rows, all on one scale of time.

use std::path::Path;

use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::bars::scratch;
use super::{
    Area, COLOURS, FAINT, Heading, INK, MARGIN, Mark, RULE, SMALL, TEXT, WIDTH, draw, draw_heading,
    short_number, ticks, width_of, write_text,
};

/// The height of a row.
const ROW: i32 = 26;
/// The height of the intervals in a row.
const INTERVAL: i32 = 20;
const TITLE_ROOM: i32 = TEXT + 10;
const BETWEEN: i32 = 14;
const FOOT: i32 = 60;

/// A timeline.
pub(crate) struct Timelines {
    pub(crate) heading: Heading,
    /// The meaning of the colours, by number.
    pub(crate) colours: Vec<String>,
    pub(crate) panels: Vec<Panel>,
}

/// Rows that belong together. Times begin at 0.
pub(crate) struct Panel {
    pub(crate) title: String,
    /// Seconds.
    pub(crate) length: f64,
    pub(crate) rows: Vec<TimelineRow>,
}

/// The intervals of one thread.
pub(crate) struct TimelineRow {
    pub(crate) name: String,
    pub(crate) intervals: Vec<Interval>,
}

/// An interval, in seconds from the panel's beginning.
#[derive(Clone, Copy)]
pub(crate) struct Interval {
    pub(crate) from: f64,
    pub(crate) to: f64,
    pub(crate) colour: usize,
}

impl Timelines {
    pub(crate) fn write(&self, path: &Path) -> anyhow::Result<()> {
        let legend: Vec<(&str, Mark)> = self
            .colours
            .iter()
            .enumerate()
            .map(|(at, name)| (name.as_str(), Mark::Box(COLOURS[at % COLOURS.len()])))
            .collect();
        let above = draw_heading(&scratch(&mut String::new()), &self.heading, &legend)?;
        let room = |panel: &Panel| TITLE_ROOM + ROW * panel.rows.len() as i32 + BETWEEN;
        let below = above + self.panels.iter().map(room).sum::<i32>();
        draw(path, (below + FOOT) as u32, |area| {
            draw_heading(area, &self.heading, &legend)?;
            let rows = || self.panels.iter().flat_map(|panel| &panel.rows);
            let left = MARGIN + rows().map(|row| width_of(&row.name, SMALL)).max().unwrap_or(0) + 10;
            let right = WIDTH as i32 - MARGIN;
            let longest = self.panels.iter().map(|panel| panel.length).fold(f64::MIN_POSITIVE, f64::max);
            let place = |seconds: f64| left + (seconds / longest * f64::from(right - left)).round() as i32;
            for tick in ticks(1e3 * longest, 8).into_iter().filter(|tick| *tick <= 1e3 * longest) {
                let x = place(tick / 1e3);
                area.draw(&PathElement::new([(x, above), (x, below)], RULE))?;
                write_text(area, &short_number(tick), (x, below + 6), SMALL, &INK, HPos::Center)?;
            }
            write_text(area, "milliseconds", ((left + right) / 2, below + 30), TEXT, &INK, HPos::Center)?;
            let mut top = above;
            for panel in &self.panels {
                draw_panel(area, panel, top, left, &place)?;
                top += room(panel);
            }
            Ok(())
        })
    }
}

fn draw_panel(
    area: &Area<'_>,
    panel: &Panel,
    top: i32,
    left: i32,
    place: &impl Fn(f64) -> i32,
) -> anyhow::Result<()> {
    write_text(area, &panel.title, (left, top + 2), TEXT, &INK, HPos::Left)?;
    for (number, row) in (0..).zip(&panel.rows) {
        let middle = top + TITLE_ROOM + ROW * number + ROW / 2;
        write_text(area, &row.name, (left - 10, middle - SMALL / 2), SMALL, &INK, HPos::Right)?;
        let base = [(left, middle + INTERVAL / 2), (place(panel.length), middle + INTERVAL / 2)];
        area.draw(&PathElement::new(base, FAINT))?;
        for (from, to, colour) in seen(&row.intervals, place) {
            let corners = [(from, middle - INTERVAL / 2), (to, middle + INTERVAL / 2)];
            area.draw(&Rectangle::new(corners, COLOURS[colour % COLOURS.len()].filled()))?;
        }
    }
    let end = place(panel.length);
    let bottom = top + TITLE_ROOM + ROW * panel.rows.len() as i32;
    area.draw(&PathElement::new([(end, top + TITLE_ROOM), (end, bottom)], INK.stroke_width(2)))?;
    Ok(())
}

/// The intervals that can be distinguished in the picture: from where to where, at least a pixel, in which
/// colour.
fn seen(intervals: &[Interval], place: &impl Fn(f64) -> i32) -> Vec<(i32, i32, usize)> {
    let mut sorted = intervals.to_vec();
    sorted.sort_by(|left, right| left.from.total_cmp(&right.from));
    let mut seen: Vec<(i32, i32, usize)> = Vec::new();
    for Interval { from, to, colour } in sorted {
        let (from, to) = (place(from), place(to).max(place(from) + 1));
        match seen.last_mut() {
            Some(last) if last.2 == colour && from <= last.1 => last.1 = last.1.max(to),
            _ => seen.push((from, to, colour)),
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_intervals_of_one_colour_are_one_piece() {
        let interval = |from: f64, to: f64, colour| Interval { from, to, colour };
        let intervals = [
            interval(5.0, 5.1, 1),
            interval(0.0, 2.0, 0),
            interval(2.4, 3.0, 0),
            interval(3.0, 5.0, 1),
            interval(8.0, 9.0, 1),
        ];
        let place = |at: f64| at as i32;
        assert_eq!(seen(&intervals, &place), [(0, 3, 0), (3, 6, 1), (8, 9, 1)]);
    }
}
