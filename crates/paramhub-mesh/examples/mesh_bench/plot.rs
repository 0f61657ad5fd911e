//! The picture of the medians of single buffers: one panel for shared memory, one for TCP over loopback.

use std::path::Path;

use plotters::coord::combinators::LogCoord;
use plotters::coord::{CoordTranslate, Shift, cartesian::Cartesian2d};
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::Failure;
use super::team::{SMALL_REPEATS, TeamKind};

const WIDTH: i32 = 960;
const HEIGHT: i32 = 600;
const MARGIN: i32 = 24;
/// The lower edge of the panels.
const BOTTOM: i32 = HEIGHT - 76;
/// The left and the right edge of each panel. The labels of its vertical axis are to the left of it.
const PANELS: [(&str, [TeamKind; 2], i32, i32); 2] = [
    ("shared memory", [TeamKind::OpenMpi, TeamKind::Memory], 106, 474),
    ("TCP over loopback", [TeamKind::OpenMpiTcp, TeamKind::Tcp], 568, 936),
];
const BYTES_MIN: f64 = 4.0;
const BYTES_MAX: f64 = 64.0 * 1024.0 * 1024.0;
/// Each is 16 times the one before.
const BYTES_LABELS: [&str; 7] = ["4 B", "64 B", "1 KB", "16 KB", "256 KB", "4 MB", "64 MB"];

const INK: RGBColor = RGBColor(38, 38, 38);
const FAINT: RGBColor = RGBColor(110, 110, 110);
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
/// Height and colour.
type Font = (i32, RGBColor);
const TITLE: Font = (27, INK);
const TEXT: Font = (19, INK);
const LABEL: Font = (17, INK);
const NOTE: Font = (17, FAINT);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// The median of a team's times for one buffer.
pub(super) struct Timing {
    pub(super) kind: TeamKind,
    pub(super) ranks: usize,
    pub(super) bytes: usize,
    pub(super) microseconds: f64,
}

pub(super) fn write(path: &Path, timings: &[Timing], rounds: usize) -> Result<(), Failure> {
    let timings: Vec<&Timing> = timings.iter().filter(|timing| timing.bytes as f64 <= BYTES_MAX).collect();
    if timings.is_empty() {
        return Err("--plot draws single buffers of up to 64 MB, and none was measured".into());
    }
    let notes =
        format!("Medians of {rounds} rounds, the slowest rank; small buffers {SMALL_REPEATS} times in a row");
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH as u32, HEIGHT as u32)).into_drawing_area();
        area.fill(&WHITE)?;
        let title = "Allreduce of one buffer: paramhub's mesh and Open MPI";
        write_text(&area, title, (MARGIN, MARGIN), TITLE, HPos::Left)?;
        write_text(&area, &notes, (MARGIN, 59), NOTE, HPos::Left)?;
        let legend_bottom = draw_legend(&area, &timings)?;
        for panel in PANELS {
            draw_panel(&area, panel, legend_bottom + 60, &timings)?;
        }
        area.present()?;
    }
    Ok(std::fs::write(path, svg).map_err(|error| format!("cannot write {}: {error}", path.display()))?)
}

/// Says which lines are whose and which colour is for how many ranks. Returns the y of its lower edge.
fn draw_legend(area: &Area<'_>, timings: &[&Timing]) -> Result<i32, Failure> {
    let (mut x, mut y) = (MARGIN, 91);
    let teams = [("paramhub", false), ("Open MPI", true)];
    let taking_part =
        teams.into_iter().filter(|team| timings.iter().any(|timing| timing.kind.is_open_mpi() == team.1));
    for (name, is_open_mpi) in taking_part {
        let middle = y + TEXT.0 / 2;
        draw_line(area, &[(x, middle), (x + 34, middle)], INK, is_open_mpi)?;
        write_text(area, name, (x + 46, y), TEXT, HPos::Left)?;
        x += 156;
    }
    for (ranks, colour) in ranks_with_colours(timings) {
        if x + 120 > WIDTH - MARGIN {
            (x, y) = (MARGIN, y + 27);
        }
        area.draw(&Rectangle::new([(x, y + 2), (x + 18, y + 16)], colour.filled()))?;
        write_text(area, &format!("{ranks} ranks"), (x + 28, y), TEXT, HPos::Left)?;
        x += 120;
    }
    Ok(y + TEXT.0)
}

fn draw_panel(
    area: &Area<'_>,
    (name, kinds, left, right): (&str, [TeamKind; 2], i32, i32),
    top: i32,
    timings: &[&Timing],
) -> Result<(), Failure> {
    let middle = (left + right) / 2;
    write_text(area, name, (middle, top - 46), TEXT, HPos::Center)?;
    write_text(area, "microseconds", (left - 82, top - 30), NOTE, HPos::Left)?;
    write_text(area, "bytes of one buffer", (middle, BOTTOM + 38), TEXT, HPos::Center)?;
    // Whole powers of ten enclose the times of both panels.
    let decades = || timings.iter().map(|timing| timing.microseconds.log10().floor() as i32);
    let (lowest, highest) = (decades().min().unwrap_or(0), decades().max().unwrap_or(0) + 1);
    // The horizontal axis is a little longer than its values, so that no point lies on the edge of a panel.
    let scale = Cartesian2d::<LogCoord<f64>, LogCoord<f64>>::new(
        (BYTES_MIN / 1.6..BYTES_MAX * 1.6).log_scale(),
        (10_f64.powi(lowest)..10_f64.powi(highest)).log_scale(),
        (left..right, BOTTOM..top),
    );
    for tick in (lowest..=highest).map(|decade| 10_f64.powi(decade)) {
        let (_, y) = scale.translate(&(1.0, tick));
        area.draw(&PathElement::new([(left, y), (right, y)], RULE))?;
        write_text(area, &with_commas(tick), (left - 10, y - 6), LABEL, HPos::Right)?;
    }
    area.draw(&PathElement::new([(left, BOTTOM), (right, BOTTOM)], FAINT))?;
    for (sixteens, text) in (0..).zip(BYTES_LABELS) {
        let (x, _) = scale.translate(&(BYTES_MIN * 16_f64.powi(sixteens), 1.0));
        area.draw(&PathElement::new([(x, BOTTOM), (x, BOTTOM + 5)], FAINT))?;
        write_text(area, text, (x, BOTTOM + 10), LABEL, HPos::Center)?;
    }
    for kind in kinds {
        for (ranks, colour) in ranks_with_colours(timings) {
            let of_line = timings.iter().filter(|timing| timing.kind == kind && timing.ranks == ranks);
            let points = of_line.map(|timing| scale.translate(&(timing.bytes as f64, timing.microseconds)));
            let points: Vec<_> = points.collect();
            draw_line(area, &points, colour, kind.is_open_mpi())?;
            let radius = if kind.is_open_mpi() { 2 } else { 4 };
            for point in points {
                area.draw(&Circle::new(point, radius, colour.filled()))?;
            }
        }
    }
    Ok(())
}

fn ranks_with_colours(timings: &[&Timing]) -> impl Iterator<Item = (usize, RGBColor)> {
    // The timings of one number of ranks follow each other.
    let mut ranks: Vec<usize> = timings.iter().map(|timing| timing.ranks).collect();
    ranks.dedup();
    ranks.into_iter().zip(COLOURS.into_iter().cycle())
}

fn draw_line(
    area: &Area<'_>,
    points: &[(i32, i32)],
    colour: RGBColor,
    is_dashed: bool,
) -> Result<(), Failure> {
    let points = points.iter().copied();
    Ok(match is_dashed {
        true => area.draw(&DashedPathElement::new(points, 8, 6, colour.stroke_width(2))),
        false => area.draw(&PathElement::new(points.collect::<Vec<_>>(), colour.stroke_width(3))),
    }?)
}

/// Writes a text. `at` is the end or the middle of its upper edge that `side` names.
fn write_text(area: &Area<'_>, text: &str, at: (i32, i32), font: Font, side: HPos) -> Result<(), Failure> {
    let style = ("sans-serif", font.0).into_font().color(&font.1).pos(Pos::new(side, VPos::Top));
    Ok(area.draw(&Text::new(text, at, style))?)
}

/// The label of a power of ten.
fn with_commas(tick: f64) -> String {
    match tick {
        1e6.. => format!("{},000,000", tick / 1e6),
        1e3.. => format!("{},000", tick / 1e3),
        _ => tick.to_string(),
    }
}
