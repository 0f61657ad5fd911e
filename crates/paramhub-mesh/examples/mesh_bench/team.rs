//! A team of processes that stays alive and sleeps while other teams have their turns.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::Failure;
use super::rank::{RANK, SOCKET, TRANSPORT};

/// The most elements of an allreduce that is repeated within a turn, because one is over too soon to be timed.
const SMALL_ELEMENTS_MAX: usize = 64 << 10;
/// How often. The sums of 8 ranks do not leave the range of f32.
pub(super) const SMALL_REPEATS: usize = 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TeamKind {
    Memory,
    OpenMpi,
    Tcp,
    OpenMpiTcp,
}

impl TeamKind {
    pub(super) const ALL: [TeamKind; 4] =
        [TeamKind::Memory, TeamKind::OpenMpi, TeamKind::Tcp, TeamKind::OpenMpiTcp];

    pub(super) fn name(self) -> &'static str {
        match self {
            TeamKind::Memory => "memory",
            TeamKind::Tcp => "tcp",
            TeamKind::OpenMpi => "openmpi",
            TeamKind::OpenMpiTcp => "openmpi-tcp",
        }
    }

    pub(super) fn is_open_mpi(self) -> bool {
        matches!(self, TeamKind::OpenMpi | TeamKind::OpenMpiTcp)
    }

    /// The team to compare this one with.
    pub(super) fn counterpart(self) -> Option<TeamKind> {
        match self {
            TeamKind::Memory => Some(TeamKind::OpenMpi),
            TeamKind::Tcp => Some(TeamKind::OpenMpiTcp),
            _ => None,
        }
    }

    /// The forms in which a team can do the same work; the fastest of a turn counts.
    fn forms(self) -> &'static [&'static str] {
        match self {
            TeamKind::Memory | TeamKind::Tcp => &["in-place"],
            TeamKind::OpenMpi | TeamKind::OpenMpiTcp => &["in-place", "second"],
        }
    }
}

pub(super) struct Team {
    pub(super) kind: TeamKind,
    processes: Vec<Child>,
    lines: Vec<BufReader<UnixStream>>,
    folder: PathBuf,
}

impl Team {
    pub(super) fn start(kind: TeamKind, ranks: usize) -> Result<Team, Failure> {
        let folder = std::env::temp_dir().join(format!("mesh-bench-{}-{}", std::process::id(), kind.name()));
        std::fs::create_dir(&folder)?;
        let mut team = Team { kind, processes: Vec::new(), lines: Vec::new(), folder };
        let socket = team.folder.join("line");
        let listener = UnixListener::bind(&socket)?;
        listener.set_nonblocking(true)?;
        for mut command in team.commands(ranks)? {
            let command = command.env(SOCKET, &socket).stdin(Stdio::null());
            team.processes.push(command.spawn().map_err(|error| format!("{command:?}: {error}"))?);
        }
        let mut lines: Vec<Option<(BufReader<UnixStream>, String)>> = (0..ranks).map(|_| None).collect();
        let begun = Instant::now();
        while lines.iter().any(Option::is_none) {
            match listener.accept() {
                Ok((line, _)) => {
                    line.set_nonblocking(false)?;
                    let mut line = BufReader::new(line);
                    let mut hello = String::new();
                    line.read_line(&mut hello)?;
                    let (rank, address) = hello.trim().split_once(' ').ok_or("no hello")?;
                    lines[rank.parse::<usize>()?] = Some((line, address.to_owned()));
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    if begun.elapsed() > Duration::from_secs(30) {
                        return Err("not all of its ranks have started".into());
                    }
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error) => return Err(error.into()),
            }
        }
        let (lines, addresses): (Vec<_>, Vec<String>) = lines.into_iter().flatten().unzip();
        team.lines = lines;
        if !kind.is_open_mpi() {
            team.send_line(&addresses.join(" "))?;
        }
        Ok(team)
    }

    fn commands(&self, ranks: usize) -> Result<Vec<Command>, Failure> {
        if !self.kind.is_open_mpi() {
            let command = |rank: usize| -> Result<Command, Failure> {
                let mut command = Command::new(std::env::current_exe()?);
                command.env(RANK, rank.to_string()).env(TRANSPORT, self.kind.name());
                Ok(command)
            };
            return (0..ranks).map(command).collect();
        }
        let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/peers/allreduce.c");
        let program = self.folder.join("allreduce");
        let built = Command::new("mpicc").arg("-O2").arg("-o").arg(&program).arg(source).status()?;
        if !built.success() {
            return Err("mpicc failed".into());
        }
        let mut mpirun = Command::new("mpirun");
        // There are more ranks than processors, the scheduler may place them anywhere, and root in a
        // container is allowed.
        mpirun.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]);
        if self.kind == TeamKind::OpenMpiTcp {
            mpirun.args([
                "--mca",
                "pml",
                "ob1",
                "--mca",
                "btl",
                "tcp,self",
                "--mca",
                "btl_tcp_if_include",
                "lo",
            ]);
        }
        mpirun.arg("-n").arg(ranks.to_string()).arg(program);
        Ok(vec![mpirun])
    }

    /// Seconds of the fastest form.
    pub(super) fn best(&mut self, tensors: &[usize]) -> Result<f64, Failure> {
        let mut best = f64::INFINITY;
        for form in self.kind.forms() {
            best = best.min(self.turn(form, tensors)?);
        }
        Ok(best)
    }

    fn turn(&mut self, form: &str, tensors: &[usize]) -> Result<f64, Failure> {
        let words = tensors.iter().map(|elements| format!(" {elements}")).collect::<String>();
        let repeats = if tensors.iter().sum::<usize>() <= SMALL_ELEMENTS_MAX { SMALL_REPEATS } else { 1 };
        self.send_line(&format!("{form} {repeats}{words}"))?;
        let mut slowest = 0.0_f64;
        for (rank, line) in self.lines.iter_mut().enumerate() {
            let mut answer = String::new();
            line.read_line(&mut answer)?;
            let name = self.kind.name();
            let (seconds, verdict) =
                answer.trim().split_once(' ').ok_or_else(|| format!("{name}: rank {rank} has died"))?;
            if verdict != "right" {
                return Err(format!("{name}: rank {rank} has a wrong sum").into());
            }
            slowest = slowest.max(seconds.parse()?);
        }
        Ok(slowest)
    }

    fn send_line(&mut self, text: &str) -> Result<(), Failure> {
        for line in &mut self.lines {
            writeln!(line.get_mut(), "{text}")?;
        }
        Ok(())
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        // A rank leaves when its line ends.
        self.lines.clear();
        let begun = Instant::now();
        for process in &mut self.processes {
            while matches!(process.try_wait(), Ok(None)) && begun.elapsed() < Duration::from_secs(10) {
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = process.kill();
            let _ = process.wait();
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
