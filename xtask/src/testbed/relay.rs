//! The process that delays packets on the links of a testbed.
//!
//! The kernel's queue that delays packets, netem, is missing on many machines. So each link with a delay is cut in two, and
//! the cut ends are interfaces of one namespace, `NAME-relay`. A macvtap on each hands this process all packets that arrive
//! there, 64 KB at a time, and sends what the process writes. It is a file like any other, so that no more than std is
//! needed. The limits of the rate lie before the cuts: packets are delayed after they have waited for their turn.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use super::Problem;
use super::delay::Delay;
use super::shape::Shape;
use super::system::{batch, call, processes};

/// More than the largest packet of the stack, with its header.
const PACKET_BYTES_MAX: usize = 128 << 10;
/// The memory that a packet takes besides its bytes, at most.
const PACKET_OVERHEAD: u64 = 128;
/// The packets that wait for this process in the kernel if it does not get a processor.
const KERNEL_QUEUE_PACKETS: u32 = 4096;
/// Threads do little, and there are four for each link.
const STACK_BYTES: usize = 128 << 10;
/// The text that the relay writes once it has opened all links, and that the builder answers. A relay that gets no answer
/// ends: its builder is gone, and may have taken no part of the testbed down yet.
const READY: &str = "ready";

/// The interfaces at the cut of a link, by the link's number: that which leads to the switch, and that which leads to the
/// other end.
pub(super) fn cut_ends(link: usize) -> [String; 2] {
    [format!("switch{link}"), format!("end{link}")]
}

fn tap(interface: &str) -> String {
    format!("t-{interface}")
}

/// Starts the relay of a testbed whose links are there. The relay outlives this process.
pub(super) fn start(shape: &Shape, delay: Delay) -> Result<(), Problem> {
    let namespace = shape.relay();
    let links = shape.links().len();
    let lines = (0..links).flat_map(cut_ends).flat_map(|interface| {
        let tap = tap(&interface);
        [
            format!("link set dev {interface} up"),
            format!(
                "link add link {interface} name {tap} txqueuelen {KERNEL_QUEUE_PACKETS} type macvtap mode passthru"
            ),
            format!("link set dev {tap} up"),
        ]
    });
    batch("ip", &namespace, &lines.collect::<Vec<_>>())?;
    let unable = |error| Problem::Failed(format!("cannot start the relay that delays packets: {error}"));
    let program = std::env::current_exe().map_err(unable)?;
    let mut process = Command::new("ip")
        .args(["netns", "exec", &namespace])
        .arg(program)
        .args(["testbed-relay", &shape.name, &delay.to_string()])
        .args([links.to_string(), shape.bytes_under_way_max(delay).to_string()])
        // The relay must not receive Ctrl-C.
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        // A process that reads the builder's messages to their end would otherwise wait for the relay's end.
        .stderr(Stdio::null())
        .spawn()
        .map_err(unable)?;
    let mut answer = String::new();
    BufReader::new(process.stdout.take().expect("it is piped")).read_line(&mut answer).map_err(unable)?;
    let mut pipe = process.stdin.take().expect("it is piped");
    if answer.trim() == READY {
        return pipe.write_all(READY.as_bytes()).map_err(unable);
    }
    drop(pipe);
    let _ = process.wait();
    Err(Problem::Failed(format!("the relay that delays packets does not start: {}", answer.trim())))
}

/// Returns whether the relay of a testbed with a delay is there.
pub(super) fn is_running(shape: &Shape) -> Result<bool, Problem> {
    Ok(!processes(&shape.relay())?.is_empty())
}

/// The relay's own process. It ends with the testbed, whose namespaces no process survives.
pub(crate) fn play(arguments: &[String]) -> ExitCode {
    match relay(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            // The builder shows one line.
            println!("{}", why.replace('\n', " "));
            ExitCode::FAILURE
        }
    }
}

fn relay(arguments: &[String]) -> Result<(), String> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let [name, delay, links, bytes_max] = words[..] else {
        return Err("it is started by `testbed up` alone".into());
    };
    let delay = Delay::parse(delay)?.as_duration();
    let links: usize = links.parse().map_err(|_| format!("{links} links"))?;
    let bytes_max: u64 = bytes_max.parse().map_err(|_| format!("{bytes_max} bytes"))?;
    let open = |link| {
        let [switch, end] = cut_ends(link).map(|interface| open(name, &tap(&interface)).map(Arc::new));
        Ok((switch?, end?))
    };
    let opened = (0..links).map(open).collect::<Result<Vec<_>, String>>()?;
    for (switch, end) in opened {
        delay_one_way(Arc::clone(&switch), Arc::clone(&end), delay, bytes_max)?;
        delay_one_way(end, switch, delay, bytes_max)?;
    }
    println!("{READY}");
    let mut answer = String::new();
    let _ = std::io::stdin().read_to_string(&mut answer);
    match answer == READY {
        true => loop {
            std::thread::park();
        },
        false => Ok(()),
    }
}

/// Opens the file of a macvtap. The kernel's own file in /dev has the number of the interface in its name, and those of
/// other namespaces have the same numbers.
fn open(name: &str, tap: &str) -> Result<File, String> {
    let unable = |what: &str, error: std::io::Error| format!("{what}: {error}");
    let folder = format!("/sys/class/net/{tap}");
    let read = |path: String| std::fs::read_to_string(&path).map_err(|error| unable(&path, error));
    let index = read(format!("{folder}/ifindex"))?;
    let numbers = read(format!("{folder}/tap{}/dev", index.trim()))?;
    let (major, minor) = numbers.trim().split_once(':').ok_or("the kernel names no device")?;
    let path = format!("/dev/paramhub-testbed-{name}");
    // One that was killed may have left it behind.
    let _ = std::fs::remove_file(&path);
    call("mknod", &["-m", "600", &path, "c", major, minor], "")?;
    let opened = OpenOptions::new().read(true).write(true).open(&path);
    let removed = std::fs::remove_file(&path);
    let file = opened.map_err(|error| unable(&path, error))?;
    removed.map(|()| file).map_err(|error| unable(&path, error))
}

/// A packet, and when it is to go on.
struct Packet {
    due: Instant,
    bytes: Vec<u8>,
}

impl Packet {
    /// The memory that it takes.
    fn size(&self) -> u64 {
        self.bytes.len() as u64 + PACKET_OVERHEAD
    }
}

/// Starts the threads of one way of a link.
fn delay_one_way(from: Arc<File>, to: Arc<File>, delay: Duration, bytes_max: u64) -> Result<(), String> {
    let waiting = Arc::new(AtomicU64::new(0));
    let (sender, receiver) = mpsc::channel();
    let passed_on = Arc::clone(&waiting);
    let threads: [Box<dyn FnOnce() + Send>; 2] = [
        Box::new(move || take(&from, &sender, delay, &waiting, bytes_max)),
        Box::new(move || pass_on(&to, &receiver, &passed_on)),
    ];
    for thread in threads {
        let work = move || {
            thread();
            // A link whose packets are no longer passed on would look like one that loses them all.
            std::process::exit(1);
        };
        let started = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(work);
        started.map_err(|error| format!("cannot start a thread: {error}"))?;
    }
    Ok(())
}

/// Takes the packets that arrive. Those for which there is no room are lost, as in a full queue.
fn take(from: &File, queue: &Sender<Packet>, delay: Duration, waiting: &AtomicU64, bytes_max: u64) {
    let mut buffer = vec![0; PACKET_BYTES_MAX];
    let mut from = from;
    while let Ok(length) = from.read(&mut buffer) {
        let packet = Packet { due: Instant::now() + delay, bytes: buffer[..length].to_vec() };
        let size = packet.size();
        if waiting.load(Ordering::Relaxed) + size > bytes_max {
            continue;
        }
        waiting.fetch_add(size, Ordering::Relaxed);
        if queue.send(packet).is_err() {
            return;
        }
    }
}

fn pass_on(to: &File, queue: &Receiver<Packet>, waiting: &AtomicU64) {
    let mut to = to;
    for packet in queue {
        std::thread::sleep(packet.due.saturating_duration_since(Instant::now()));
        // A packet that the kernel refuses is lost, as on a real link.
        let _ = to.write(&packet.bytes);
        waiting.fetch_sub(packet.size(), Ordering::Relaxed);
    }
}
