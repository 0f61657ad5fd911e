//! The command line of `cargo xtask release`.

/// One kind of what users install.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Wheels,
    Archive,
    Debian,
}

pub(crate) const ALL: [Part; 3] = [Part::Wheels, Part::Archive, Part::Debian];

pub(crate) const USAGE: &str = "\
Usage: cargo xtask release [wheels] [archive] [debian]

Builds, checks and tries out what users install, on x86-64 Linux and for it. Without a name it makes all.

  wheels    the Python package, for `pip install` without cargo or a compiler
  archive   the program, with systemd's units
  debian    Debian's package of the program and the units

Everything is in target/release-artifacts, whose former content is removed. See docs/releasing.md.
";

/// The parts that the arguments name, in the order in which they are made; `None` if help is asked for.
pub(crate) fn parse(arguments: impl Iterator<Item = String>) -> Result<Option<Vec<Part>>, String> {
    let mut named = Vec::new();
    for argument in arguments {
        named.push(match argument.as_str() {
            "wheels" => Part::Wheels,
            "archive" => Part::Archive,
            "debian" => Part::Debian,
            "-h" | "--help" | "help" => return Ok(None),
            _ => return Err(format!("a release has no part `{argument}`: give wheels, archive or debian")),
        });
    }
    Ok(Some(ALL.into_iter().filter(|part| named.is_empty() || named.contains(part)).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Option<Vec<Part>>, String> {
        parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn all_parts_are_made_unless_some_are_named() {
        assert_eq!(parsed(""), Ok(Some(ALL.to_vec())));
        assert_eq!(parsed("wheels"), Ok(Some(vec![Part::Wheels])));
        assert_eq!(parsed("debian wheels debian"), Ok(Some(vec![Part::Wheels, Part::Debian])));
    }

    #[test]
    fn help_wins_and_an_unknown_part_is_named() {
        assert_eq!(parsed("wheels --help"), Ok(None));
        assert!(parsed("wheels rpm").is_err_and(|problem| problem.contains("`rpm`")));
        assert!(parsed("--wheels").is_err_and(|problem| problem.contains("`--wheels`")));
    }
}
