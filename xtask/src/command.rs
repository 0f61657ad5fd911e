//! A child process, and the line by which a person can start it again.

use std::fmt;
use std::process::{Command, Stdio};

use crate::stage::Failure;

/// A program with its arguments and the environment it needs, run in the workspace root.
#[derive(Debug)]
pub(crate) struct Invocation {
    environment: Vec<(&'static str, String)>,
    program: String,
    arguments: Vec<String>,
}

impl Invocation {
    pub(crate) fn new(program: impl Into<String>) -> Self {
        Self { environment: Vec::new(), program: program.into(), arguments: Vec::new() }
    }

    /// Splits `line` at its spaces: for commands written in the source, where no argument holds one.
    pub(crate) fn parse(line: &str) -> Self {
        let mut words = line.split_whitespace();
        Self::new(words.next().expect("a command has a program")).args(words)
    }

    pub(crate) fn args<A: Into<String>>(mut self, arguments: impl IntoIterator<Item = A>) -> Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    pub(crate) fn env(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.environment.push((name, value.into()));
        self
    }

    /// Runs the program on our own output streams, so that the child's last lines are its own.
    pub(crate) fn run(&self) -> Result<(), Failure> {
        println!("$ {self}");
        match self.command().status() {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(Failure { reason: status.to_string(), rerun: Some(self.to_string()) }),
            Err(error) => Err(Failure {
                reason: format!("cannot start {}: {error}", self.program),
                rerun: Some(self.to_string()),
            }),
        }
    }

    /// Returns whether the program succeeds. Its output is discarded.
    pub(crate) fn succeeds(&self) -> bool {
        let status = self.command().stdout(Stdio::null()).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    }

    /// The program's output, trimmed; `None` if it fails.
    pub(crate) fn output(&self) -> Option<String> {
        let output = self.command().stderr(Stdio::null()).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_owned())
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).stdin(Stdio::null());
        // `cargo run` sets variables that describe the xtask package. If these were passed on, build scripts
        // that watch them would run again after each switch between `cargo xtask` and cargo itself.
        for (name, _) in std::env::vars_os() {
            if name.to_str().is_some_and(describes_a_package) {
                command.env_remove(&name);
            }
        }
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }
}

/// The invocation as a shell line.
impl fmt::Display for Invocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, value) in &self.environment {
            write!(f, "{name}={} ", quoted(value))?;
        }
        f.write_str(&quoted(&self.program))?;
        self.arguments.iter().try_for_each(|argument| write!(f, " {}", quoted(argument)))
    }
}

fn describes_a_package(variable: &str) -> bool {
    ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_"].iter().any(|prefix| variable.starts_with(prefix))
}

fn quoted(word: &str) -> String {
    let plain = |character: char| character.is_ascii_alphanumeric() || "-_=+/.,:@%".contains(character);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shown_line_means_the_same_to_a_shell() {
        let invocation =
            Invocation::new("printf").args(["%s|", "plain", "two words", "it's", "$HOME", "", "a;b"]);
        let shell = Invocation::new("sh").args(["-c", &invocation.to_string()]);
        assert_eq!(shell.output(), invocation.output());
        assert_eq!(invocation.output().as_deref(), Some("plain|two words|it's|$HOME||a;b|"));
    }

    #[test]
    fn the_shown_line_carries_the_environment() {
        let invocation = Invocation::parse("cargo doc --no-deps").env("RUSTDOCFLAGS", "-D warnings");
        assert_eq!(invocation.to_string(), "RUSTDOCFLAGS='-D warnings' cargo doc --no-deps");
    }

    #[test]
    fn a_failing_child_is_reported_with_its_status_and_line() {
        let failure = Invocation::new("sh").args(["-c", "exit 3"]).run().unwrap_err();
        assert!(failure.reason.contains('3'), "{failure:?}");
        assert_eq!(failure.rerun.as_deref(), Some("sh -c 'exit 3'"));
    }

    #[test]
    fn a_missing_program_is_reported_by_name() {
        let failure = Invocation::new("no-such-program-here").run().unwrap_err();
        assert!(failure.reason.contains("no-such-program-here"), "{failure:?}");
    }

    #[test]
    fn children_do_not_see_the_package_that_cargo_run_described() {
        let seen = Invocation::new("env").output().expect("env runs");
        let leaked = seen.lines().find(|line| describes_a_package(line));
        assert_eq!(leaked, None);
        assert!(std::env::vars().any(|(name, _)| describes_a_package(&name)), "cargo set none for this test");
    }
}
