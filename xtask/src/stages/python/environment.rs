//! Virtual environments under `target/python`.

use crate::command::Invocation;
use crate::stage::Failure;

/// One virtual environment of a Python on the caller's PATH.
#[derive(Debug)]
pub(super) struct Environment {
    folder: String,
    base: &'static str,
}

impl Environment {
    pub(super) fn new(name: &str) -> Self {
        Self::of(name, "python3")
    }

    /// An environment of the Python with this name on PATH.
    pub(super) fn of(name: &str, base: &'static str) -> Self {
        Self { folder: format!("target/python/{name}"), base }
    }

    /// Creates the environment, or keeps one of the same interpreter: filling one again takes minutes.
    pub(super) fn create_unless_there(&self) -> Result<(), Failure> {
        let version = |python: Invocation| python.args(["-c", "import sys; print(sys.version)"]).output();
        let wanted = version(Invocation::new(self.base));
        if wanted.is_some() && version(self.python()) == wanted {
            return Ok(());
        }
        self.create_anew()
    }

    pub(super) fn create_anew(&self) -> Result<(), Failure> {
        Invocation::new(self.base).args(["-m", "venv", "--clear", &self.folder]).run()
    }

    /// Installs packages into the environment. uv takes seconds where pip takes minutes, and no time if all
    /// are installed already. If uv fails, pip installs them: uv does not read pip's settings, which may name
    /// the source of packages.
    ///
    /// Their bytecode is compiled, as pip does, since hundreds of processes import torch: where Python may write
    /// none (`PYTHONDONTWRITEBYTECODE`), each would compile it for itself, and take twice as long to start.
    pub(super) fn install(&self, tools: &Environment, packages: &[&str]) -> Result<(), Failure> {
        let install = ["pip", "install", "--compile-bytecode", "--python", &self.interpreter()];
        let by_uv = tools.program("uv").args(install);
        let by_pip = self.python().args(["-m", "pip", "install"]);
        let packages = || packages.iter().copied();
        by_uv.args(packages()).run().or_else(|_| by_pip.args(packages()).run())
    }

    pub(super) fn interpreter(&self) -> String {
        format!("{}/bin/python", self.folder)
    }

    pub(super) fn python(&self) -> Invocation {
        Invocation::new(self.interpreter())
    }

    pub(super) fn program(&self, name: &str) -> Invocation {
        Invocation::new(format!("{}/bin/{name}", self.folder))
    }
}
