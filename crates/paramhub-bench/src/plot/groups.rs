//! Groups of upright bars at several values of a quantity, in panels below one another.

use std::path::Path;

use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::bars::scratch;
use super::{
    Area, COLOURS, FAINT, Heading, INK, MARGIN, Mark, RULE, SMALL, TEXT, WIDTH, draw, draw_heading,
    short_number, ticks, width_of, write_text,
};

/// The heights in a panel: of its bars, of its title above, and of the labels below.
const BARS: i32 = 150;
const ABOVE: i32 = 52;
const BELOW: i32 = 40;
/// The share of a group's room that stays free beside its bars.
const GAP_SHARE: f64 = 0.25;
/// The colour of marks, unlike that of any bar.
const MARK_COLOUR: RGBColor = COLOURS[5];

/// A plot of groups.
pub(crate) struct Groups {
    pub(crate) heading: Heading,
    pub(crate) y_label: String,
    /// The names of the bars, by colour.
    pub(crate) series: Vec<String>,
    /// The meaning of the bars' marks.
    pub(crate) mark: String,
    /// The panels, all on one scale.
    pub(crate) panels: Vec<GroupPanel>,
}

/// One panel.
pub(crate) struct GroupPanel {
    pub(crate) title: String,
    pub(crate) groups: Vec<Group>,
}

/// One value of the quantity.
pub(crate) struct Group {
    pub(crate) name: String,
    pub(crate) bars: Vec<Column>,
}

/// One upright bar.
pub(crate) struct Column {
    /// The number of its series, which is that of its colour.
    pub(crate) series: usize,
    pub(crate) height: f64,
    /// The lowest and the highest height of all rounds.
    pub(crate) range: (f64, f64),
    pub(crate) mark: f64,
}

impl Groups {
    pub(crate) fn write(&self, path: &Path) -> anyhow::Result<()> {
        let series = self.series.iter().enumerate().map(|(at, name)| (name.as_str(), Mark::Box(colour(at))));
        let legend: Vec<(&str, Mark)> =
            series.chain([(self.mark.as_str(), Mark::Tick(MARK_COLOUR))]).collect();
        let above = draw_heading(&scratch(&mut String::new()), &self.heading, &legend)?;
        let panel = ABOVE + BARS + BELOW;
        let height = above + panel * self.panels.len() as i32 + MARGIN;
        draw(path, height as u32, |area| {
            draw_heading(area, &self.heading, &legend)?;
            for (number, of_one) in (0..).zip(&self.panels) {
                self.panel(area, of_one, above + panel * number)?;
            }
            Ok(())
        })
    }

    fn panel(&self, area: &Area<'_>, panel: &GroupPanel, above: i32) -> anyhow::Result<()> {
        let reach = |bar: &Column| bar.height.max(bar.range.1).max(bar.mark);
        let bars = self.panels.iter().flat_map(|panel| &panel.groups).flat_map(|group| &group.bars);
        let scale = ticks(bars.map(reach).fold(f64::MIN_POSITIVE, f64::max), 4);
        let top = scale[scale.len() - 1];
        let widest = scale.iter().map(|&tick| width_of(&short_number(tick), SMALL)).max().unwrap_or(0);
        let (left, right) = (MARGIN + widest + 10, WIDTH as i32 - MARGIN);
        let bottom = above + ABOVE + BARS;
        let y = |value: f64| bottom - (value / top * f64::from(BARS)).round() as i32;
        write_text(area, &panel.title, ((left + right) / 2, above + 4), TEXT, &INK, HPos::Center)?;
        write_text(area, &self.y_label, (MARGIN, above + ABOVE - SMALL - 12), SMALL, &FAINT, HPos::Left)?;
        for &tick in &scale {
            area.draw(&PathElement::new([(left, y(tick)), (right, y(tick))], RULE))?;
            write_text(
                area,
                &short_number(tick),
                (left - 10, y(tick) - SMALL / 2),
                SMALL,
                &INK,
                HPos::Right,
            )?;
        }
        let room = f64::from(right - left) / panel.groups.len().max(1) as f64;
        for (number, group) in panel.groups.iter().enumerate() {
            let start = f64::from(left) + room * (number as f64 + GAP_SHARE / 2.0);
            let wide = room * (1.0 - GAP_SHARE) / group.bars.len().max(1) as f64;
            for (place, bar) in group.bars.iter().enumerate() {
                let from = (start + wide * place as f64).round() as i32 + 1;
                let to = (start + wide * (place + 1) as f64).round() as i32 - 1;
                let corners = [(from, y(bar.height)), (to, bottom)];
                area.draw(&Rectangle::new(corners, colour(bar.series).filled()))?;
                let (middle, (low, high)) = ((from + to) / 2, bar.range);
                area.draw(&PathElement::new([(middle, y(low)), (middle, y(high))], INK))?;
                let mark = [(from - 1, y(bar.mark)), (to + 1, y(bar.mark))];
                area.draw(&PathElement::new(mark, MARK_COLOUR.stroke_width(3)))?;
                let text = (middle, y(bar.height.max(high).max(bar.mark)) - SMALL - 2);
                write_text(area, &short_number(bar.height), text, SMALL - 3, &INK, HPos::Center)?;
            }
            let middle = (f64::from(left) + room * (number as f64 + 0.5)).round() as i32;
            write_text(area, &group.name, (middle, bottom + 8), SMALL, &INK, HPos::Center)?;
        }
        area.draw(&PathElement::new([(left, bottom), (right, bottom)], FAINT))?;
        Ok(())
    }
}

fn colour(number: usize) -> RGBColor {
    COLOURS[number % COLOURS.len()]
}
