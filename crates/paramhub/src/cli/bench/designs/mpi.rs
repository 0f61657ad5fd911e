//! Ranks that `mpirun` starts, where this program was built for it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context;
use paramhub_collective::communicator::Communicator;

use super::part::Part;
use crate::cli::bench::hosts::Site;
use crate::cli::bench::processes::{Named, take_part};
use crate::launch::this_program;

/// What OpenMPI and MPICH tell a rank of itself.
const RANKS: [&str; 3] = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"];
/// As options only OpenMPI has them; in the environment others leave them alone. There may be more ranks than processors, and
/// idle ones must leave these to the others.
const SETTINGS: [(&str, &str); 5] = [
    ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
    ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
    ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
    ("OMPI_MCA_hwloc_base_binding_policy", "none"),
    ("OMPI_MCA_mpi_yield_when_idle", "1"),
];
/// What keeps OpenMPI from shared memory.
const TCP_ALONE: [(&str, &str); 2] = [("OMPI_MCA_pml", "ob1"), ("OMPI_MCA_btl", "tcp,self")];

/// This process's rank among those that `mpirun` has started with it.
pub(in crate::cli::bench) fn rank_of_mpi() -> anyhow::Result<usize> {
    let told = RANKS.iter().find_map(|name| std::env::var(name).ok());
    let told = told.context("mpirun has not told this process its rank")?;
    told.parse().with_context(|| format!("mpirun has told this process the rank `{told}`"))
}

/// Why nothing can go over MPI here, and what to do about it.
pub(super) fn missing() -> Option<&'static str> {
    if cfg!(not(feature = "mpi")) {
        return Some(
            "this program was built without MPI: install one with its headers and libclang (Debian's libopenmpi-dev and libclang-dev), \
             and build with --features mpi",
        );
    }
    let found = Command::new("mpirun").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    match found.is_ok_and(|status| status.success()) {
        true => None,
        false => Some("there is no mpirun: install an MPI (Debian's openmpi-bin)"),
    }
}

/// What starts all ranks of a contestant, which sit side by side from `seat` on, at the sites if there are any.
pub(super) fn command(part: &Part, sites: &[Site], socket: &Path, seat: usize) -> anyhow::Result<Named> {
    let mut rank = this_program().context("cannot find this program's own file")?;
    take_part(&mut rank, socket, seat);
    // The first site is the one from which mpirun reaches the others.
    let mut words =
        sites.first().map_or(&[][..], |site| &site.enter).iter().map(String::as_str).chain(["mpirun"]);
    let mut command = Command::new(words.next().expect("mpirun at least"));
    command.args(words);
    if !sites.is_empty() {
        let slots = sites.iter().map(|site| format!("{}:{}", site.address, site.ranks));
        command.args(["--host", &slots.collect::<Vec<_>>().join(",")]);
        let folder = socket.with_file_name(part.contestant.slug());
        std::fs::create_dir(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        command.env("TMPDIR", folder);
        command.env("OMPI_MCA_plm_rsh_agent", format!("sh {}", agent(sites, socket)?.display()));
    }
    command
        .args(["-n", &part.ranks.to_string()])
        .arg(rank.get_program())
        .args(rank.get_args())
        .arg("--by-mpi");
    for (name, value) in rank.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.envs(SETTINGS);
    // Namespaces of one machine would take each other's shared memory for their own.
    if !part.shares_memory || !sites.is_empty() {
        command.envs(TCP_ALONE);
    }
    Ok(Named { name: format!("mpirun of {}", part.contestant.label()), command })
}

/// A script beside the socket that does for OpenMPI what ssh does elsewhere: it runs a command where an address is.
fn agent(sites: &[Site], socket: &Path) -> anyhow::Result<PathBuf> {
    // Daemons of one machine would take each other's files for their own.
    let mut script =
        "site=$1\nshift\nTMPDIR=$TMPDIR/$site\nexport TMPDIR\nmkdir -p \"$TMPDIR\"\ncase $site in\n"
            .to_owned();
    for site in sites {
        let words = site.enter.iter().map(|word| format!("'{}' ", word.replace('\'', "'\\''")));
        script += &format!("{}) exec {}sh -c \"$*\" ;;\n", site.address, words.collect::<String>());
    }
    script += "esac\necho \"$site is no host of this benchmark\" >&2\nexit 1\n";
    let path = socket.with_file_name("agent");
    std::fs::write(&path, script).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// Joins the other ranks.
#[cfg(feature = "mpi")]
pub(super) fn start(has_threads: bool) -> anyhow::Result<Box<dyn Communicator>> {
    use paramhub_mpi::{Mpi, Threads};
    Ok(Box::new(Mpi::start(if has_threads { Threads::Many } else { Threads::One })?))
}

#[cfg(not(feature = "mpi"))]
pub(super) fn start(_has_threads: bool) -> anyhow::Result<Box<dyn Communicator>> {
    anyhow::bail!("{}", missing().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_runs_a_command_where_an_address_is_and_nowhere_else() {
        let folder = tempfile::tempdir().unwrap();
        let site = |address: &str, host: &str| Site {
            address: address.parse().unwrap(),
            enter: vec!["env".into(), format!("HOST={host}")],
            ranks: 1,
        };
        let sites = [site("10.0.0.1", "a"), site("10.0.0.2", "it's b")];
        let agent = agent(&sites, &folder.path().join("launcher")).unwrap();
        let run = |address: &str| {
            Command::new("sh")
                .env("TMPDIR", folder.path())
                .arg(&agent)
                .args([address, "echo", "\"on $HOST\";", "exit", "3"])
                .output()
                .unwrap()
        };
        let second = run("10.0.0.2");
        assert_eq!((second.stdout.as_slice(), second.status.code()), (&b"on it's b\n"[..], Some(3)));
        let nowhere = run("10.0.0.3");
        assert_eq!(nowhere.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&nowhere.stderr).contains("10.0.0.3 is no host"));
    }
}
