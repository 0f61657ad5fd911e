//! `cargo xtask release`: what users install, built, checked and tried out: the wheel, an archive with the program, and
//! Debian's package of it. docs/releasing.md says what else belongs to a release.
//!
//! The C library of Linux promises that a program runs with a newer version of it than it was linked to, not with an older
//! one. All is therefore linked to an old one, which zig brings with it (docs/decisions/releases.md).

mod archive;
mod bare;
mod debian;
mod licenses;
pub(crate) mod options;
mod program;
mod toolchain;
mod wheel;

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use crate::command::Invocation;
use crate::stage::Failure;

use options::Part;

/// What a release consists of, and nothing else.
const ARTIFACTS: &str = "target/release-artifacts";
/// Environments, unpacked archives and roots, for the tests.
const WORK: &str = "target/release-work";
/// All crates of the workspace have this version.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Builds and tests these parts, and says how long each took.
pub(crate) fn run(parts: &[Part]) -> ExitCode {
    match make(parts) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            println!("\nrelease failed: {}", failure.reason);
            if let Some(command) = &failure.rerun {
                println!("  the command again:  {command}");
            }
            ExitCode::FAILURE
        }
    }
}

/// Builds and tests these parts. The artifacts of earlier runs are removed.
pub(crate) fn make(parts: &[Part]) -> Result<(), Failure> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        return Err(failure("releases are built on x86-64 Linux, for x86-64 Linux"));
    }
    let source = Source::find()?;
    println!("{source}");
    empty(ARTIFACTS)?;
    let tools = toolchain::install()?;
    if parts.contains(&Part::Wheels) {
        timed("wheel", || wheel::make(&tools))?;
    }
    if parts.contains(&Part::Archive) || parts.contains(&Part::Debian) {
        let program = timed("program", || program::build(&tools))?;
        let licenses = timed("licences of the program", || licenses::of_program(&tools))?;
        if parts.contains(&Part::Archive) {
            timed("archive", || archive::make(&program, &licenses, &source))?;
        }
        if parts.contains(&Part::Debian) {
            timed("Debian package", || debian::make(&program, &licenses, &source))?;
        }
    }
    shell(&format!("cd {ARTIFACTS} && sha256sum * > SHA256SUMS && cat SHA256SUMS")).run()?;
    println!("{source}: all is in {ARTIFACTS}");
    Ok(())
}

/// The commit of which the artifacts are made.
#[derive(Debug)]
struct Source {
    commit: String,
    /// Whether files differ from the commit's, or are not in it.
    is_changed: bool,
    /// When it was committed, in seconds since 1970: the time of all files in archives, so that they are the same each time.
    seconds: String,
    /// The same, as Debian's changelogs have it.
    date: String,
    /// Name and address of who packages: those of Debian's own tools (`DEBFULLNAME`, `DEBEMAIL`), or the commit's author.
    maintainer: String,
}

impl Source {
    fn find() -> Result<Self, Failure> {
        let asked = Invocation::parse("git log -1 --format=%h%n%ct%n%cD%n%an%x20<%ae>").output();
        let asked =
            asked.ok_or_else(|| failure("git does not say which commit this is: release from a clone"))?;
        let [commit, seconds, date, author] = asked.lines().collect::<Vec<_>>()[..] else {
            return Err(failure(format!("git says of the newest commit: {asked}")));
        };
        let given = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let maintainer = match (given("DEBFULLNAME"), given("DEBEMAIL")) {
            (Some(name), Some(address)) => format!("{name} <{address}>"),
            _ => author.to_owned(),
        };
        // Files that git does not know count, too: maturin would take them into the wheel.
        let changes = Invocation::parse("git status --porcelain").output();
        let changes =
            changes.ok_or_else(|| failure("git does not say which files differ from the commit"))?;
        let is_changed = !changes.is_empty();
        if is_changed {
            println!("not committed, by `git status --porcelain`:\n{changes}");
        }
        let [commit, seconds, date] = [commit, seconds, date].map(str::to_owned);
        Ok(Self { commit, is_changed, seconds, date, maintainer })
    }
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let changed = if self.is_changed { ", with changes or new files that are not committed" } else { "" };
        write!(f, "paramhub {VERSION} of commit {}{changed}", self.commit)
    }
}

fn timed<T>(what: &str, work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    println!("\n== {what}");
    let begin = Instant::now();
    let result = work()?;
    println!("== {what}: {:.1} s", begin.elapsed().as_secs_f64());
    Ok(result)
}

/// Makes the folder, or removes what is in it.
fn empty(folder: &str) -> Result<(), Failure> {
    let _ = std::fs::remove_dir_all(folder);
    std::fs::create_dir_all(folder).map_err(|error| failure(format!("{folder} cannot be made: {error}")))
}

fn read(path: &str) -> Result<String, Failure> {
    std::fs::read_to_string(path).map_err(|error| failure(format!("{path} cannot be read: {error}")))
}

/// Writes the file, in folders that it makes, with these permissions.
fn write(path: &Path, text: &str, mode: u32) -> Result<(), Failure> {
    in_its_folder(path, mode, || std::fs::write(path, text))
}

/// Copies the file, into folders that it makes, with these permissions.
fn copy(from: &str, to: &Path, mode: u32) -> Result<(), Failure> {
    in_its_folder(to, mode, || std::fs::copy(from, to).map(|_bytes| ()))
}

fn in_its_folder(path: &Path, mode: u32, make: impl Fn() -> std::io::Result<()>) -> Result<(), Failure> {
    use std::os::unix::fs::PermissionsExt;
    let made = path.parent().map_or(Ok(()), std::fs::create_dir_all).and_then(|()| make());
    made.and_then(|()| std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)))
        .map_err(|error| failure(format!("{} cannot be written: {error}", path.display())))
}

fn absolute(path: &str) -> Result<String, Failure> {
    let path =
        std::path::absolute(path).map_err(|error| failure(format!("where is this folder? {error}")))?;
    Ok(path.display().to_string())
}

/// Prints and returns the bytes of an artifact.
fn print_size(path: &str) -> Result<u64, Failure> {
    let bytes = std::fs::metadata(path).map_err(|error| failure(format!("{path}: {error}")))?.len();
    println!("{path} has {:.1} MB", bytes as f64 / 1e6);
    Ok(bytes)
}

fn shell(line: &str) -> Invocation {
    Invocation::new("sh").args(["-euc", line])
}

fn failure(reason: impl Into<String>) -> Failure {
    Failure { reason: reason.into(), rerun: None }
}

/// The files that the parts of a release read are named from here.
#[cfg(test)]
fn enter_the_workspace() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace root");
    std::env::set_current_dir(root).expect("the workspace is there");
}
