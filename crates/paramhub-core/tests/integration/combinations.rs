//! docs/combinations.md is printed from the table of what combines.

use std::fmt::Write;
use std::path::Path;

use paramhub_core::combinations::{Caller, Feature, Features, TOPICS, Verdict, conflict_of};

/// The variable with which the test writes the page instead of comparing it.
const RENEW: &str = "RENEW_PAGES";

/// The features of the matrix, with their headings there.
const MATRIX: [(Feature, &str); 13] = [
    (Feature::Asynchronous, "async"),
    (Feature::BoundedStaleness, "staleness"),
    (Feature::Reproducible, "reproducible"),
    (Feature::TwoPhase, "two phases"),
    (Feature::NoOptimizer, "mean, sum"),
    (Feature::Quantised, "quantised"),
    (Feature::Factors, "factors"),
    (Feature::FactorsToHub, "factors-to-hub"),
    (Feature::SeveralSites, "racks, hosts"),
    (Feature::LateLeftOut, "stragglers"),
    (Feature::ContinuesOverInterfaces, "on_interface_down"),
    (Feature::CheckpointEvery, "checkpoints"),
    (Feature::SharedParameters, "shared parameters"),
];

const INTRODUCTION: &str = "\
# What combines

This page is printed from the table in `crates/paramhub-core/src/combinations/rules`. Ranks, hubs, the connection
manager, the command line and the Python package all ask this one table. Everything else combines.

A message names the two, says why they do not combine, and what to do instead. \"Refused\" means that results would be
wrong, or that the two contradict each other. \"No effect\" means that the first would change nothing. An option of the
command line counts as asked for if it differs from its default. Bounds of single numbers are in
[defaults.md](defaults.md).

## A job at a glance

`x` marks what cannot be combined. `stragglers` stands for `drop` and `backup`, `on_interface_down` for `continue`. Where that
is excluded, but for racks and hosts, cut streams are not dialled again either, which is the default elsewhere
(`redial_grace`). What holds for some values only, as for checkpoints every so many steps, is in the tables below.

";

/// The callers as text for people.
fn callers(callers: &[Caller]) -> String {
    callers.iter().map(|caller| caller.name()).collect::<Vec<_>>().join(", ")
}

fn names(features: &[Feature]) -> String {
    features.iter().map(|feature| feature.name()).collect::<Vec<_>>().join("; ")
}

fn matrix() -> String {
    let mut lines = String::from("| |");
    MATRIX.iter().for_each(|(_, heading)| write!(lines, " {heading} |").unwrap());
    lines += "\n| --- |";
    lines += &" --- |".repeat(MATRIX.len());
    for (row, heading) in MATRIX {
        write!(lines, "\n| {heading} |").unwrap();
        for (column, _) in MATRIX {
            let is_refused = row != column && conflict_of(row, Features::NONE.with(column)).is_some();
            lines += if is_refused { " x |" } else { " |" };
        }
    }
    lines + "\n"
}

fn page() -> String {
    let mut page = INTRODUCTION.to_owned() + &matrix();
    for topic in TOPICS {
        write!(page, "\n## {}\n\n", topic.title).unwrap();
        page += "| this | with | verdict | why | what to do | asked by |\n";
        page += "| --- | --- | --- | --- | --- | --- |\n";
        for rule in topic.rules {
            let verdict = match rule.verdict {
                Verdict::Refused => "refused",
                Verdict::NoEffect => "no effect",
            };
            let (these, those) = (names(rule.these), names(rule.those));
            let (why, remedy, callers) = (rule.why, rule.remedy, callers(rule.callers));
            writeln!(page, "| {these} | {those} | {verdict} | {why} | {remedy} | {callers} |").unwrap();
        }
    }
    page
}

#[test]
fn the_page_of_combinations_is_that_of_the_table() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/combinations.md");
    if std::env::var_os(RENEW).is_some() {
        std::fs::write(&path, page()).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == page(),
        "docs/combinations.md differs from the table: renew it with `{RENEW}=1 cargo nextest run -p paramhub-core \
         the_page_of_combinations`"
    );
}
