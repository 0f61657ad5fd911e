//! Tests that need processes, which can die and stop.
//!
//! The test starts its own program again for every rank, which runs [`rank`].

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::panic::AssertUnwindSafe;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use paramhub_mesh::{
    ElementType, Handle, Mesh, MeshConfig, MeshError, MeshListener, Nonce, ReceiveRegion, ReduceOp,
    SendRegion,
};
use rustix::process::{Pid, Signal, kill_process};

const RANK: &str = "PARAMHUB_TEST_MESH_RANK";
const DEAD_AFTER_S: &str = "PARAMHUB_TEST_MESH_DEAD_AFTER_S";
const WAY: &str = "PARAMHUB_TEST_MESH_WAY";
const SIZE: u32 = 4;
/// Long enough for a machine that is busy with other tests, short enough to wait for.
const SHORT: Duration = Duration::from_secs(3);
/// For meshes in which no silence is tested.
const LONG: Duration = Duration::from_secs(60);
/// Far longer than anything here takes.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// A rank in a process of its own, which ends with the test, however that ends.
struct Rank {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Rank {
    fn start(rank: u32, way: &str, dead_after: Duration) -> Rank {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "processes::rank", "--nocapture", "--test-threads=1"])
            .env(RANK, rank.to_string())
            .env(WAY, way)
            .env(DEAD_AFTER_S, dead_after.as_secs().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Rank { child, lines }
    }

    /// The rest of the next line that begins with `word`; the test harness writes lines of its own.
    fn read_line_after(&mut self, word: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.lines.read_line(&mut line).unwrap() > 0, "the rank ended before it said `{word}`");
            // The harness begins a test's first line.
            if let Some(at) = line.find(word) {
                return line[at + word.len()..].trim().to_owned();
            }
        }
    }

    fn send_line(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32).unwrap()
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The ways in which ranks may do collectives.
const WAYS: [&str; 2] = ["memory", "tcp"];

/// All ranks, joined.
fn start(size: u32, way: &str, dead_after: Duration) -> Vec<Rank> {
    let mut ranks: Vec<Rank> = (0..size).map(|rank| Rank::start(rank, way, dead_after)).collect();
    let addresses: Vec<String> = ranks.iter_mut().map(|rank| rank.read_line_after("ADDRESS")).collect();
    for rank in &mut ranks {
        rank.send_line(&addresses.join(" "));
    }
    for rank in &mut ranks {
        rank.read_line_after("JOINED");
    }
    ranks
}

/// This is not a test of its own: it is the whole life of a rank, if the environment names one.
#[test]
fn rank() {
    let Ok(rank) = std::env::var(RANK) else { return };
    let rank: u32 = rank.parse().unwrap();
    // The process of a rank that hangs ends, and fails the test that reads its output.
    std::thread::spawn(|| {
        std::thread::sleep(2 * WAIT_TIMEOUT);
        std::process::exit(3);
    });
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    let listener = MeshListener::bind(IpAddr::V4(Ipv4Addr::LOCALHOST)).unwrap();
    println!("\nADDRESS {}", listener.address());
    let mut lines = std::io::stdin().lines().map(Result::unwrap);
    let addresses: Vec<SocketAddr> =
        lines.next().unwrap().split(' ').map(|address| address.parse().unwrap()).collect();
    let dead_after = Duration::from_secs(std::env::var(DEAD_AFTER_S).unwrap().parse().unwrap());
    let shares_memory = std::env::var(WAY).unwrap() == "memory";
    let config = MeshConfig { dead_after, shares_memory, ..MeshConfig::new(rank, Nonce([5; 32]), addresses) };
    let mesh = listener.join(config).unwrap();
    assert_eq!(mesh.shares_memory().is_ok(), shares_memory, "{mesh:?}");
    println!("JOINED");
    let mut kept = Vec::new();
    for command in lines {
        match command.as_str() {
            "sum" => print_outcome(sum(&mesh).and_then(|handle| handle.wait())),
            "barrier" => kept.push(mesh.barrier().unwrap()),
            "wait" => wait_for_everything(&mesh),
            "storm" => print_outcome(Err(storm(&mesh))),
            "leave" => print_outcome(mesh.leave(WAIT_TIMEOUT)),
            "exit" => break,
            other => panic!("{other}"),
        }
    }
    drop(mesh);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    println!(
        "LEFT {} descriptors, memory {}",
        descriptors() as i64 - before as i64,
        maps.contains("paramhub-mesh")
    );
}

/// Runs collectives of all sizes, several at a time, until one fails.
fn storm(mesh: &Mesh) -> MeshError {
    println!("STORMS");
    for round in 0.. {
        let elements = [1, 900, 30_000, 700_000][round % 4];
        let buffer = || ReceiveRegion::owned(vec![1_f32; elements]);
        let handles = [
            mesh.allreduce(buffer(), ElementType::F32, ReduceOp::Sum),
            mesh.broadcast(buffer(), round as u32 % mesh.size()),
            mesh.barrier(),
        ];
        if let Err(error) = handles.into_iter().try_for_each(|handle| handle?.wait()) {
            return error;
        }
    }
    unreachable!("it ends with the mesh")
}

fn print_outcome(outcome: Result<(), MeshError>) {
    match outcome {
        Ok(()) => println!("OUTCOME fine"),
        Err(error) => println!("OUTCOME culprit {:?}: {error}", error.rank()),
    }
}

fn sum(mesh: &Mesh) -> Result<Handle, MeshError> {
    mesh.allreduce(ReceiveRegion::owned(vec![1_f32; 3 << 20]), ElementType::F32, ReduceOp::Sum)
}

/// Issues operations that can never end because rank 2 takes no part, announces it, and prints how all of
/// them ended.
fn wait_for_everything(mesh: &Mesh) {
    let other = if mesh.rank() == 0 { 1 } else { 0 };
    let handles = [
        mesh.receive(2, 1, ReceiveRegion::owned(vec![0_u8; 100])),
        mesh.send(2, 2, SendRegion::owned(vec![0_u8; 100])),
        mesh.receive(other, 3, ReceiveRegion::owned(vec![0_u8; 100])),
        sum(mesh),
        mesh.barrier(),
    ];
    println!("ISSUED");
    let errors: Vec<MeshError> =
        handles.into_iter().map(|handle| handle.unwrap().wait().unwrap_err()).collect();
    assert!(errors.iter().all(|error| error.rank() == errors[0].rank()), "{errors:?}");
    print_outcome(Err(errors[0].clone()));
    // A later operation gets the same error.
    assert_eq!(mesh.barrier().unwrap_err().to_string(), errors[0].to_string());
}

#[test]
fn a_killed_rank_is_named_by_all_others() {
    for way in WAYS {
        let mut ranks = start(SIZE, way, LONG);
        for rank in [0, 1, 3] {
            ranks[rank].send_line("wait");
        }
        for rank in [0, 1, 3] {
            ranks[rank].read_line_after("ISSUED");
        }
        ranks[2].child.kill().unwrap();
        for rank in [0, 1, 3] {
            let outcome = ranks[rank].read_line_after("OUTCOME");
            assert!(outcome.starts_with("culprit Some(2)"), "{way}, rank {rank}: {outcome}");
            assert!(outcome.contains("rank 2 is lost"), "{way}, rank {rank}: {outcome}");
        }
    }
}

#[test]
fn a_rank_that_dies_at_any_moment_is_named_by_all_others() {
    let seed = match std::env::var("PARAMHUB_TEST_SEED") {
        Ok(text) => text.parse().expect("PARAMHUB_TEST_SEED is a number"),
        Err(_) => std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64,
    };
    println!("PARAMHUB_TEST_SEED={seed}");
    // Xorshift; the seed is never 0.
    let mut state = seed | 1;
    let mut below = |bound: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % bound
    };
    for way in ["memory", "memory", "memory", "tcp"] {
        // The last number has more ranks than most test machines have processors.
        let size = [2, SIZE, 8][below(3) as usize];
        let mut ranks = start(size, way, LONG);
        ranks.iter_mut().for_each(|rank| rank.send_line("storm"));
        ranks.iter_mut().for_each(|rank| {
            rank.read_line_after("STORMS");
        });
        let victim = below(u64::from(size)) as usize;
        std::thread::sleep(Duration::from_micros(below(200_000)));
        ranks[victim].child.kill().unwrap();
        for rank in (0..size as usize).filter(|&rank| rank != victim) {
            let outcome = ranks[rank].read_line_after("OUTCOME");
            let named = format!("culprit Some({victim})");
            assert!(outcome.starts_with(&named), "{way}, rank {rank} of {size}: {outcome}");
        }
    }
}

#[test]
fn a_mesh_leaves_nothing() {
    for way in WAYS {
        let mut ranks = start(3, way, LONG);
        // The handle of the barrier outlives the mesh.
        for command in ["barrier", "sum", "leave", "exit"] {
            ranks.iter_mut().for_each(|rank| rank.send_line(command));
        }
        for rank in &mut ranks {
            assert_eq!(rank.read_line_after("LEFT"), "0 descriptors, memory false", "{way}");
        }
    }
}

#[test]
fn a_silent_rank_is_named_once_something_waits() {
    let mut ranks = start(SIZE, "memory", SHORT);
    let stopped = ranks[2].pid();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Stop it again and again, in case another process on this machine continues stopped processes.
        scope.spawn(|| {
            while !is_over.load(Ordering::Acquire) {
                kill_process(stopped, Signal::STOP).unwrap();
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        for rank in [0, 1, 3] {
            ranks[rank].send_line("wait");
        }
        let outcomes = [0, 1, 3].map(|rank| {
            std::panic::catch_unwind(AssertUnwindSafe(|| ranks[rank].read_line_after("OUTCOME")))
        });
        is_over.store(true, Ordering::Release);
        for outcome in outcomes {
            let outcome = outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            assert!(outcome.starts_with("culprit Some(2)"), "{outcome}");
            assert!(outcome.contains("has not been heard"), "{outcome}");
        }
    });
}

#[test]
fn all_ranks_may_be_stopped_for_longer_than_the_limit_of_silence() {
    let mut ranks = start(SIZE, "memory", SHORT);
    for rank in &ranks {
        kill_process(rank.pid(), Signal::STOP).unwrap();
    }
    std::thread::sleep(SHORT + Duration::from_millis(500));
    for rank in &ranks {
        kill_process(rank.pid(), Signal::CONT).unwrap();
    }
    for rank in &mut ranks {
        rank.send_line("sum");
        rank.send_line("leave");
    }
    for rank in &mut ranks {
        assert_eq!(rank.read_line_after("OUTCOME"), "fine");
        assert_eq!(rank.read_line_after("OUTCOME"), "fine");
    }
}
