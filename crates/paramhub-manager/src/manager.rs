//! Starting and stopping a connection manager from a blocking program.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use paramhub_core::tokens::Tokens;
use paramhub_trust::{AuthorityRecord, ManagerIdentity};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::runtime::Runtime;

use crate::access::Access;
use crate::config::ManagerConfig;
use crate::error::ManagerError;
#[cfg(feature = "etcd")]
use crate::etcd::Candidate;
use crate::frontend::Frontend;
use crate::metered_stream::UNAUTHENTICATED_BUFFER;
use crate::registry::{End, Registry};
use crate::server::serve;
use crate::store::{FileStore, Store};
use crate::term::Term;

/// Threads that answer requests. Long work runs on other threads.
const EXECUTOR_THREADS: usize = 2;
/// Threads for the store, large bodies and placements.
const BLOCKING_THREADS: usize = 4;
/// Connections that may wait to be accepted. The system usually allows no more.
const BACKLOG: i32 = 4096;
/// The time that work on the blocking threads may still take when the manager stops.
const STOP_GRACE: Duration = Duration::from_millis(200);
/// The time that a manager that stops may take to save its last states and, if others wait for it, to give up the lead.
const LEAVE_GRACE: Duration = Duration::from_millis(400);

/// The connection manager.
pub struct Manager;

/// A connection manager that runs on its own threads, until it is stopped or dropped.
pub struct RunningManager {
    address: SocketAddr,
    frontend: Arc<Frontend>,
    thread: Option<JoinHandle<()>>,
}

impl Manager {
    /// Starts a connection manager; when this returns, it answers. One that keeps its state in etcd answers first that it
    /// does not lead.
    pub fn start(config: ManagerConfig) -> Result<RunningManager, ManagerError> {
        config.check()?;
        let listener = listen(config.listen)?;
        let address = listener.local_addr().map_err(ManagerError::System)?;
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
        let lead = Lead::open(config, address, &runtime)?;
        let frontend = lead.frontend();
        let serving = frontend.clone();
        let run = move || {
            runtime.block_on(async {
                tokio::spawn(serving.access.clone().renew_certificates());
                let leading = tokio::spawn(lead.hold());
                serve(listener, serving, handshakes.handle().clone()).await;
                // The last states are worth a short wait, but a disk that hangs must not keep the manager
                // from stopping.
                let _ = tokio::time::timeout(LEAVE_GRACE, leading).await;
            });
            handshakes.shutdown_background();
            runtime.shutdown_timeout(STOP_GRACE);
        };
        let thread =
            std::thread::Builder::new().name("manager".into()).spawn(run).map_err(ManagerError::System)?;
        tracing::info!(%address, "connection manager started");
        Ok(RunningManager { address, frontend, thread: Some(thread) })
    }
}

/// What decides whether this manager leads.
enum Lead {
    /// It does always, by itself.
    Alone(Arc<Frontend>, Arc<Registry>),
    /// It does in turn with others.
    #[cfg(feature = "etcd")]
    InTurn(Box<Candidate>),
}

impl Lead {
    #[cfg_attr(
        not(feature = "etcd"),
        expect(unused_variables, reason = "only etcd needs an executor and an address")
    )]
    fn open(config: ManagerConfig, address: SocketAddr, runtime: &Runtime) -> Result<Lead, ManagerError> {
        #[cfg(feature = "etcd")]
        if let Some(etcd) = config.etcd.clone() {
            let url = url_for_others(address, &config);
            let candidate = runtime.block_on(Candidate::open(config, &etcd, url))?;
            return Ok(Lead::InTurn(Box::new(candidate)));
        }
        let store: Arc<dyn Store> = Arc::new(FileStore::open(config.state.as_deref())?);
        let tokens = Tokens::new(config.admin_token.as_deref(), store.load_tokens()?);
        let access = Arc::new(Access::new(&config, authorities(&*store)?, tokens)?);
        let registry = Registry::open(&config, store, access.clone(), Term::Unlimited)?;
        let frontend = Frontend::new(access);
        frontend.lead(&registry);
        Ok(Lead::Alone(frontend, registry))
    }

    fn frontend(&self) -> Arc<Frontend> {
        match self {
            Lead::Alone(frontend, _) => frontend.clone(),
            #[cfg(feature = "etcd")]
            Lead::InTurn(candidate) => candidate.frontend(),
        }
    }

    /// Serves jobs while this manager leads, until it stops.
    async fn hold(self) {
        match self {
            Lead::Alone(frontend, registry) => {
                let saving = tokio::spawn(registry.clone().save_changes());
                tokio::spawn(registry.clone().watch_time());
                frontend.stopped().await;
                registry.end(End::Stop);
                let _ = saving.await;
            }
            #[cfg(feature = "etcd")]
            Lead::InTurn(candidate) => candidate.lead_in_turn().await,
        }
    }
}

/// The authorities in a store. A manager without one makes it.
fn authorities(store: &dyn Store) -> Result<Vec<AuthorityRecord>, ManagerError> {
    let mut authorities = store.load_authorities()?;
    if authorities.is_empty() {
        authorities.push(ManagerIdentity::make_authority()?);
        store
            .save_authorities(&authorities)
            .map_err(|cause| ManagerError::System(std::io::Error::other(cause)))?;
    }
    Ok(authorities)
}

/// The URL under which other machines are likely to reach this manager.
#[cfg(feature = "etcd")]
fn url_for_others(address: SocketAddr, config: &ManagerConfig) -> String {
    let ip = address.ip();
    let host = match config.tls_names.first() {
        Some(name) if ip.is_unspecified() => name.clone(),
        None if ip.is_unspecified() => rustix::system::uname().nodename().to_string_lossy().into_owned(),
        _ if ip.is_ipv6() => format!("[{ip}]"),
        _ => ip.to_string(),
    };
    let scheme = if config.needs_tls() { "https" } else { "http" };
    format!("{scheme}://{host}:{}", address.port())
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
        let scheme = if self.frontend.access.needs_tls && !host.is_loopback() { "https" } else { "http" };
        format!("{scheme}://{}", SocketAddr::new(host, self.address.port()))
    }

    /// Stops the manager within a second: it accepts no further connection and notifies every caller that
    /// waits.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.frontend.stop();
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
