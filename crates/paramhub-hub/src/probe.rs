//! Probes: what the network between this hub and another carries, measured when the manager asks for it (PHub section 3.4).
//!
//! One of the two hubs dials the other, with a few streams to the listeners that streams of jobs use and a
//! secret that the manager has drawn for this probe. Then both send as much as they can for half a second,
//! and each reports to the manager what has arrived.

mod transfer;

use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender};
use std::thread;
use std::time::{Duration, Instant};

use paramhub_core::auth::Incarnation;
use paramhub_core::service::{ProbeOrder, ProbeOutcome, ProbeReport};
use paramhub_core::wire::{Attempt, CHALLENGE_BYTES, Caller, Capabilities, Hello, Refusal, VerdictError};
use paramhub_transport::dialling::{dial, dial_first, dial_from};
use paramhub_transport::greeting::{GreetingError, greet};

use crate::directory::Directory;
use crate::events::ControllerEvent;
use crate::expected_probe::ExpectedProbe;

/// How long all streams together may take to open.
const CONNECT: Duration = Duration::from_millis(500);
/// Pause before a hub that does not know of the probe yet is dialled again.
const REDIAL: Duration = Duration::from_millis(20);
/// Streams of one probe.
const STREAMS_MAX: u16 = 64;

/// Runs probes, one at a time.
pub(crate) struct Prober {
    /// The addresses on which this hub listens: streams to another hub leave from them in turn.
    pub(crate) addresses: Vec<SocketAddr>,
    /// Whether the rates of all its interfaces are known.
    pub(crate) is_rated: bool,
    pub(crate) is_probing: Arc<AtomicBool>,
}

impl Prober {
    /// Begins a probe on a thread of its own, which reports the outcome to the job controller. With `refused`
    /// it only reports that reason.
    pub(crate) fn begin(
        &self,
        order: ProbeOrder,
        refused: Option<String>,
        directory: &Arc<Directory>,
        controller: &SyncSender<ControllerEvent>,
    ) {
        let (probe, is_rated) = (order.probe, self.is_rated);
        let report = move |outcome| ControllerEvent::Probed(ProbeReport { probe, outcome, is_rated });
        let refused = refused.or_else(|| {
            let is_probing = self.is_probing.swap(true, Ordering::AcqRel);
            is_probing.then(|| "it takes part in another probe".to_string())
        });
        if let Some(reason) = refused {
            // The job controller itself is the caller: it must not wait for room in its own channel.
            let _ = controller.try_send(report(ProbeOutcome::Failed(reason)));
            return;
        }
        let (is_probing, sources) = (self.is_probing.clone(), self.addresses.clone());
        let (directory, to) = (directory.clone(), controller.clone());
        let probes = move || {
            let measured = take_part(&order, &sources, &directory.probe);
            is_probing.store(false, Ordering::Release);
            let outcome = measured.map_or_else(ProbeOutcome::Failed, ProbeOutcome::BitsPerSecond);
            // If the job controller is gone, there is no report.
            let _ = to.send(report(outcome));
        };
        if let Err(error) = thread::Builder::new().name("hub-probe".into()).spawn(probes) {
            self.is_probing.store(false, Ordering::Release);
            let reason = format!("it cannot start a thread: {error}");
            let _ = controller.try_send(report(ProbeOutcome::Failed(reason)));
        }
    }
}

fn take_part(order: &ProbeOrder, sources: &[SocketAddr], awaited: &ExpectedProbe) -> Result<f64, String> {
    if !(1..=STREAMS_MAX).contains(&order.streams) {
        return Err(format!("{} streams were asked for: 1 to {STREAMS_MAX} are possible", order.streams));
    }
    let deadline = Instant::now() + CONNECT;
    let streams = match order.dial.is_empty() {
        true => {
            let coming = awaited.expect(order);
            let streams = await_streams(order, &coming, deadline);
            awaited.forget();
            streams?
        }
        false => dial_streams(order, sources, deadline)?,
    };
    transfer::measure_both_ways(&streams)
}

fn await_streams(
    order: &ProbeOrder,
    coming: &Receiver<OwnedFd>,
    deadline: Instant,
) -> Result<Vec<TcpStream>, String> {
    let mut streams = Vec::new();
    while streams.len() < usize::from(order.streams) {
        let left = deadline.saturating_duration_since(Instant::now());
        let stream = coming.recv_timeout(left).map_err(|_| {
            format!(
                "of {} streams from the other hub {} came within {} ms",
                order.streams,
                streams.len(),
                CONNECT.as_millis()
            )
        })?;
        streams.push(TcpStream::from(stream));
    }
    Ok(streams)
}

/// Dials all streams at the same time, since each takes several round trips.
fn dial_streams(
    order: &ProbeOrder,
    sources: &[SocketAddr],
    deadline: Instant,
) -> Result<Vec<TcpStream>, String> {
    thread::scope(|scope| {
        let dialling: Vec<_> = (0..usize::from(order.streams))
            .map(|number| {
                let to = &order.dial[number % order.dial.len()];
                let from = sources.get(number % sources.len().max(1)).map(|source| source.ip());
                let dials = move || {
                    dial_stream(order, to, from, deadline).map_err(|why| format!("no stream to {to}: {why}"))
                };
                let begun = thread::Builder::new().spawn_scoped(scope, dials);
                begun.map_err(|error| format!("it cannot start a thread: {error}"))
            })
            .collect();
        dialling.into_iter().map(|dial| dial?.join().expect("dialling does not panic")).collect()
    })
}

/// Opens one stream, and dials again while the other hub does not know of the probe.
fn dial_stream(
    order: &ProbeOrder,
    to: &str,
    from: Option<IpAddr>,
    deadline: Instant,
) -> Result<TcpStream, String> {
    let hello = Hello {
        caller: Caller::Prober,
        interface: 0,
        core: 0,
        standby_route: None,
        offered: Capabilities::default(),
        required: Capabilities::default(),
        attempt: Attempt::first(0),
        namespace: order.probe,
        incarnation: Incarnation([0; 16]),
        placement: [0; 32],
        challenge: [0; CHALLENGE_BYTES],
    };
    loop {
        let mut stream = connect(to, from, deadline)?;
        match greet(&mut stream, &order.nonce.into(), hello, false, deadline) {
            Ok(_) => return Ok(stream),
            Err(GreetingError::Verdict(VerdictError::Refused { refusal: Refusal::WrongNonce, .. }))
                if Instant::now() + REDIAL < deadline =>
            {
                thread::sleep(REDIAL);
            }
            Err(GreetingError::Verdict(VerdictError::Unproven)) => {
                return Err("something else than the hub answers there: it does not know the secret".into());
            }
            Err(error) => return Err(error.to_string()),
        }
    }
}

/// Dials the first address of the name that answers, from `from` if there is a route to it from there.
fn connect(to: &str, from: Option<IpAddr>, deadline: Instant) -> Result<TcpStream, String> {
    let dialled = dial_first(to, deadline, |address, timeout| {
        let begun = Instant::now();
        let from = from.filter(|from| from.is_ipv4() == address.is_ipv4() && !from.is_unspecified());
        let dialled = from.and_then(|from| dial_from(Some(from), address, timeout).ok());
        let left = timeout.saturating_sub(begun.elapsed()).max(Duration::from_millis(1));
        dialled.map_or_else(|| dial(address, left), Ok)
    });
    dialled.map_err(|error| error.to_string())
}
