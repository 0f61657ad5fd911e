//! Measures how fast this machine moves bytes between two of its processes' sockets.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::{Finding, Grade};

const MEASURE_FOR: Duration = Duration::from_secs(1);
/// The bytes of one write. Like a hub, it writes many chunks at once.
const WRITE_BYTES: usize = 1 << 20;
/// Below this, the exchange would be slower than a common 1 Gbit/s network.
const SLOW_BYTES_PER_SECOND: f64 = 125e6;

pub(super) fn finding() -> Finding {
    match measure() {
        Ok(speed) => {
            let (grade, advice) = if speed < SLOW_BYTES_PER_SECOND {
                (Grade::Warn, ": very slow; is the machine busy?")
            } else {
                (Grade::Ok, "")
            };
            let text = format!("{:.1} GB/s over one TCP connection{advice}", speed / 1e9);
            Finding::new(grade, "loopback", text)
        }
        Err(error) => Finding::new(
            Grade::Fail,
            "loopback",
            format!("no TCP connection to 127.0.0.1 can be made: {error}. Is the `lo` interface up?"),
        ),
    }
}

/// Bytes a second over one connection.
fn measure() -> std::io::Result<f64> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut sender = TcpStream::connect_timeout(&listener.local_addr()?, Duration::from_secs(5))?;
    let mut receiver = listener.accept()?.0;
    sender.set_write_timeout(Some(Duration::from_secs(5)))?;
    let reader = std::thread::spawn(move || {
        let mut buffer = vec![0; WRITE_BYTES];
        let mut received = 0_u64;
        loop {
            match receiver.read(&mut buffer)? {
                0 => return Ok::<u64, std::io::Error>(received),
                bytes => received += bytes as u64,
            }
        }
    });
    let block = vec![0x5a; WRITE_BYTES];
    let started = Instant::now();
    while started.elapsed() < MEASURE_FOR {
        sender.write_all(&block)?;
    }
    drop(sender);
    let received = reader.join().expect("the reader does not panic")?;
    Ok(received as f64 / started.elapsed().as_secs_f64())
}
