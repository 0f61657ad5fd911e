//! Debian's package of the program and its units, by dpkg-deb from the files in deploy/debian.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::command::Invocation;
use crate::packages::SystemProgram;
use crate::stage::Failure;

use super::archive::shows_version;
use super::toolchain::GLIBC;
use super::{
    ARTIFACTS, Source, VERSION, WORK, absolute, copy, empty, failure, print_size, read, shell, write,
};

static DPKG_DEB: SystemProgram =
    SystemProgram { name: "dpkg-deb", probe: &["dpkg-deb", "--version"], debian_package: "dpkg" };
/// Lets a user who is not root install a package into a folder.
static FAKEROOT: SystemProgram =
    SystemProgram { name: "fakeroot", probe: &["fakeroot", "true"], debian_package: "fakeroot" };

/// Files whose changes by the administrator dpkg keeps. They hold the admin token.
const CONFIGURATION: [&str; 2] = ["hub.env", "manager.env"];
const UNITS: [&str; 2] = ["paramhub-hub.service", "paramhub-manager.service"];
const SCRIPTS: [&str; 3] = ["postinst", "prerm", "postrm"];
const DOCUMENTS: &str = "usr/share/doc/paramhub";

pub(super) fn make(program: &str, licenses: &str, source: &Source) -> Result<(), Failure> {
    DPKG_DEB.ensure()?;
    let folder = format!("{WORK}/debian");
    let package = format!("{ARTIFACTS}/paramhub_{VERSION}-1_amd64.deb");
    lay_out(&folder, program, licenses, source)?;
    pack(&folder, &package, source)?;
    print_size(&package)?;
    lint(&package)?;
    let root = format!("{WORK}/root");
    install_and_purge(&package, &root, shows_version)
}

/// Makes the tree of the package's files, and beside it `DEBIAN` with what dpkg reads.
fn lay_out(folder: &str, program: &str, licenses: &str, source: &Source) -> Result<(), Failure> {
    empty(folder)?;
    let inside = |path: &str| Path::new(folder).join(path);
    let document = |name: &str| inside(DOCUMENTS).join(name);
    copy(program, &inside("usr/bin/paramhub"), 0o755)?;
    for unit in UNITS {
        // The archive's users put the program where an administrator's own programs are.
        let text = read(&format!("deploy/systemd/{unit}"))?.replace("/usr/local/bin/", "/usr/bin/");
        write(&inside("usr/lib/systemd/system").join(unit), &text, 0o644)?;
    }
    for file in CONFIGURATION {
        copy(&format!("deploy/systemd/{file}"), &inside("etc/paramhub").join(file), 0o600)?;
    }
    copy("deploy/systemd/hub-joining.env", &document("examples/hub-joining.env"), 0o644)?;
    copy("README.md", &document("README.md"), 0o644)?;
    copy("deploy/debian/README.Debian", &document("README.Debian"), 0o644)?;
    copy("CHANGELOG.md", &document("changelog"), 0o644)?;
    write(&document("changelog.Debian"), &debian_changelog(source), 0o644)?;
    write(&document("copyright"), &copyright(licenses)?, 0o644)?;
    copy("deploy/debian/lintian-overrides", &inside("usr/share/lintian/overrides/paramhub"), 0o644)?;
    shell(&format!("cd {folder}/{DOCUMENTS} && gzip --no-name -9 changelog changelog.Debian")).run()?;

    let configuration = CONFIGURATION.map(|file| format!("/etc/paramhub/{file}\n")).concat();
    write(&inside("DEBIAN/conffiles"), &configuration, 0o644)?;
    for script in SCRIPTS {
        copy(&format!("deploy/debian/{script}"), &inside("DEBIAN").join(script), 0o755)?;
    }
    let sums = "find etc usr -type f -print0 | LC_ALL=C sort -z | xargs -0 md5sum > DEBIAN/md5sums";
    shell(&format!("cd {folder} && {sums}")).run()?;
    let control = read("deploy/debian/control")?
        .replace("@VERSION@", &format!("{VERSION}-1"))
        .replace("@GLIBC@", GLIBC)
        .replace("@MAINTAINER@", &source.maintainer)
        .replace("@INSTALLED_KIB@", &kibibytes(&[inside("etc"), inside("usr")])?.to_string());
    write(&inside("DEBIAN/control"), &control, 0o644)
}

fn pack(folder: &str, package: &str, source: &Source) -> Result<(), Failure> {
    // Folders have the permissions of the caller's umask.
    shell(&format!("find {folder} -type d -exec chmod 0755 {{}} +")).run()?;
    Invocation::parse("dpkg-deb --root-owner-group -Zxz --build")
        .args([folder, package])
        .env("SOURCE_DATE_EPOCH", &source.seconds)
        .run()
}

/// Debian's own changelog tells how the package changed; the project's is beside it.
fn debian_changelog(source: &Source) -> String {
    format!(
        "paramhub ({VERSION}-1) unstable; urgency=medium\n\n  * Version {VERSION}: see changelog.gz.\n\n -- {}  {}\n",
        source.maintainer, source.date
    )
}

fn copyright(licenses: &str) -> Result<String, Failure> {
    let (mit, apache) = (read("LICENSE-MIT")?, read("LICENSE-APACHE")?);
    let choice = "paramhub is licensed under the MIT licence or the Apache License 2.0, as you like.";
    Ok(format!("{choice}\n\n{mit}\n\n{apache}\n\n{licenses}"))
}

fn kibibytes(folders: &[PathBuf]) -> Result<u64, Failure> {
    let mut kibibytes = 0;
    let mut open = folders.to_vec();
    while let Some(folder) = open.pop() {
        let unread = |error| failure(format!("{} cannot be read: {error}", folder.display()));
        for entry in std::fs::read_dir(&folder).map_err(unread)? {
            let entry = entry.map_err(unread)?;
            let data = entry.metadata().map_err(unread)?;
            if data.is_dir() {
                open.push(entry.path());
            }
            kibibytes += data.len().div_ceil(1024);
        }
    }
    Ok(kibibytes)
}

fn lint(package: &str) -> Result<(), Failure> {
    if !Invocation::parse("lintian --version").succeeds() {
        println!("lintian is not installed, so the package is not checked by it");
        return Ok(());
    }
    Invocation::parse("lintian --allow-root --fail-on error").args([package]).run()
}

/// Installs the package into an empty root folder, over itself, removes and purges it. `check` gets the installed program.
fn install_and_purge(
    package: &str,
    root: &str,
    check: fn(&str) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let dpkg = |arguments: &[&str]| dpkg_in(root)?.args(arguments.iter().copied()).run();
    prepare(root)?;
    dpkg(&["--install", package])?;
    check(&format!("{root}/usr/bin/paramhub"))?;
    let hub_env = format!("{root}/etc/paramhub/hub.env");
    let mode = std::fs::metadata(&hub_env).map(|data| data.permissions().mode() & 0o777);
    expect(mode.is_ok_and(|mode| mode == 0o600), "others may read hub.env, which holds the admin token")?;
    let changed = read(&hub_env)? + "# changed\n";
    write(Path::new(&hub_env), &changed, 0o600)?;
    dpkg(&["--install", package])?;
    expect(read(&hub_env)? == changed, "dpkg has overwritten the administrator's hub.env")?;
    dpkg(&["--remove", "paramhub"])?;
    expect(read(&hub_env)? == changed, "dpkg has changed hub.env with the package's removal")?;
    expect(!Path::new(&format!("{root}/usr/bin/paramhub")).exists(), "a removed package leaves its program")?;
    dpkg(&["--purge", "paramhub"])?;
    let left = shell(&format!("cd {root} && find . -type f -not -path './var/lib/dpkg/*'")).output();
    match left.as_deref() {
        Some("") => Ok(()),
        left => Err(failure(format!("after --purge there is in {root}: {}", left.unwrap_or("?")))),
    }
}

fn expect(holds: bool, otherwise: &str) -> Result<(), Failure> {
    if holds { Ok(()) } else { Err(failure(otherwise)) }
}

/// A root folder with dpkg's database, in which nothing but this system's C library counts as installed.
fn prepare(root: &str) -> Result<(), Failure> {
    empty(root)?;
    let libc = Invocation::parse("dpkg-query --show --showformat=${Version} libc6").output();
    let libc = libc.ok_or_else(|| failure("dpkg-query does not know libc6: this is not a Debian system"))?;
    let installed = format!(
        "Package: libc6\nStatus: install ok installed\nMaintainer: none\nArchitecture: amd64\nVersion: {libc}\n\
         Description: this system's\n"
    );
    write(&Path::new(root).join("var/lib/dpkg/status"), &installed, 0o644)?;
    shell(&format!("cd {root} && mkdir -p etc usr var/lib/dpkg/info var/lib/dpkg/updates && touch var/lib/dpkg/info/libc6.list")).run()
}

/// dpkg, which acts on this root folder alone; the package's scripts see its path as `DPKG_ROOT`.
fn dpkg_in(root: &str) -> Result<Invocation, Failure> {
    let is_root = Invocation::parse("id -u").output().as_deref() == Some("0");
    let dpkg = if is_root {
        Invocation::new("dpkg")
    } else {
        FAKEROOT.ensure()?;
        Invocation::parse("fakeroot dpkg")
    };
    // dpkg starts the scripts from another folder.
    let root = format!("--root={}", absolute(root)?);
    Ok(dpkg.args([root.as_str(), "--force-script-chrootless", "--no-triggers", "--log=/dev/null"]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::release::enter_the_workspace;

    /// Ends with the test, also if it fails.
    struct Scratch(String);

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    /// The package is whole but for its program, which is this test's: it only has to be installed.
    #[test]
    fn the_package_installs_keeps_changed_configuration_and_leaves_nothing_when_purged() {
        enter_the_workspace();
        if !Invocation::parse("dpkg-query --show libc6").succeeds() {
            println!("skipped: this is no Debian system");
            return;
        }
        let scratch = Scratch(format!("target/release-test-{}", std::process::id()));
        let [folder, root] = ["tree", "root"].map(|name| format!("{}/{name}", scratch.0));
        let package = format!("{}/paramhub.deb", scratch.0);
        let source = Source {
            commit: "0".to_owned(),
            is_changed: false,
            seconds: "1000000000".to_owned(),
            date: "Sun, 09 Sep 2001 01:46:40 +0000".to_owned(),
            maintainer: "A Maintainer <maintainer@example.org>".to_owned(),
        };
        lay_out(&folder, "/bin/true", "the crates' licences", &source).unwrap();
        pack(&folder, &package, &source).unwrap();
        let again = format!("{}/again.deb", scratch.0);
        pack(&folder, &again, &source).unwrap();
        assert!(
            std::fs::read(&package).unwrap() == std::fs::read(&again).unwrap(),
            "it is the same each time"
        );

        let unit = read(&format!("{folder}/usr/lib/systemd/system/paramhub-hub.service")).unwrap();
        assert!(unit.contains("\nExecStart=/usr/bin/paramhub hub\n"), "{unit}");
        let control = read(&format!("{folder}/DEBIAN/control")).unwrap();
        assert!(
            !control.contains('@') || control.matches('@').count() == 1,
            "a field is not filled in: {control}"
        );
        let copyright = read(&format!("{folder}/{DOCUMENTS}/copyright")).unwrap();
        assert!(copyright.ends_with("the crates' licences"));
        install_and_purge(&package, &root, |program| Invocation::new(program).run()).unwrap();
    }
}
