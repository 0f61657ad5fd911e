//! One end of a flow: a process that sends as much as it can and counts what it receives.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// The time that an end sends before it counts. By then the buckets' first burst is over and the congestion
/// window has found its size.
const WARMUP: Duration = Duration::from_millis(1500);
/// The time that an end counts. Over a second or so, bytes that streams lose and send again arrive in
/// bursts: slow links would seem to carry more than they do.
const WINDOW: Duration = Duration::from_millis(3000);
/// The time that an end still sends after its own window: on a busy machine that of the other side may end
/// later.
const AFTER: Duration = Duration::from_millis(500);
/// The interval at which a stream that stands still is checked.
const TICK: Duration = Duration::from_millis(200);
/// The bytes of a read or write: as large as the stack's largest packets.
const BUFFER_BYTES: usize = 64 << 10;
/// Streams of a flow. A hub's link carries streams of every worker, and one stream alone stalls if both ways
/// are full.
const CONNECTIONS: usize = 4;
/// The time that an end waits for the other, so that it ends even if none comes.
const WAIT_TIMEOUT: Duration = Duration::from_secs(10);

/// The times that a byte goes there and back before the streams are filled.
const ROUND_TRIPS: usize = 5;

/// Runs an end. `listen ADDRESS` prints its port first. `dial FROM TO` connects, and first prints the shortest round trip in
/// microseconds. Both print in the end how many bytes a second they received.
pub(crate) fn play(arguments: &[String]) -> ExitCode {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match words[..] {
        ["listen", address] => {
            accept(address).and_then(|streams| answer(&streams[0]).and_then(|()| run(streams)))
        }
        ["dial", from, to] => dial(from, to).and_then(|streams| {
            println!("{}", round_trip(&streams[0])?.as_micros());
            run(streams)
        }),
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

fn accept(address: &str) -> std::io::Result<Vec<TcpStream>> {
    let address: Ipv4Addr = address.parse().map_err(std::io::Error::other)?;
    let listener = TcpListener::bind((address, 0))?;
    println!("{}", listener.local_addr()?.port());
    listener.set_nonblocking(true)?;
    let deadline = Instant::now() + WAIT_TIMEOUT;
    let mut accepted = Vec::new();
    while accepted.len() < CONNECTIONS {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                accepted.push(stream);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(accepted)
}

/// A host with several interfaces would send from its routing's default address. Workers dial, so that the
/// source address can be chosen.
fn dial(from: &str, to: &str) -> std::io::Result<Vec<TcpStream>> {
    let to: SocketAddr = to.parse().map_err(std::io::Error::other)?;
    let from: IpAddr = from.parse().map_err(std::io::Error::other)?;
    let connect = |_| {
        let stream = TcpStream::connect_timeout(&to, WAIT_TIMEOUT)?;
        match stream.local_addr()?.ip() {
            ip if ip == from => Ok(stream),
            ip => Err(std::io::Error::other(format!("it was sent from {ip}"))),
        }
    };
    (0..CONNECTIONS).map(connect).collect()
}

/// The shortest round trip of a byte.
fn round_trip(mut stream: &TcpStream) -> std::io::Result<Duration> {
    limit_waits(stream)?;
    let mut shortest = Duration::MAX;
    for _ in 0..ROUND_TRIPS {
        let sent = Instant::now();
        stream.write_all(&[1])?;
        stream.read_exact(&mut [0])?;
        shortest = shortest.min(sent.elapsed());
    }
    Ok(shortest)
}

fn answer(mut stream: &TcpStream) -> std::io::Result<()> {
    limit_waits(stream)?;
    for _ in 0..ROUND_TRIPS {
        stream.read_exact(&mut [0])?;
        stream.write_all(&[1])?;
    }
    Ok(())
}

fn limit_waits(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(WAIT_TIMEOUT))?;
    stream.set_write_timeout(Some(WAIT_TIMEOUT))
}

/// The bytes a second that all streams together received.
fn run(streams: Vec<TcpStream>) -> std::io::Result<f64> {
    let began = Instant::now();
    let carried = streams.into_iter().map(|stream| std::thread::spawn(move || carry(stream, began)));
    let carried: Vec<_> = carried.collect();
    carried.into_iter().map(|stream| stream.join().expect("it does not panic")).sum()
}

fn carry(stream: TcpStream, began: Instant) -> std::io::Result<f64> {
    let end = began + WARMUP + WINDOW + AFTER;
    stream.set_read_timeout(Some(TICK))?;
    stream.set_write_timeout(Some(WAIT_TIMEOUT))?;
    let mut sending = stream.try_clone()?;
    let sender = std::thread::spawn(move || {
        let buffer = [1_u8; BUFFER_BYTES];
        // If sending fails, the other side misses the bytes and reports that.
        while Instant::now() < end && sending.write_all(&buffer).is_ok() {}
        let _ = sending.shutdown(Shutdown::Write);
    });
    let speed = receive(stream, began);
    sender.join().expect("the sender does not panic");
    speed
}

/// Counts bytes within the window, and reads until the other side has sent its last: bytes left unread would
/// reset its stream.
fn receive(mut stream: TcpStream, began: Instant) -> std::io::Result<f64> {
    let mut buffer = vec![0_u8; BUFFER_BYTES];
    let window = began + WARMUP..began + WARMUP + WINDOW;
    let mut bytes = 0_usize;
    while Instant::now() < began + WAIT_TIMEOUT {
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) if window.contains(&Instant::now()) => bytes += read,
            Ok(_) => {}
            // On a slow link one stream may stand still for a while.
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(bytes as f64 / WINDOW.as_secs_f64())
}
