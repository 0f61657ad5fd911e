//! A job of `mpirun`.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// The part that a rank plays.
pub(crate) const PART: &str = "PARAMHUB_TEST_MPI_PART";
/// A folder that all ranks share.
pub(crate) const FOLDER: &str = "PARAMHUB_TEST_MPI_FOLDER";

/// The time limit: nothing here takes a tenth of it.
const SECONDS: &str = "120";

/// A job that has ended.
pub(crate) struct Job {
    status: ExitStatus,
    output: String,
    ranks: u32,
}

/// Starts ranks, waits for all to end, and passes the job to `look`; skips it where there is no `mpirun`.
pub(crate) fn run(ranks: u32, part: &str, look: impl FnOnce(&Job)) {
    start(ranks, part, &[], look);
}

/// [`run`] over an MPI that lacks `MPI_THREAD_MULTIPLE`: MPI's profiling interface lets a library replace its
/// functions.
pub(crate) fn run_over_serialized_mpi(ranks: u32, part: &str, look: impl FnOnce(&Job)) {
    if !is_here() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let (source, library) = (folder.path().join("serialized.c"), folder.path().join("serialized.so"));
    std::fs::write(&source, include_str!("serialized.c")).unwrap();
    let compiled =
        Command::new("mpicc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status().unwrap();
    assert!(compiled.success());
    start(ranks, part, &["env", &format!("LD_PRELOAD={}", library.display())], look);
}

fn is_here() -> bool {
    let is_here =
        Command::new("mpirun").arg("--version").output().is_ok_and(|output| output.status.success());
    if !is_here {
        println!("skipped: there is no mpirun (Debian's openmpi-bin)");
    }
    is_here
}

fn start(ranks: u32, part: &str, before: &[&str], look: impl FnOnce(&Job)) {
    if !is_here() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let output =
        mpirun(&["timeout", "-k", "10", SECONDS, "mpirun"], ranks, part, before, folder.path()).output();
    let output = output.unwrap();
    let text =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).join("\n");
    let job = Job { status: output.status, output: text, ranks };
    assert_ne!(job.status.code(), Some(124), "{part} does not end: {}", job.output);
    assert_eq!(job.status.signal(), None, "{part}: {}", job.output);
    assert_no_process_is_left(folder.path(), ranks, &job.output);
    look(&job);
}

/// Starts ranks that do not end by themselves, kills `mpirun` when all have begun, and waits until they have
/// ended.
pub(crate) fn kill_mpirun(ranks: u32, part: &str) {
    if !is_here() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let output = std::fs::File::create(folder.path().join("output")).unwrap();
    let mut command = mpirun(&["mpirun"], ranks, part, &[], folder.path());
    // The files that no process is left to remove go with our folder.
    for setting in ["OMPI_MCA_orte_tmpdir_base", "OMPI_MCA_btl_vader_backing_directory"] {
        command.env(setting, folder.path());
    }
    let mut child =
        command.stdout(output.try_clone().unwrap()).stderr(output).stdin(Stdio::null()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let have_begun = || (0..ranks).all(|rank| pid_file(folder.path(), rank).exists());
    while !have_begun() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let output = std::fs::read_to_string(folder.path().join("output")).unwrap();
    assert_no_process_is_left(folder.path(), ranks, &output);
}

/// The command that starts this program as ranks.
fn mpirun(program: &[&str], ranks: u32, part: &str, before: &[&str], folder: &Path) -> Command {
    let mut command = Command::new(program[0]);
    command
        .args(&program[1..])
        .args(["-n", &ranks.to_string()])
        .args(before)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "rank", "--ignored", "--nocapture"])
        .envs([(PART, part.as_ref()), (FOLDER, folder.as_os_str())])
        // These are set in the environment, not as options: only OpenMPI has these options, and other MPIs
        // ignore the variables.
        .envs([
            ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
            ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
            ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
            ("OMPI_MCA_hwloc_base_binding_policy", "none"),
            ("OMPI_MCA_mpi_yield_when_idle", "1"),
        ]);
    command
}

/// Asserts that all ranks have begun, and that none is left.
fn assert_no_process_is_left(folder: &Path, ranks: u32, output: &str) {
    for rank in 0..ranks {
        let pid = std::fs::read_to_string(pid_file(folder, rank));
        let pid = pid.unwrap_or_else(|error| panic!("rank {rank} has not begun: {error}: {output}"));
        let deadline = Instant::now() + Duration::from_secs(20);
        // No other process can get the rank's number before the rank is gone.
        while Path::new("/proc").join(&pid).exists() {
            if Instant::now() > deadline {
                let killed = Command::new("kill").args(["-9", &pid]).status();
                panic!("rank {rank} is left, and killed now ({killed:?}): {output}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The file to which a rank writes its process id.
pub(crate) fn pid_file(folder: &Path, rank: u32) -> PathBuf {
    folder.join(format!("pid of {rank}"))
}

impl Job {
    /// Asserts that the job succeeded, at all ranks.
    pub(crate) fn succeed(&self) {
        assert!(self.status.success(), "{}: {}", self.status, self.output);
        assert_eq!(self.output.matches("played to the end").count() as u32, self.ranks, "{}", self.output);
    }

    /// Asserts that the job failed.
    pub(crate) fn fail(&self) {
        assert!(!self.status.success(), "{}", self.output);
    }

    /// Asserts that the ranks or `mpirun` printed these words.
    pub(crate) fn expect_output(&self, words: &str) {
        assert!(self.output.contains(words), "no rank prints `{words}`: {}", self.output);
    }
}
