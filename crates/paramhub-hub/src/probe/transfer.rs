//! As much as some streams carry, both ways at once, for a bounded time. The receiver takes the time.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use paramhub_transport::greeting::is_temporary;
use paramhub_transport::measuring::{bits_per_second, incompressible};

/// The first bytes do not count: TCP's slow start, and what a traffic shaper admits in a burst.
const WARM_UP: Duration = Duration::from_millis(150);
/// The time that counts.
const COUNTED: Duration = Duration::from_millis(300);
/// How much longer each end sends, since the two do not begin at the same moment.
const AFTER: Duration = Duration::from_millis(50);
/// Bytes each way, all streams together: more than the time allows up to 128 Gbit/s.
const BYTES_MAX: u64 = 8 << 30;
const BLOCK_BYTES: usize = 64 << 10;
/// The least time that a rate is taken of: streams that end early leave a shorter one.
const RESOLUTION: Duration = Duration::from_millis(1);
/// How often an end checks whether the other one still sends, and the longest wait of a read or a write.
const LOOK: Duration = Duration::from_millis(10);

/// Bits of payload that arrived per second while this end sent as much as it could.
pub(super) fn both_ways(streams: &[TcpStream]) -> Result<f64, String> {
    let prepare = |stream: &TcpStream| {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(LOOK))?;
        stream.set_write_timeout(Some(LOOK))
    };
    streams.iter().try_for_each(prepare).map_err(|error| format!("a stream cannot be prepared: {error}"))?;
    let noise = incompressible(BLOCK_BYTES);
    let (arrived, sent) = (AtomicU64::new(0), AtomicU64::new(0));
    let (open, is_over) = (AtomicUsize::new(streams.len()), AtomicBool::new(false));
    let begin = Instant::now();
    let counted = thread::scope(|scope| {
        let (noise, sent, arrived, open, is_over) = (&noise, &sent, &arrived, &open, &is_over);
        let begun = streams.iter().try_for_each(|stream| {
            let sends = move || send(stream, noise, sent, is_over);
            let receives = move || {
                receive(stream, arrived, is_over);
                open.fetch_sub(1, Ordering::AcqRel);
            };
            thread::Builder::new().spawn_scoped(scope, sends)?;
            thread::Builder::new().spawn_scoped(scope, receives).map(drop)
        });
        if let Err(error) = begun {
            is_over.store(true, Ordering::Release);
            return Err(format!("it cannot start a thread: {error}"));
        }
        let look = |until: Instant| {
            while Instant::now() < until && open.load(Ordering::Acquire) > 0 {
                thread::sleep(LOOK.min(until.saturating_duration_since(Instant::now())));
            }
            (arrived.load(Ordering::Acquire), Instant::now())
        };
        let (before, from) = look(begin + WARM_UP);
        let (after, to) = look(begin + WARM_UP + COUNTED);
        thread::sleep((begin + WARM_UP + COUNTED + AFTER).saturating_duration_since(Instant::now()));
        is_over.store(true, Ordering::Release);
        Ok((after - before, to - from))
    });
    for stream in streams {
        // The other end may have closed it before.
        let _ = stream.shutdown(Shutdown::Both);
    }
    match counted? {
        (0, _) => Err("nothing arrived from the other hub".into()),
        (bytes, time) => Ok(bits_per_second(bytes, time, RESOLUTION)),
    }
}

fn send(mut stream: &TcpStream, noise: &[u8], sent: &AtomicU64, is_over: &AtomicBool) {
    let mut at = 0;
    while !is_over.load(Ordering::Acquire) && sent.load(Ordering::Relaxed) < BYTES_MAX {
        match stream.write(&noise[at..]) {
            Ok(written @ 1..) => {
                sent.fetch_add(written as u64, Ordering::Relaxed);
                at = (at + written) % noise.len();
            }
            Err(error) if is_temporary(&error) => {}
            // The receiver counts what has arrived.
            Ok(0) | Err(_) => return,
        }
    }
}

fn receive(mut stream: &TcpStream, arrived: &AtomicU64, is_over: &AtomicBool) {
    let mut block = vec![0; BLOCK_BYTES];
    while !is_over.load(Ordering::Acquire) {
        match stream.read(&mut block) {
            Ok(read @ 1..) => drop(arrived.fetch_add(read as u64, Ordering::AcqRel)),
            Err(error) if is_temporary(&error) => {}
            Ok(0) | Err(_) => return,
        }
    }
}
