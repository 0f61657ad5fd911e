//! Finds and reads the configuration file, and says where it is wrong.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use crate::Usage;
use crate::config::Config;

/// The file that is read if it exists and no other is named.
const DEFAULT_FILE: &str = "paramhub.toml";

/// The file's configuration over the defaults.
pub(crate) fn load(named: Option<&Path>) -> anyhow::Result<Config> {
    let (path, required) = match named {
        Some(path) => (path.to_path_buf(), true),
        None => (PathBuf::from(DEFAULT_FILE), false),
    };
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(parse(&text).map_err(|error| Usage(format!("{}, {error}", path.display())))?),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !required => Ok(Config::default()),
        Err(error) => {
            Err(Usage(format!("the configuration {} cannot be read: {error}", path.display())).into())
        }
    }
}

fn parse(text: &str) -> Result<Config, String> {
    toml::from_str(text).map_err(|error| {
        let line = error.span().map_or(1, |span| 1 + text[..span.start].matches('\n').count());
        format!("line {line}: {}", explain(error.message()))
    })
}

/// Serde lists every key there is. A person wants the one that was meant.
fn explain(message: &str) -> String {
    let Some(rest) = message.strip_prefix("unknown field `") else {
        return message.trim_end().to_owned();
    };
    let mut quoted = rest.split('`');
    let unknown = quoted.next().unwrap_or_default();
    let known: Vec<&str> = quoted.skip(1).step_by(2).collect();
    let mut explained = format!("unknown key `{unknown}`");
    match known.iter().min_by_key(|key| distance(unknown, key)) {
        Some(nearest) if distance(unknown, nearest) <= unknown.len().max(nearest.len()) / 2 => {
            write!(explained, ": did you mean `{nearest}`?")
        }
        _ => write!(explained, ": there are {}", known.join(", ")),
    }
    .expect("a String takes all");
    explained
}

/// Levenshtein's distance: insertions, deletions and replacements between two words.
pub(crate) fn distance(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (above, a) in from.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = above + 1;
        for (at, &b) in to.iter().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[at + 1];
            row[at + 1] = replaced.min(diagonal + 1).min(row[at] + 1);
        }
    }
    row[to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_key_gets_its_line_and_the_nearest_known_one() {
        for (text, expected) in [
            (
                "url = 'x'\n[hub]\nlisten = []\ncoers = 2\n",
                "line 4: unknown key `coers`: did you mean `cores`?",
            ),
            ("\n[trian]\n", "line 2: unknown key `trian`: did you mean `train`?"),
            ("[run]\nzzzzzzzz = 1\n", "line 2: unknown key `zzzzzzzz`: there are workers, name"),
        ] {
            let refused = parse(text).unwrap_err();
            assert!(refused.starts_with(expected), "{refused}");
        }
    }

    #[test]
    fn a_wrong_value_is_explained_as_the_flag_would() {
        for (text, line, expected) in [
            ("[train]\n\nnet = 'resnet'\n", 3, "`resnet` is not a network"),
            ("[train]\noptimizer = 'mean'\n", 2, "updates no parameters"),
            ("[train]\nchunk_bytes = 'big'\n", 2, "is no size"),
            ("[hub]\nlisten = ['here']\n", 2, "socket address"),
            ("[hub]\ncores = 'two'\n", 2, "expected usize"),
            ("[hub\n", 1, "expected"),
        ] {
            let refused = parse(text).unwrap_err();
            assert!(
                refused.starts_with(&format!("line {line}: ")) && refused.contains(expected),
                "{refused}"
            );
        }
    }

    #[test]
    fn a_printed_configuration_reads_back_the_same() {
        let mut config = parse("admin_token = 'hidden'\n[train]\nworkers = 7\nchunk_bytes = 4096\n").unwrap();
        config.train.json = Some("out.json".into());
        let printed = config.to_toml();
        assert!(!printed.contains("hidden") && printed.contains("not shown"), "{printed}");
        let again = parse(&printed).unwrap();
        assert_eq!((again.train.workers(), again.train.chunk_bytes.0), (7, 4096));
        assert_eq!(
            again.to_toml(),
            printed.lines().skip(1).map(|line| format!("{line}\n")).collect::<String>()
        );
    }
}
