//! An archive with the program, for any Linux that is not too old.

use std::path::Path;

use crate::command::Invocation;
use crate::stage::Failure;

use super::bare::bare;
use super::{ARTIFACTS, Source, VERSION, WORK, absolute, copy, empty, failure, print_size, shell, write};

/// Copied into the archive as they are.
const FILES: [&str; 10] = [
    "README.md",
    "CHANGELOG.md",
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "deploy/systemd/README.md",
    "deploy/systemd/hub.env",
    "deploy/systemd/hub-joining.env",
    "deploy/systemd/manager.env",
    "deploy/systemd/paramhub-hub.service",
    "deploy/systemd/paramhub-manager.service",
];

pub(super) fn make(program: &str, licenses: &str, source: &Source) -> Result<(), Failure> {
    let name = format!("paramhub-{VERSION}-x86_64-linux-gnu");
    let folder = format!("{WORK}/archive");
    empty(&folder)?;
    let inside = |file: &str| Path::new(&folder).join(&name).join(file);
    copy(program, &inside("paramhub"), 0o755)?;
    for file in FILES {
        copy(file, &inside(file), 0o644)?;
    }
    write(&inside(super::licenses::FILE), licenses, 0o644)?;
    let archive = format!("{ARTIFACTS}/{name}.tar.gz");
    Invocation::parse("tar --sort=name --owner=0 --group=0 --numeric-owner --format=gnu --gzip --create")
        .args([format!("--mtime=@{}", source.seconds), format!("--directory={folder}")])
        .args([format!("--file={archive}"), name.clone()])
        .run()?;
    print_size(&archive)?;
    try_out(&archive, &name)
}

/// Unpacks the archive and trains with what was in it, in an empty folder.
fn try_out(archive: &str, name: &str) -> Result<(), Failure> {
    let folder = format!("{WORK}/unpacked");
    empty(&folder)?;
    Invocation::parse("tar --extract")
        .args([format!("--file={archive}"), format!("--directory={folder}")])
        .run()?;
    let unpacked = absolute(&format!("{folder}/{name}"))?;
    let program = format!("{unpacked}/paramhub");
    shows_version(&program)?;
    let train = bare(&unpacked, &program).args(["train", "--epochs", "2", "--workers", "2"]);
    shell(&format!("cd {folder} && {train}")).run()
}

/// Fails unless the program starts and says that it is of this version.
pub(super) fn shows_version(program: &str) -> Result<(), Failure> {
    let shown = bare("/nowhere", program).args(["--version"]).output();
    if shown.as_deref() == Some(&format!("paramhub {VERSION}")) {
        println!("{program} --version: paramhub {VERSION}");
        return Ok(());
    }
    Err(failure(format!("{program} --version shows {shown:?}, not paramhub {VERSION}")))
}
