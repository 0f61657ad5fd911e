//! A horizontal bar for each result, of one part or of several.

use std::path::Path;

use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::{
    Area, COLOURS, FAINT, Heading, INK, MARGIN, Mark, RULE, SMALL, TEXT, WIDTH, draw, draw_heading,
    short_number, ticks, width_of, write_text,
};

/// The height of a bar with the space above and below it.
const ROW: i32 = 40;
/// The height of a bar.
const BAR: i32 = 24;
/// The space between a bar and the text beside it.
const GAP: i32 = 10;
/// The height of the scale below the bars and its label.
const FOOT: i32 = 64;
/// The colour of marks, unlike that of any bar.
const MARK_COLOUR: RGBColor = COLOURS[5];

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
    /// The lowest and the highest length of all rounds.
    pub(crate) range: Option<(f64, f64)>,
    /// A length with which this bar is compared.
    pub(crate) mark: Option<f64>,
    /// The text on the right of the bar, its range and its mark.
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

    /// The largest length that is drawn for this bar: its own, or that of its range or its mark.
    fn reach(&self) -> f64 {
        let high = self.range.map_or(0.0, |(_, high)| high);
        high.max(self.mark.unwrap_or(0.0)).max(self.length())
    }
}

impl Bars {
    pub(crate) fn write(&self, path: &Path) -> anyhow::Result<()> {
        let parts = (0..).zip(&self.parts).map(|(number, name)| (name.as_str(), Mark::Box(colour(number))));
        let line = self.line.iter().map(|(_, name)| (name.as_str(), Mark::Dashes(FAINT)));
        let marks = self.marks.iter().map(|name| (name.as_str(), Mark::Tick(MARK_COLOUR)));
        let legend: Vec<(&str, Mark)> = parts.chain(line).chain(marks).collect();
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
        // Bars get this width even if their names and notes are long.
        let right = right.max(left + 200);
        let line = self.line.as_ref().map(|&(length, _)| length);
        let longest = self.bars.iter().map(Bar::reach).chain(line).fold(f64::MIN_POSITIVE, f64::max);
        let scale = ticks(longest, 6);
        // The scale ends at the longest length, and not at the next round number, so that the bars get all the
        // width between names and notes.
        let place = |value: f64| left + (value / longest * f64::from(right - left)).round() as i32;
        let below = above + ROW * self.bars.len() as i32;
        for &tick in scale.iter().filter(|&&tick| tick <= longest) {
            let x = place(tick);
            area.draw(&PathElement::new([(x, above), (x, below)], RULE))?;
            write_text(area, &short_number(tick), (x, below + 6), SMALL, &INK, HPos::Center)?;
        }
        write_text(area, &self.x_label, ((left + right) / 2, below + 32), TEXT, &INK, HPos::Center)?;
        for (row, bar) in (0..).zip(&self.bars) {
            let middle = above + ROW * row + ROW / 2;
            let text_top = middle - TEXT / 2;
            write_text(area, &bar.name, (left - GAP, text_top), TEXT, &INK, HPos::Right)?;
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
                let [mark_top, mark_bottom] = [middle - ROW / 2 + 3, middle + ROW / 2 - 3];
                let path = [(place(mark), mark_top), (place(mark), mark_bottom)];
                area.draw(&PathElement::new(path, MARK_COLOUR.stroke_width(3)))?;
            }
            if let Some((low, high)) = bar.range {
                area.draw(&PathElement::new([(place(low), middle), (place(high), middle)], INK))?;
                for end in [low, high] {
                    area.draw(&PathElement::new([(place(end), middle - 5), (place(end), middle + 5)], INK))?;
                }
            }
            write_text(area, &bar.note, (place(bar.reach()) + GAP, text_top), TEXT, &INK, HPos::Left)?;
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

/// The colour of text that is readable on the colour of this number.
fn ink_on(number: usize) -> &'static RGBColor {
    let RGBColor(red, green, blue) = colour(number);
    let lightness = 0.3 * f64::from(red) + 0.59 * f64::from(green) + 0.11 * f64::from(blue);
    if lightness > 120.0 { &INK } else { &WHITE }
}

/// Makes an area that keeps no picture. A heading is drawn there to learn its height.
pub(super) fn scratch(svg: &mut String) -> Area<'_> {
    SVGBackend::with_string(svg, (WIDTH, 1)).into_drawing_area()
}
