//! A horizontal bar for each result, of one part or of several.

use std::path::Path;

use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::{
    Area, COLOURS, FAINT, Heading, INK, MARGIN, Mark, RULE, SMALL, TEXT, WIDTH, draw, draw_heading,
    short_number, ticks, width_of, write_text,
};

const ROW: i32 = 40;
const BAR: i32 = 24;
/// The space between a bar and the text beside it.
const GAP: i32 = 10;
/// The height of the scale below the bars and its label.
const FOOT: i32 = 64;
/// The colour of marks, unlike that of any bar.
const BOUND: RGBColor = COLOURS[5];

/// A bar plot.
pub(crate) struct Bars {
    pub(crate) heading: Heading,
    /// The label of the lengths.
    pub(crate) x_label: String,
    /// Names of the parts, in the order of the bars' parts; empty if every bar has one part.
    pub(crate) parts: Vec<String>,
    /// A length with which all bars are compared, and its name.
    pub(crate) line: Option<(f64, String)>,
    /// The meaning of the bars' marks.
    pub(crate) marks: Option<String>,
    pub(crate) bars: Vec<Bar>,
}

/// One bar.
pub(crate) struct Bar {
    pub(crate) name: String,
    /// The parts, from the left on.
    pub(crate) parts: Vec<Part>,
    /// The lowest and the highest round.
    pub(crate) range: Option<(f64, f64)>,
    /// A length with which this bar is compared.
    pub(crate) mark: Option<f64>,
    /// The text beside its end.
    pub(crate) note: String,
}

/// A piece of a bar.
pub(crate) struct Part {
    pub(crate) length: f64,
    /// The number of its colour. Parts with one meaning have one colour.
    pub(crate) colour: usize,
    /// The text inside, if it fits.
    pub(crate) text: String,
}

impl Bar {
    fn length(&self) -> f64 {
        self.parts.iter().map(|part| part.length).sum()
    }

    fn reach(&self) -> f64 {
        let high = self.range.map_or(0.0, |(_, high)| high);
        high.max(self.mark.unwrap_or(0.0)).max(self.length())
    }
}

impl Bars {
    pub(crate) fn write(&self, path: &Path) -> anyhow::Result<()> {
        let parts = (0..).zip(&self.parts).map(|(number, name)| (name.as_str(), Mark::Box(colour(number))));
        let line = self.line.iter().map(|(_, name)| (name.as_str(), Mark::Dashes(FAINT)));
        let marks = self.marks.iter().map(|name| (name.as_str(), Mark::Tick(BOUND)));
        let legend: Vec<(&str, Mark)> = parts.chain(line).chain(marks).collect();
        // The heading is laid out once to learn its height.
        let above = draw_heading(&scratch(&mut String::new()), &self.heading, &legend)?;
        let height = above + ROW * self.bars.len() as i32 + FOOT;
        draw(path, height as u32, |area| {
            draw_heading(area, &self.heading, &legend)?;
            self.draw(area, above)
        })
    }

    fn draw(&self, area: &Area<'_>, above: i32) -> anyhow::Result<()> {
        let widest = |texts: &mut dyn Iterator<Item = &String>, size| {
            texts.map(|text| width_of(text, size)).max().unwrap_or(0)
        };
        let left = MARGIN + widest(&mut self.bars.iter().map(|bar| &bar.name), TEXT) + GAP;
        let right = WIDTH as i32 - MARGIN - widest(&mut self.bars.iter().map(|bar| &bar.note), TEXT) - GAP;
        let right = right.max(left + 200);
        let line = self.line.as_ref().map(|&(length, _)| length);
        let top = self.bars.iter().map(Bar::reach).chain(line).fold(f64::MIN_POSITIVE, f64::max);
        let scale = ticks(top, 6);
        // The notes need no room beyond the longest bar, so the scale ends there and not at the next round
        // number.
        let place = |value: f64| left + (value / top * f64::from(right - left)).round() as i32;
        let below = above + ROW * self.bars.len() as i32;
        for &tick in scale.iter().filter(|&&tick| tick <= top) {
            let x = place(tick);
            area.draw(&PathElement::new([(x, above), (x, below)], RULE))?;
            write_text(area, &short_number(tick), (x, below + 6), SMALL, &INK, HPos::Center)?;
        }
        write_text(area, &self.x_label, ((left + right) / 2, below + 32), TEXT, &INK, HPos::Center)?;
        for (row, bar) in (0..).zip(&self.bars) {
            let middle = above + ROW * row + ROW / 2;
            let text = middle - TEXT / 2;
            write_text(area, &bar.name, (left - GAP, text), TEXT, &INK, HPos::Right)?;
            let mut end = 0.0;
            for part in &bar.parts {
                let (from, to) = (place(end), place(end + part.length));
                end += part.length;
                let corners = [(from, middle - BAR / 2), (to, middle + BAR / 2)];
                area.draw(&Rectangle::new(corners, colour(part.colour).filled()))?;
                if width_of(&part.text, SMALL) + 4 < to - from {
                    let at = ((from + to) / 2, middle - SMALL / 2);
                    write_text(area, &part.text, at, SMALL, ink_on(part.colour), HPos::Center)?;
                }
            }
            if let Some(mark) = bar.mark {
                let [above, below] = [middle - ROW / 2 + 3, middle + ROW / 2 - 3];
                let path = [(place(mark), above), (place(mark), below)];
                area.draw(&PathElement::new(path, BOUND.stroke_width(3)))?;
            }
            if let Some((low, high)) = bar.range {
                area.draw(&PathElement::new([(place(low), middle), (place(high), middle)], INK))?;
                for end in [low, high] {
                    area.draw(&PathElement::new([(place(end), middle - 5), (place(end), middle + 5)], INK))?;
                }
            }
            write_text(area, &bar.note, (place(bar.reach()) + GAP, text), TEXT, &INK, HPos::Left)?;
        }
        if let Some(length) = line {
            let path = [(place(length), above), (place(length), below)];
            area.draw(&DashedPathElement::new(path, 8, 6, FAINT.stroke_width(2)))?;
        }
        area.draw(&PathElement::new([(left, above), (left, below)], FAINT))?;
        Ok(())
    }
}

fn colour(number: usize) -> RGBColor {
    COLOURS[number % COLOURS.len()]
}

/// A colour of text that is readable on that colour.
fn ink_on(number: usize) -> &'static RGBColor {
    let RGBColor(red, green, blue) = colour(number);
    let lightness = 0.3 * f64::from(red) + 0.59 * f64::from(green) + 0.11 * f64::from(blue);
    if lightness > 120.0 { &INK } else { &WHITE }
}

pub(super) fn scratch(svg: &mut String) -> Area<'_> {
    SVGBackend::with_string(svg, (WIDTH, 1)).into_drawing_area()
}
