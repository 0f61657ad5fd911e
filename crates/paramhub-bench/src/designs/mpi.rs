//! Ranks that `mpirun` starts, if this program was built for it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context;
use paramhub_collective::communicator::Communicator;
use paramhub_harness::exchange::hosts::Site;
use paramhub_harness::exchange::processes::{NamedCommand, add_process_arguments};
use paramhub_harness::launch::this_program_command;

use super::messages::RankSpec;

/// OpenMPI's options as variables of the environment, which other MPIs ignore. There may be more ranks than
/// processors, and idle ranks must leave these to the others.
const SETTINGS: [(&str, &str); 5] = [
    ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
    ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
    ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
    ("OMPI_MCA_hwloc_base_binding_policy", "none"),
    ("OMPI_MCA_mpi_yield_when_idle", "1"),
];
/// Settings that keep OpenMPI from shared memory.
const TCP_ALONE: [(&str, &str); 2] = [("OMPI_MCA_pml", "ob1"), ("OMPI_MCA_btl", "tcp,self")];

/// Returns the reason why MPI cannot be used here, and how to change that.
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

/// The command that starts all ranks of a scenario. They are numbered from `process` on, and run at the sites
/// if there are any.
pub(super) fn command(
    rank_spec: &RankSpec,
    sites: &[Site],
    socket: &Path,
    process: usize,
) -> anyhow::Result<NamedCommand> {
    let mut rank = this_program_command().context("cannot find this program's own file")?;
    add_process_arguments(&mut rank, socket, process);
    // The first site is the one from which mpirun reaches the others.
    let mut words =
        sites.first().map_or(&[][..], |site| &site.enter).iter().map(String::as_str).chain(["mpirun"]);
    let mut command = Command::new(words.next().expect("mpirun at least"));
    command.args(words);
    if !sites.is_empty() {
        let slots = sites.iter().map(|site| format!("{}:{}", site.address, site.ranks));
        command.args(["--host", &slots.collect::<Vec<_>>().join(",")]);
        let folder = socket.with_file_name(rank_spec.scenario.slug());
        std::fs::create_dir(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        command.env("TMPDIR", folder);
        command.env("OMPI_MCA_plm_rsh_agent", format!("sh {}", agent(sites, socket)?.display()));
    }
    command
        .args(["-n", &rank_spec.ranks.to_string()])
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
    // Ranks in different namespaces of one machine would mistake each other's shared memory for their own.
    if !rank_spec.shares_memory || !sites.is_empty() {
        command.envs(TCP_ALONE);
    }
    Ok(NamedCommand { name: format!("mpirun of {}", rank_spec.scenario.label()), command })
}

/// A script beside the socket that replaces ssh for OpenMPI: it runs a command on the host with an address.
fn agent(sites: &[Site], socket: &Path) -> anyhow::Result<PathBuf> {
    // Daemons on one machine would mistake each other's files for their own.
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
    use paramhub_mpi::{MpiCommunicator, ThreadLevel};
    Ok(Box::new(MpiCommunicator::start(if has_threads {
        ThreadLevel::Multiple
    } else {
        ThreadLevel::Serialized
    })?))
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
