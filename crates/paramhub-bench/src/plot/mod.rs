//! Results as pictures. Each picture is one SVG file with a white background, readable on light and dark pages alike.

mod bars;
mod groups;
mod lines;
mod timeline;

use std::path::Path;

use anyhow::Context;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

pub(super) use bars::{Bar, Bars, Part};
pub(super) use groups::{Column, Group, GroupPanel, Groups};
pub(super) use lines::{Lines, Point, Scale, Series};
pub(super) use timeline::{Interval, Panel, TimelineRow, Timelines};

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

const WIDTH: u32 = 960;
/// The margin on all sides.
const MARGIN: i32 = 24;
/// The colour of text and of ranges.
const INK: RGBColor = RGBColor(38, 38, 38);
/// The colour of notes, of axes and of what results are compared with.
const FAINT: RGBColor = RGBColor(110, 110, 110);
/// The colour of the lines at the numbers of a scale.
const RULE: RGBColor = RGBColor(222, 222, 222);
/// Colours that people with colour blindness can distinguish, too (Okabe and Ito).
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
];
/// The backend takes the height of text as its size.
const TITLE: i32 = 27;
const TEXT: i32 = 19;
const SMALL: i32 = 17;

/// The text above a picture.
pub(super) struct Heading {
    pub(super) title: String,
    /// The measured quantity and the way of measuring it, one item per line.
    pub(super) notes: Vec<String>,
}

/// Draws into a picture of this height and writes it.
fn draw(
    path: &Path,
    height: u32,
    content: impl FnOnce(&Area<'_>) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        area.fill(&WHITE)?;
        content(&area)?;
        area.present()?;
    }
    std::fs::write(path, svg).with_context(|| format!("cannot write {}", path.display()))
}

/// Draws the heading and a legend below it. Returns the y at which the rest of the picture begins.
fn draw_heading(area: &Area<'_>, heading: &Heading, legend: &[(&str, Mark)]) -> anyhow::Result<i32> {
    let mut y = MARGIN;
    let room = WIDTH as i32 - 2 * MARGIN;
    for line in lines_of(&heading.title, TITLE, room) {
        write_text(area, &line, (MARGIN, y), TITLE, &INK, HPos::Left)?;
        y += TITLE + 8;
    }
    for line in heading.notes.iter().flat_map(|note| lines_of(note, SMALL, room)) {
        write_text(area, &line, (MARGIN, y), SMALL, &FAINT, HPos::Left)?;
        y += SMALL + 5;
    }
    y += 10;
    let mut x = MARGIN;
    for (name, mark) in legend {
        let needed = 34 + width_of(name, TEXT) + 26;
        if x > MARGIN && x + needed > WIDTH as i32 - MARGIN {
            (x, y) = (MARGIN, y + TEXT + 8);
        }
        mark.draw(area, (x, y + TEXT / 2))?;
        write_text(area, name, (x + 34, y), TEXT, &INK, HPos::Left)?;
        x += needed;
    }
    Ok(if legend.is_empty() { y } else { y + TEXT + 14 })
}

/// The symbol in a legend of what a picture shows: a line, a part of bars, a mark.
#[derive(Clone, Copy)]
enum Mark {
    Line(RGBColor),
    Dashes(RGBColor),
    Box(RGBColor),
    Tick(RGBColor),
}

impl Mark {
    fn draw(self, area: &Area<'_>, (x, y): (i32, i32)) -> anyhow::Result<()> {
        match self {
            Mark::Line(colour) => {
                area.draw(&PathElement::new([(x, y), (x + 26, y)], colour.stroke_width(3)))?;
                area.draw(&Circle::new((x + 13, y), 4, colour.filled()))?;
            }
            Mark::Dashes(colour) => {
                for start in [x, x + 10, x + 20] {
                    area.draw(&PathElement::new([(start, y), (start + 6, y)], colour.stroke_width(3)))?;
                }
            }
            Mark::Tick(colour) => {
                area.draw(&PathElement::new([(x + 15, y - 10), (x + 15, y + 10)], colour.stroke_width(3)))?;
            }
            Mark::Box(colour) => {
                area.draw(&Rectangle::new([(x + 6, y - 7), (x + 24, y + 7)], colour.filled()))?;
            }
        }
        Ok(())
    }
}

/// Writes a text. `at` is a point of its upper edge: the end or the middle of that edge that `side` names.
fn write_text(
    area: &Area<'_>,
    text: &str,
    at: (i32, i32),
    size: i32,
    colour: &RGBColor,
    side: HPos,
) -> anyhow::Result<()> {
    let style = ("sans-serif", size).into_font().color(colour).pos(Pos::new(side, VPos::Top));
    area.draw(&Text::new(text, at, style))?;
    Ok(())
}

/// Breaks a text between words if it would be too wide.
fn lines_of(text: &str, size: i32, width: i32) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if width_of(line, size) + width_of(word, size) + size / 2 <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// An upper estimate of a text's width: the viewer of the picture chooses the font.
fn width_of(text: &str, size: i32) -> i32 {
    (text.chars().count() as f64 * f64::from(size) * 0.48) as i32
}

/// Round numbers from 0 on, at most `count` of them above it, the last not below `top`.
fn ticks(top: f64, count: usize) -> Vec<f64> {
    let rough = top / count as f64;
    let magnitude = 10_f64.powf(rough.log10().floor());
    let step =
        [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|factor| factor * magnitude).find(|step| *step >= rough);
    let step = step.unwrap_or(rough);
    (0..=(top / step).ceil() as usize).map(|tick| tick as f64 * step).collect()
}

/// A number with as many digits as a label needs.
fn short_number(value: f64) -> String {
    let digits = match value.abs() {
        size if size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 1.0 => 2,
        _ => 3,
    };
    let text = format!("{value:.digits$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_reach_the_top() {
        assert_eq!(ticks(9.3, 5), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ticks(0.8, 4), [0.0, 0.2, 0.4, 0.6000000000000001, 0.8]);
        assert_eq!(ticks(1234.0, 5), [0.0, 250.0, 500.0, 750.0, 1000.0, 1250.0]);
    }

    #[test]
    fn long_texts_are_broken_between_words() {
        let text = "four workers, two cores at the hub, one stream a worker and core";
        let lines = lines_of(text, SMALL, 200);
        assert!(lines.len() > 2 && lines.iter().all(|line| width_of(line, SMALL) <= 200), "{lines:?}");
        assert_eq!(lines.join(" "), text);
        assert_eq!(lines_of("incomprehensibilities", SMALL, 10), ["incomprehensibilities"]);
    }

    #[test]
    fn labels_have_no_needless_zeros() {
        assert_eq!(
            [250.0, 12.5, 2.0, 0.25, 0.0, 1e3].map(short_number),
            ["250", "12.5", "2", "0.25", "0", "1000"]
        );
    }
}
