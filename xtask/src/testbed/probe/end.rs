//! One end of a flow: a process that sends as much as it can and counts what it receives.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Until the buckets' first burst is over and the congestion window has found its size.
const WARMUP: Duration = Duration::from_millis(600);
const WINDOW: Duration = Duration::from_millis(1000);
/// The other side's window ends a little later.
const AFTER: Duration = Duration::from_millis(200);
/// As large as the stack's largest packets.
const BUFFER_BYTES: usize = 64 << 10;
/// One that waits for nobody ends, too.
const PATIENCE: Duration = Duration::from_secs(10);

/// `listen ADDRESS` says its port first; `dial FROM TO`. Both say in the end how many bytes a second they received.
pub(crate) fn play(arguments: &[String]) -> ExitCode {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match words[..] {
        ["listen", address] => accept(address).and_then(run),
        ["dial", from, to] => dial(from, to).and_then(run),
        _ => Err(std::io::Error::new(ErrorKind::InvalidInput, "it is started by the probe alone")),
    };
    match result {
        Ok(bytes_per_second) => {
            println!("{bytes_per_second:.0}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("testbed: the probe's end `{}`: {error}", words.join(" "));
            ExitCode::FAILURE
        }
    }
}

fn accept(address: &str) -> std::io::Result<TcpStream> {
    let address: Ipv4Addr = address.parse().map_err(std::io::Error::other)?;
    let listener = TcpListener::bind((address, 0))?;
    println!("{}", listener.local_addr()?.port());
    listener.set_nonblocking(true)?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(error),
        }
    }
}

/// A host with several interfaces sends from the address that its routing knows by default: the probe has workers dial.
fn dial(from: &str, to: &str) -> std::io::Result<TcpStream> {
    let to: SocketAddr = to.parse().map_err(std::io::Error::other)?;
    let stream = TcpStream::connect_timeout(&to, PATIENCE)?;
    let from: IpAddr = from.parse().map_err(std::io::Error::other)?;
    match stream.local_addr()?.ip() == from {
        true => Ok(stream),
        false => Err(std::io::Error::other(format!("it was sent from {}", stream.local_addr()?))),
    }
}

fn run(stream: TcpStream) -> std::io::Result<f64> {
    let began = Instant::now();
    let end = began + WARMUP + WINDOW + AFTER;
    stream.set_read_timeout(Some(WINDOW))?;
    stream.set_write_timeout(Some(WINDOW))?;
    let mut sending = stream.try_clone()?;
    let sender = std::thread::spawn(move || {
        let buffer = [1_u8; BUFFER_BYTES];
        // What cannot be sent, the other side misses and says so.
        while Instant::now() < end && sending.write_all(&buffer).is_ok() {}
    });
    let speed = receive(stream, began, end);
    sender.join().expect("the sender does not panic");
    speed
}

/// Reads to the end, counts within the window.
fn receive(mut stream: TcpStream, began: Instant, end: Instant) -> std::io::Result<f64> {
    let mut buffer = vec![0_u8; BUFFER_BYTES];
    let (mut bytes, mut first, mut last) = (0_usize, None, None);
    loop {
        let read = match stream.read(&mut buffer) {
            Ok(read) => read,
            Err(error) if Instant::now() < end => return Err(error),
            Err(_) => 0,
        };
        let now = Instant::now();
        if read == 0 || now >= end {
            break;
        }
        if (began + WARMUP..began + WARMUP + WINDOW).contains(&now) {
            // The window begins after the first read that falls into it.
            if first.get_or_insert(now) != &now {
                bytes += read;
            }
            last = Some(now);
        }
    }
    match (first, last) {
        (Some(first), Some(last)) if first < last => Ok(bytes as f64 / (last - first).as_secs_f64()),
        _ => Ok(0.0),
    }
}
