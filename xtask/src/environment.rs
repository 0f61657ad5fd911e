//! Virtual environments of Python under `target/`.

use crate::command::Invocation;
use crate::stage::Failure;

/// One virtual environment, by default of the `python3` on the caller's PATH.
#[derive(Debug)]
pub(crate) struct Environment {
    folder: String,
    base: &'static str,
}

impl Environment {
    pub(crate) fn new(folder: impl Into<String>) -> Self {
        Self::of(folder, "python3")
    }

    /// An environment of the Python with this name on PATH.
    pub(crate) fn of(folder: impl Into<String>, base: &'static str) -> Self {
        Self { folder: folder.into(), base }
    }

    /// Creates the environment, or keeps one of the same interpreter: filling one again takes minutes.
    pub(crate) fn create_unless_there(&self) -> Result<(), Failure> {
        let version = |python: Invocation| python.args(["-c", "import sys; print(sys.version)"]).output();
        let wanted = version(Invocation::new(self.base));
        if wanted.is_some() && version(self.python()) == wanted {
            return Ok(());
        }
        self.create_anew()
    }

    pub(crate) fn create_anew(&self) -> Result<(), Failure> {
        self.create_of(self.base)
    }

    /// Creates the environment anew, of this interpreter.
    pub(crate) fn create_of(&self, interpreter: &str) -> Result<(), Failure> {
        Invocation::new(interpreter).args(["-m", "venv", "--clear", &self.folder]).run()
    }

    /// Installs packages into the environment. uv takes seconds where pip takes minutes, and no time if all
    /// are installed already. If uv fails, pip installs them: uv does not read pip's settings, which may name
    /// the source of packages.
    ///
    /// Their bytecode is compiled, as pip does, since hundreds of processes import torch: where Python may write
    /// none (`PYTHONDONTWRITEBYTECODE`), each would compile it for itself, and take twice as long to start.
    pub(crate) fn install(&self, tools: &Environment, packages: &[&str]) -> Result<(), Failure> {
        let install = ["pip", "install", "--compile-bytecode", "--python", &self.interpreter()];
        let by_uv = tools.program("uv").args(install);
        let by_pip = self.python().args(["-m", "pip", "install"]);
        let packages = || packages.iter().copied();
        by_uv.args(packages()).run().or_else(|_| by_pip.args(packages()).run())
    }

    /// The folder of its programs.
    pub(crate) fn programs(&self) -> String {
        format!("{}/bin", self.folder)
    }

    pub(crate) fn interpreter(&self) -> String {
        format!("{}/bin/python", self.folder)
    }

    pub(crate) fn python(&self) -> Invocation {
        Invocation::new(self.interpreter())
    }

    pub(crate) fn program(&self, name: &str) -> Invocation {
        Invocation::new(format!("{}/bin/{name}", self.folder))
    }
}
