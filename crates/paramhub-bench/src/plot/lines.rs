//! A line plot of measurements at several values of a quantity: a line for each series, with the lowest and the
//! highest of the repeated measurements at every point.

use std::path::Path;

use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::{
    Area, COLOURS, FAINT, Heading, INK, MARGIN, Mark, RULE, SMALL, TEXT, WIDTH, draw, draw_heading,
    short_number, ticks, width_of, write_text,
};

const HEIGHT: u32 = 560;
/// The horizontal space between the ranges of two series at one value, which are drawn side by side.
const RANGE_GAP: i32 = 8;
/// The space between the ends of the horizontal axis and the points nearest to them.
const EDGE_GAP: i32 = 36;
/// The space below the plot, for the labels of the horizontal axis.
const LABELS_BELOW: i32 = 76;
/// The most ticks of the vertical axis.
const TICKS_MAX: usize = 6;

/// How values map to positions on the horizontal axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scale {
    Linear,
    /// Equal distances for equal factors.
    Logarithmic,
}

impl Scale {
    fn position(self, value: f64) -> f64 {
        match self {
            Scale::Linear => value,
            Scale::Logarithmic => value.log2(),
        }
    }
}

/// A line plot.
pub(crate) struct Lines {
    pub(crate) heading: Heading,
    pub(crate) x_label: String,
    pub(crate) y_label: String,
    pub(crate) scale: Scale,
    /// Values of the horizontal axis, ascending, and their labels. There is at least one.
    pub(crate) values: Vec<(f64, String)>,
    pub(crate) series: Vec<Series>,
}

/// One line.
pub(crate) struct Series {
    pub(crate) name: String,
    /// `true` if other series are compared with this one.
    pub(crate) is_reference: bool,
    /// The points, one for each of the values, in their order.
    pub(crate) points: Vec<Point>,
}

/// The median, the lowest and the highest of the measurements at one value: of rounds, or of trainings with
/// several seeds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Point {
    pub(crate) median: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

impl Lines {
    /// Draws the plot and writes it as an SVG file.
    pub(crate) fn write(&self, path: &Path) -> anyhow::Result<()> {
        draw(path, HEIGHT, |area| {
            let colours: Vec<RGBColor> = (0..self.series.len()).map(|number| self.colour(number)).collect();
            let marked = self.series.iter().zip(&colours).map(|(series, &colour)| {
                let mark = if series.is_reference { Mark::Dashes(colour) } else { Mark::Line(colour) };
                (series.name.as_str(), mark)
            });
            let heading_bottom = draw_heading(area, &self.heading, &marked.collect::<Vec<_>>())?;
            let plot_area = PlotArea::new(self, heading_bottom);
            self.draw_axes(area, &plot_area)?;
            // Reference lines are drawn first, so that the others cover them. Ranges are drawn side by side.
            let (references, rest): (Vec<_>, Vec<_>) =
                self.series.iter().zip(&colours).partition(|(series, _)| series.is_reference);
            for (number, (series, &colour)) in (0..).zip(references.into_iter().chain(rest)) {
                plot_area.draw_series(area, series, colour, RANGE_GAP * number)?;
            }
            Ok(())
        })
    }

    /// The colour of a series. A reference line is grey.
    fn colour(&self, number: usize) -> RGBColor {
        let coloured_before = self.series[..number].iter().filter(|series| !series.is_reference).count();
        if self.series[number].is_reference { FAINT } else { COLOURS[coloured_before % COLOURS.len()] }
    }

    /// Draws the ticks and labels of both axes.
    fn draw_axes(&self, area: &Area<'_>, plot_area: &PlotArea) -> anyhow::Result<()> {
        write_text(area, &self.y_label, (MARGIN, plot_area.top - TEXT - 14), SMALL, &FAINT, HPos::Left)?;
        for &tick in &plot_area.ticks {
            let y = plot_area.y(tick);
            area.draw(&PathElement::new([(plot_area.left, y), (plot_area.right, y)], RULE))?;
            write_text(
                area,
                &short_number(tick),
                (plot_area.left - 10, y - SMALL / 2 + 2),
                SMALL,
                &INK,
                HPos::Right,
            )?;
        }
        let bottom = plot_area.y(0.0);
        area.draw(&PathElement::new([(plot_area.left, bottom), (plot_area.right, bottom)], FAINT))?;
        for (&x, (_, text)) in plot_area.columns.iter().zip(&self.values) {
            area.draw(&PathElement::new([(x, bottom), (x, bottom + 5)], FAINT))?;
            write_text(area, text, (x, bottom + 10), SMALL, &INK, HPos::Center)?;
        }
        let middle = (plot_area.left + plot_area.right) / 2;
        write_text(area, &self.x_label, (middle, bottom + 38), TEXT, &INK, HPos::Center)
    }
}

/// The part of the picture between the axes, in pixels, which maps values to positions.
struct PlotArea {
    left: i32,
    right: i32,
    top: i32,
    bottom: i32,
    /// The ticks of the vertical axis, 0 first.
    ticks: Vec<f64>,
    /// The horizontal position of every value.
    columns: Vec<i32>,
}

impl PlotArea {
    fn new(lines: &Lines, heading_bottom: i32) -> PlotArea {
        let points = lines.series.iter().flat_map(|series| &series.points);
        let ticks = ticks(points.map(|point| point.high).fold(f64::MIN_POSITIVE, f64::max), TICKS_MAX);
        let widest = ticks.iter().map(|&tick| width_of(&short_number(tick), SMALL)).max().unwrap_or(0);
        let (left, right) = (MARGIN + widest + 10, WIDTH as i32 - MARGIN - 12);
        let positions: Vec<f64> =
            lines.values.iter().map(|&(value, _)| lines.scale.position(value)).collect();
        let (first, last) = (positions[0], positions[positions.len() - 1]);
        let (start, room) = (left + EDGE_GAP, right - left - 2 * EDGE_GAP);
        let column = |position: f64| match last > first {
            true => start + ((position - first) / (last - first) * f64::from(room)).round() as i32,
            false => start + room / 2,
        };
        let columns = positions.into_iter().map(column).collect();
        PlotArea {
            left,
            right,
            // The label of the vertical axis lies between the heading and the plot.
            top: heading_bottom + TEXT + 16,
            bottom: HEIGHT as i32 - LABELS_BELOW,
            ticks,
            columns,
        }
    }

    /// The vertical position of a value.
    fn y(&self, value: f64) -> i32 {
        let highest = self.ticks[self.ticks.len() - 1];
        self.bottom - (value / highest * f64::from(self.bottom - self.top)).round() as i32
    }

    /// Draws a series: its line, the ranges of its points, moved to the right by `shift_px`, and its points.
    fn draw_series(
        &self,
        area: &Area<'_>,
        series: &Series,
        colour: RGBColor,
        shift_px: i32,
    ) -> anyhow::Result<()> {
        let points = || self.columns.iter().copied().zip(&series.points);
        let line: Vec<(i32, i32)> = points().map(|(x, point)| (x, self.y(point.median))).collect();
        if series.is_reference {
            area.draw(&DashedPathElement::new(line.clone(), 8, 6, colour.stroke_width(2)))?;
        } else {
            area.draw(&PathElement::new(line.clone(), colour.stroke_width(3)))?;
        }
        for (x, point) in points().filter(|(_, point)| point.low < point.high) {
            let (x, low, high) = (x + shift_px, self.y(point.low), self.y(point.high));
            for stroke in
                [[(x, low), (x, high)], [(x - 3, low), (x + 3, low)], [(x - 3, high), (x + 3, high)]]
            {
                area.draw(&PathElement::new(stroke, colour))?;
            }
        }
        for at in line {
            area.draw(&Circle::new(at, if series.is_reference { 3 } else { 5 }, colour.filled()))?;
        }
        Ok(())
    }
}
