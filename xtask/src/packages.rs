//! The packages of the system that a stage needs. xtask installs a missing one where the user may do so;
//! elsewhere it names the package, for the user to have it installed.

use crate::command::Invocation;
use crate::stage::Failure;

/// A program or library that comes with the system rather than with cargo.
#[derive(Debug)]
pub(crate) struct SystemProgram {
    pub(crate) name: &'static str,
    /// A command, with its arguments, that succeeds if the program or library is installed.
    pub(crate) probe: &'static [&'static str],
    /// The name of the package in Debian and its descendants.
    pub(crate) debian_package: &'static str,
}

impl SystemProgram {
    /// Installs the package if it is missing and the user may install packages. If it is still missing then,
    /// the failure names it.
    pub(crate) fn ensure(&self) -> Result<(), Failure> {
        if self.is_present() {
            return Ok(());
        }
        if let Some(privilege) = Privilege::of_caller() {
            let install =
                privilege.apt_get(&["install", "-y", "--no-install-recommends", self.debian_package]);
            // A new machine often has no package lists, or old ones, so a first failure means little. Whether
            // the second attempt failed is decided by the probe.
            if install.run().is_err() {
                let updated = privilege.apt_get(&["update"]).run();
                let _ = updated.and_then(|()| install.run());
            }
            if self.is_present() {
                return Ok(());
            }
        }
        Err(Failure {
            reason: format!(
                "install {} (on Debian the package {}), then rerun",
                self.name, self.debian_package
            ),
            rerun: None,
        })
    }

    fn is_present(&self) -> bool {
        let [program, arguments @ ..] = self.probe else { return false };
        Invocation::new(*program).args(arguments.iter().copied()).succeeds()
    }
}

/// The way in which the user who started xtask may run apt-get.
#[derive(Debug)]
enum Privilege {
    Root,
    Sudo,
}

impl Privilege {
    fn of_caller() -> Option<Self> {
        if !Invocation::parse("apt-get --version").succeeds() {
            None
        } else if Invocation::parse("id -u").output().as_deref() == Some("0") {
            Some(Self::Root)
        } else if Invocation::parse("sudo -n true").succeeds() {
            Some(Self::Sudo)
        } else {
            None
        }
    }

    fn apt_get(&self, arguments: &[&str]) -> Invocation {
        // sudo drops most environment variables, so it starts `env`, which sets this one.
        let command = match self {
            Self::Root => Invocation::new("env"),
            Self::Sudo => Invocation::parse("sudo -n env"),
        };
        command.args(["DEBIAN_FRONTEND=noninteractive", "apt-get"]).args(arguments.iter().copied())
    }
}
