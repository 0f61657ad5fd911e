//! The measurement of a probe: for a bounded time both hubs send as much as the streams carry, and each hub
//! measures the rate at which the other's bytes arrive.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use paramhub_transport::greeting::is_temporary;
use paramhub_transport::measuring::{bits_per_second, incompressible};

/// The time after the start in which bytes do not count: in TCP's slow start fewer arrive, and a traffic
/// shaper may admit a burst at first.
const WARM_UP: Duration = Duration::from_millis(150);
/// The time in which bytes count.
const COUNTED: Duration = Duration::from_millis(300);
/// How much longer each end sends after it has counted: the other end may have begun later, and still counts.
const OVERRUN: Duration = Duration::from_millis(50);
/// The most bytes that an end sends over all streams together. A network of up to 128 Gbit/s cannot carry
/// more in the time of a measurement.
const BYTES_MAX: u64 = 8 << 30;
/// The most bytes that one write takes, and one read.
const BLOCK_BYTES: usize = 64 << 10;
/// The least time by which bytes are divided. Streams that end early can leave a shorter time, which would
/// make the rate too high.
const COUNTED_MIN: Duration = Duration::from_millis(1);
/// The longest wait of a read, of a write, and of the thread that counts before it checks whether a stream is
/// still open.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// Sends and receives over all streams at once, and closes them. Returns the bits per second that arrived
/// while this end sent as much as it could.
pub(super) fn measure_both_ways(streams: &[TcpStream]) -> Result<f64, String> {
    let prepare = |stream: &TcpStream| {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(CHECK_INTERVAL))?;
        stream.set_write_timeout(Some(CHECK_INTERVAL))
    };
    streams.iter().try_for_each(prepare).map_err(|error| format!("a stream cannot be prepared: {error}"))?;
    let payload = incompressible(BLOCK_BYTES);
    let (arrived, sent) = (AtomicU64::new(0), AtomicU64::new(0));
    let (open_streams, is_over) = (AtomicUsize::new(streams.len()), AtomicBool::new(false));
    let begin = Instant::now();
    let counted = thread::scope(|scope| {
        let (payload, sent, arrived, open_streams, is_over) =
            (&payload, &sent, &arrived, &open_streams, &is_over);
        let begun = streams.iter().try_for_each(|stream| {
            let sends = move || send(stream, payload, sent, is_over);
            let receives = move || {
                receive(stream, arrived, is_over);
                open_streams.fetch_sub(1, Ordering::AcqRel);
            };
            thread::Builder::new().spawn_scoped(scope, sends)?;
            thread::Builder::new().spawn_scoped(scope, receives).map(drop)
        });
        if let Err(error) = begun {
            is_over.store(true, Ordering::Release);
            return Err(format!("it cannot start a thread: {error}"));
        }
        // Waits until the given time, or until all streams have ended. Returns the bytes that have arrived, and
        // the time.
        let count_at = |until: Instant| {
            while Instant::now() < until && open_streams.load(Ordering::Acquire) > 0 {
                thread::sleep(CHECK_INTERVAL.min(until.saturating_duration_since(Instant::now())));
            }
            (arrived.load(Ordering::Acquire), Instant::now())
        };
        let (before, from) = count_at(begin + WARM_UP);
        let (after, to) = count_at(begin + WARM_UP + COUNTED);
        thread::sleep((begin + WARM_UP + COUNTED + OVERRUN).saturating_duration_since(Instant::now()));
        is_over.store(true, Ordering::Release);
        Ok((after - before, to - from))
    });
    for stream in streams {
        // This fails if the other end has closed the stream before, which does no harm.
        let _ = stream.shutdown(Shutdown::Both);
    }
    match counted? {
        (0, _) => Err("nothing arrived from the other hub".into()),
        (bytes, time) => Ok(bits_per_second(bytes, time, COUNTED_MIN)),
    }
}

/// Sends until the measurement is over or the stream fails.
fn send(mut stream: &TcpStream, payload: &[u8], sent: &AtomicU64, is_over: &AtomicBool) {
    let mut at = 0;
    while !is_over.load(Ordering::Acquire) && sent.load(Ordering::Relaxed) < BYTES_MAX {
        match stream.write(&payload[at..]) {
            Ok(written @ 1..) => {
                sent.fetch_add(written as u64, Ordering::Relaxed);
                at = (at + written) % payload.len();
            }
            Err(error) if is_temporary(&error) => {}
            // A broken stream is no error here: the rate is that of the bytes that arrived.
            Ok(0) | Err(_) => return,
        }
    }
}

/// Receives until the measurement is over or the stream ends.
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
