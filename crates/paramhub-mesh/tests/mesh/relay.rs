//! A relay that forgets connections, as a switch, a firewall or a load balancer does that is restarted. The tests of the mesh and
//! of the command line share it.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// Something on the paths to a listener that keeps state of each connection, and can forget it.
pub(crate) struct Relay {
    pub(crate) address: SocketAddr,
    listener: Arc<Mutex<Option<SocketAddr>>>,
    connections: Arc<Mutex<Vec<Connection>>>,
    passed: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
    acceptor: Option<JoinHandle<()>>,
}

/// A connection through the relay.
struct Connection {
    caller: TcpStream,
    listener: TcpStream,
    /// The relay has forgotten it: who sends over it gets a reset.
    is_forgotten: Arc<AtomicBool>,
    /// The ends that have closed their side.
    ended: Arc<AtomicUsize>,
}

/// Which end of a connection gets a reset at once. The other gets it when it sends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Learns {
    Both,
    Caller,
    Listener,
}

impl Relay {
    /// A relay that awaits callers. [`Relay::lead_to`] comes before they do.
    pub(crate) fn new() -> Relay {
        let accepting = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut relay = Relay {
            address: accepting.local_addr().unwrap(),
            listener: Arc::default(),
            connections: Arc::default(),
            passed: Arc::default(),
            is_over: Arc::default(),
            acceptor: None,
        };
        let (listener, connections, is_over) =
            (relay.listener.clone(), relay.connections.clone(), relay.is_over.clone());
        let passed = relay.passed.clone();
        let acceptor = std::thread::spawn(move || {
            for caller in accepting.incoming().map_while(Result::ok) {
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
                let address = listener.lock().unwrap().expect("callers come when the listener is known");
                match TcpStream::connect(address) {
                    Ok(listener) => {
                        connections.lock().unwrap().push(Connection::passing(caller, listener, &passed));
                    }
                    Err(_) => reset(&caller),
                }
            }
        });
        relay.acceptor = Some(acceptor);
        relay
    }

    pub(crate) fn lead_to(&self, listener: SocketAddr) {
        *self.listener.lock().unwrap() = Some(listener);
    }

    /// The number of connections that work.
    pub(crate) fn connections(&self) -> usize {
        let mut connections = self.connections.lock().unwrap();
        connections.retain(|connection| {
            connection.ended.load(Ordering::Relaxed) < 2 && connection.caller.peer_addr().is_ok()
        });
        connections.len()
    }

    /// The bytes that have passed.
    pub(crate) fn passed(&self) -> u64 {
        self.passed.load(Ordering::Relaxed)
    }

    /// Forgets one connection, or all of them. Returns how many.
    pub(crate) fn forget(&self, only: Option<usize>, learns: Learns) -> usize {
        let mut connections = self.connections.lock().unwrap();
        let forgotten: Vec<Connection> = match only {
            None => connections.drain(..).collect(),
            Some(_) if connections.is_empty() => Vec::new(),
            Some(nth) => {
                let nth = nth % connections.len();
                vec![connections.remove(nth)]
            }
        };
        for Connection { caller, listener, is_forgotten, .. } in &forgotten {
            is_forgotten.store(true, Ordering::Release);
            if matches!(learns, Learns::Both | Learns::Caller) {
                reset(caller);
            }
            if matches!(learns, Learns::Both | Learns::Listener) {
                reset(listener);
            }
        }
        forgotten.len()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        drop(TcpStream::connect(self.address));
        let _ = self.acceptor.take().map(JoinHandle::join);
    }
}

impl Connection {
    fn passing(caller: TcpStream, listener: TcpStream, passed: &Arc<AtomicU64>) -> Connection {
        let (is_forgotten, ended) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        for (from, to) in [(&caller, &listener), (&listener, &caller)] {
            from.set_nodelay(true).unwrap();
            let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
            let (is_forgotten, ended, passed) = (is_forgotten.clone(), ended.clone(), passed.clone());
            std::thread::spawn(move || {
                pass(&from, &to, &is_forgotten, &passed);
                ended.fetch_add(1, Ordering::Relaxed);
            });
        }
        Connection { caller, listener, is_forgotten, ended }
    }
}

/// Passes on what comes until either side ends, and how it ends.
fn pass(mut from: &TcpStream, mut to: &TcpStream, is_forgotten: &AtomicBool, passed: &AtomicU64) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let read = from.read(&mut buffer);
        if is_forgotten.load(Ordering::Acquire) {
            return reset(from);
        }
        match read {
            Ok(0) => {
                let _ = to.shutdown(Shutdown::Write);
                return;
            }
            Ok(bytes) if to.write_all(&buffer[..bytes]).is_ok() => {
                passed.fetch_add(bytes as u64, Ordering::Relaxed);
            }
            _ if is_forgotten.load(Ordering::Acquire) => return reset(from),
            _ => {
                reset(from);
                return reset(to);
            }
        }
    }
}

/// Resets a connection at once, although other descriptors of it are open.
fn reset(socket: &TcpStream) {
    // This fails if it has ended already.
    let _ = rustix::net::connect_unspec(socket);
}
