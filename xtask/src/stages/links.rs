//! Checks that the targets of the documentation exist: files and headings that its pages link to, source
//! files that they name, and the constants that docs/defaults.md lists.

use std::collections::{HashMap, HashSet};
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use crate::stage::Failure;

const DEFAULTS: &str = "docs/defaults.md";

pub(crate) fn check() -> Result<(), Failure> {
    let (pages, sources) = (tracked(&["*.md"])?, tracked(&["*.rs", "*.py", "*.c"])?);
    let mut broken = broken_links(&pages, |path| path.exists());
    broken.extend(missing_sources(&pages, &sources));
    broken.extend(missing_constants(&pages[Path::new(DEFAULTS)], &sources));
    if !broken.is_empty() {
        return Err(failure(format!("these do not exist:\n{}", broken.join("\n"))));
    }
    println!("{} pages: all that they link to and name exists", pages.len());
    Ok(())
}

fn failure(reason: String) -> Failure {
    Failure { reason, rerun: None }
}

/// The files of the repository that match, with their text.
fn tracked(patterns: &[&str]) -> Result<HashMap<PathBuf, String>, Failure> {
    let listed = Command::new("git").arg("ls-files").args(patterns).output();
    let listed = listed.map_err(|error| failure(format!("git cannot be run: {error}")))?;
    let read = |path: &str| match std::fs::read_to_string(path) {
        Ok(text) => Ok((PathBuf::from(path), text)),
        Err(error) => Err(failure(format!("{path} cannot be read: {error}"))),
    };
    String::from_utf8_lossy(&listed.stdout).lines().map(read).collect()
}

/// `PAGE: FILE` for each source file that a page names between backticks, by its path or the end of it, and
/// that does not exist.
fn missing_sources(pages: &HashMap<PathBuf, String>, sources: &HashMap<PathBuf, String>) -> Vec<String> {
    let is_source = |name: &str| sources.keys().any(|path| path.ends_with(name));
    let mut missing = Vec::new();
    for (page, text) in pages {
        for name in code_spans(text).filter(|name| is_source_file(name) && !is_source(name)) {
            missing.push(format!("{}: `{name}`", page.display()));
        }
    }
    missing.sort();
    missing
}

fn is_source_file(name: &str) -> bool {
    let is_path = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '/');
    (name.ends_with(".rs") || name.ends_with(".py")) && !name.starts_with('.') && name.chars().all(is_path)
}

/// `FILE: CONSTANT` for each constant that the table of defaults names and no source file has.
fn missing_constants(table: &str, sources: &HashMap<PathBuf, String>) -> Vec<String> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words: HashSet<&str> = sources.values().flat_map(|text| text.split(|c| !is_word(c))).collect();
    let is_constant = |name: &str| {
        name.len() > 3 && name.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_')
    };
    let named = code_spans(table).filter(|name| is_constant(name) && !words.contains(name));
    named.map(|name| format!("{DEFAULTS}: `{name}`")).collect()
}

/// The text between single backticks, outside fenced code.
fn code_spans(text: &str) -> impl Iterator<Item = &str> {
    prose(text).flat_map(|line| line.split('`').skip(1).step_by(2))
}

/// `PAGE: LINK` for each relative link of the pages to a missing file or heading.
fn broken_links(pages: &HashMap<PathBuf, String>, exists: impl Fn(&Path) -> bool) -> Vec<String> {
    let anchors: HashMap<&Path, HashSet<String>> =
        pages.iter().map(|(path, text)| (path.as_path(), anchors(text))).collect();
    let mut broken = Vec::new();
    for (page, text) in pages {
        for link in links(text) {
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = match file {
                "" => page.clone(),
                file => normal(&page.parent().unwrap_or(Path::new("")).join(file)),
            };
            let leads = match anchors.get(target.as_path()) {
                Some(anchors) => anchor.is_empty() || anchors.contains(anchor),
                None => exists(&target),
            };
            if !leads {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    broken.sort();
    broken
}

/// The targets of `[text](target)`, except those on other sites and those in code.
fn links(text: &str) -> Vec<&str> {
    let mut links = Vec::new();
    for line in prose(text) {
        // Every second part between backticks is code.
        let mut rest = line;
        while let Some(at) = rest.find("](") {
            let is_code = rest[..at].matches('`').count() % 2 == 1;
            rest = &rest[at + 2..];
            let Some(end) = rest.find([')', ' ']) else { break };
            let target = &rest[..end];
            if !is_code && !target.contains("://") && !target.starts_with("mailto:") {
                links.push(target);
            }
            if is_code {
                rest = rest.split_once('`').map_or("", |(_, after)| after);
            }
        }
    }
    links
}

/// The anchors of a page's headings, as GitHub and most other renderers make them.
fn anchors(text: &str) -> HashSet<String> {
    let mut counts: HashMap<String, u32> = HashMap::new();
    let headings = prose(text).filter(|line| line.starts_with('#'));
    headings
        .map(|line| {
            let heading = line.trim_start_matches('#').trim();
            let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
            let anchor: String =
                kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect();
            let count = counts.entry(anchor.clone()).or_default();
            *count += 1;
            if *count == 1 { anchor } else { format!("{anchor}-{}", *count - 1) }
        })
        .collect()
}

/// The lines outside fenced code.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut is_code = false;
    text.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    })
}

/// The path without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(normal.pop()),
            Component::CurDir => {}
            part => normal.push(part),
        }
    }
    normal
}

#[cfg(test)]
mod tests {
    use super::*;

    fn broken(pages: &[(&str, &str)]) -> Vec<String> {
        let pages = pages.iter().map(|&(path, text)| (path.into(), text.to_owned())).collect();
        broken_links(&pages, |path| path == Path::new("src/lib.rs"))
    }

    #[test]
    fn links_lead_to_files_and_headings() {
        let a = "# A page\n[b](docs/b.md#what-it-s-for) [c](docs/b.md#two--2nd_time) [d](src/lib.rs) [e](#a-page)\n\
                 [f](https://example.org/x.md)";
        let b = "## What it s for?\n## Two: `2nd_time`\n# Twice\n# Twice\n[up](../a.md) [again](#twice-1)";
        assert_eq!(
            broken(&[("a.md", a), ("docs/b.md", &b.replace("Two: ", "Two - "))]),
            ["a.md: docs/b.md#two--2nd_time"]
        );
        assert_eq!(broken(&[("a.md", a), ("docs/b.md", &b.replace("Two: ", "Two  "))]), Vec::<String>::new());
    }

    #[test]
    fn files_and_constants_that_are_named_exist() {
        let pages = [("a.md", "`core/lane.rs` `lane.rs` `ane.rs` `gone.rs` `--lane.rs x`")];
        let pages = pages.map(|(path, text)| (path.into(), text.to_owned())).into();
        let source = ("src/core/lane.rs".into(), "const TURN_BYTES: usize = 1;".to_owned());
        let sources = HashMap::from([source]);
        assert_eq!(missing_sources(&pages, &sources), ["a.md: `ane.rs`", "a.md: `gone.rs`"]);
        let table = "| x | `TURN_BYTES`, `TURN`, `URN_BYTES`, `lane.rs` |";
        let missing = ["`TURN`", "`URN_BYTES`"].map(|name| format!("{DEFAULTS}: {name}"));
        assert_eq!(missing_constants(table, &sources), missing);
    }

    #[test]
    fn broken_links_are_named_except_in_code() {
        let page = "[gone](gone.md) [no heading](#nothing)\n```\n[code](x.md)\n# Nothing\n```\n`[a](y.md)` [z](z.rs)";
        assert_eq!(broken(&[("a.md", page)]), ["a.md: #nothing", "a.md: gone.md", "a.md: z.rs"]);
    }
}
