//! Starting and stopping a connection manager from a blocking program.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};

use crate::config::ManagerConfig;
use crate::error::ManagerError;
use crate::metered_stream::UNAUTHENTICATED_BUFFER;
use crate::registry::Registry;
use crate::server::serve;

/// Threads that answer requests. Long work runs on other threads.
const EXECUTOR_THREADS: usize = 2;
/// Threads for the store, large bodies and placements.
const BLOCKING_THREADS: usize = 4;
/// Connections that may wait to be accepted. The system usually allows no more.
const BACKLOG: i32 = 4096;
/// The time that work on the blocking threads may still take when the manager stops.
const STOP_GRACE: Duration = Duration::from_millis(200);

/// The connection manager.
pub struct Manager;

/// A connection manager that runs on its own threads, until it is stopped or dropped.
pub struct RunningManager {
    address: SocketAddr,
    registry: Arc<Registry>,
    thread: Option<JoinHandle<()>>,
}

impl Manager {
    /// Starts a connection manager; when this returns, it answers.
    pub fn start(config: ManagerConfig) -> Result<RunningManager, ManagerError> {
        config.check()?;
        let listener = listen(config.listen)?;
        let address = listener.local_addr().map_err(ManagerError::System)?;
        let registry = Registry::open(&config)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(EXECUTOR_THREADS)
            .max_blocking_threads(BLOCKING_THREADS)
            .thread_name("manager")
            .enable_io()
            .enable_time()
            .build()
            .map_err(ManagerError::System)?;
        // Strangers can make the manager sign handshakes as fast as it can. Those have a thread of their own, so that
        // hubs and ranks that have proved something are answered meanwhile.
        let handshakes = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("manager-tls")
            .build()
            .map_err(ManagerError::System)?;
        let listener = {
            let _guard = runtime.enter();
            tokio::net::TcpListener::from_std(listener).map_err(ManagerError::System)?
        };
        let serving = registry.clone();
        let run = move || {
            runtime.block_on(async {
                let saving = tokio::spawn(serving.clone().save_changes());
                tokio::spawn(serving.clone().watch_time());
                tokio::spawn(serving.clone().renew_certificates());
                serve(listener, serving, handshakes.handle().clone()).await;
                // The last states are worth a short wait, but a disk that hangs must not keep the manager
                // from stopping.
                let _ = tokio::time::timeout(STOP_GRACE, saving).await;
            });
            handshakes.shutdown_background();
            runtime.shutdown_timeout(STOP_GRACE);
        };
        let thread =
            std::thread::Builder::new().name("manager".into()).spawn(run).map_err(ManagerError::System)?;
        tracing::info!(%address, "connection manager started");
        Ok(RunningManager { address, registry, thread: Some(thread) })
    }
}

impl RunningManager {
    /// The address it listens on, with the port that the system chose if none was given.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The URL for programs on this machine. A manager that listens on all addresses is reached over
    /// loopback.
    pub fn url(&self) -> String {
        let host = match self.address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
            IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
            ip => ip,
        };
        // What goes over loopback does not leave this machine.
        let scheme = if self.registry.needs_tls && !host.is_loopback() { "https" } else { "http" };
        format!("{scheme}://{}", SocketAddr::new(host, self.address.port()))
    }

    /// Stops the manager within a second: it accepts no further connection and notifies every caller that
    /// waits.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.registry.stop();
        if let Some(thread) = self.thread.take() {
            // A manager that panicked has reported that on standard error and has stopped already.
            let _ = thread.join();
        }
    }
}

impl Drop for RunningManager {
    fn drop(&mut self) {
        self.end();
    }
}

impl std::fmt::Debug for RunningManager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunningManager").field("address", &self.address).finish_non_exhaustive()
    }
}

fn listen(address: SocketAddr) -> Result<TcpListener, ManagerError> {
    let bind = || {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_reuse_address(true)?;
        // Connections inherit this. It must be set before they are accepted, since an unauthenticated caller
        // may send bytes before that.
        socket.set_recv_buffer_size(UNAUTHENTICATED_BUFFER)?;
        socket.set_send_buffer_size(UNAUTHENTICATED_BUFFER)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        socket.set_nonblocking(true)?;
        Ok(TcpListener::from(socket))
    };
    bind().map_err(|cause: std::io::Error| {
        let advice = match cause.kind() {
            std::io::ErrorKind::AddrInUse => {
                "Another program, perhaps another connection manager, listens there: stop it or choose another port"
            }
            std::io::ErrorKind::AddrNotAvailable => "This machine has no such address",
            std::io::ErrorKind::PermissionDenied => "Ports below 1024 are for root: choose a higher one",
            _ => "Choose another address",
        };
        ManagerError::Listen { address, cause, advice }
    })
}
