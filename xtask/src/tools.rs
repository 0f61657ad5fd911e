//! Cargo's tools that are not part of a Rust installation.

use crate::command::Invocation;
use crate::stage::Failure;

/// A cargo subcommand that is published as a crate.
#[derive(Debug)]
pub(crate) struct CargoTool {
    /// The name of the crate and of the program.
    pub(crate) name: &'static str,
    /// Pinned, so that a release made tomorrow cannot break a build of today.
    pub(crate) version: &'static str,
}

impl CargoTool {
    /// The program: from the caller's PATH in any version, or from an earlier [`install`](Self::install) of
    /// this one.
    pub(crate) fn find(&self) -> Option<Invocation> {
        let version = |program: &str| Invocation::new(program).args(["--version"]).output();
        if version(self.name).is_some() {
            return Some(Invocation::new(self.name));
        }
        version(&self.installed_at())
            .filter(|version| version.contains(self.version))
            .map(|_| Invocation::new(self.installed_at()))
    }

    /// Builds the tool inside `target/`, where it does not conflict with an installation of the caller's and
    /// goes with `cargo clean`. The build is unoptimised, which saves minutes, and without default features,
    /// which only add updating itself.
    pub(crate) fn install(&self) -> Result<Invocation, Failure> {
        Invocation::parse("cargo install --locked --debug --no-default-features --root target/tools")
            .args(["--version", self.version, self.name])
            .run()?;
        Ok(Invocation::new(self.installed_at()))
    }

    fn installed_at(&self) -> String {
        format!("target/tools/bin/{}", self.name)
    }
}

/// Installs a component of the toolchain, such as rustfmt, if it is missing: minimal installations lack some.
pub(crate) fn ensure_component(component: &'static str, subcommand: &'static str) -> Result<(), Failure> {
    if Invocation::new("cargo").args([subcommand, "--version"]).succeeds() {
        return Ok(());
    }
    Invocation::new("rustup").args(["component", "add", component]).run().map_err(|_| Failure {
        reason: format!(
            "install the Rust component {component} (rustup component add {component}), then rerun"
        ),
        rerun: None,
    })
}
