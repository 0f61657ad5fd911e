//! Callers that prove nothing, many of them and of every kind, beside hubs, ranks and operators that need the
//! manager.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::common::*;
use paramhub_control::ManagerClient;
use paramhub_core::service::{ErrorCode, JobState, ServiceError};
use paramhub_manager::{Manager, ManagerConfig};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use socket2::{Domain, Socket, Type};

const TOKEN: &str = "the-first-token";
const INIT: &str = "/v1/jobs/00000000000000000000000000000000/init";

/// The bytes of such clients: these first, and then a byte now and then or none.
#[derive(Clone)]
struct ClientBehaviour {
    beginning: Vec<u8>,
    drips: bool,
}

fn head(path: &str, length: usize) -> Vec<u8> {
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    )
    .into_bytes()
}

fn behaviours() -> Vec<ClientBehaviour> {
    let behaviour = |beginning: &[u8], drips| ClientBehaviour { beginning: beginning.to_vec(), drips };
    let long_body = [head(INIT, 64 << 10), vec![b' '; 4000]].concat();
    vec![
        behaviour(b"", false),
        behaviour(b"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\n", false),
        behaviour(b"POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\nx-", true),
        behaviour(&head(INIT, 512 << 20), false),
        behaviour(&head(INIT, 512 << 20), true),
        behaviour(&head("/v1/jobs", 60_000), true),
        behaviour(&long_body, true),
        // The handshake of TLS: its first byte, the head of a record that never comes, and a whole first message,
        // which the manager answers with a signature, without what must follow.
        behaviour(&[22], false),
        behaviour(&[&[22, 3, 1, 0x40, 0, 1, 0, 0x3f, 0xfc][..], &[3; 4000]].concat(), true),
        behaviour(&client_hello(), false),
    ]
}

fn client_hello() -> Vec<u8> {
    let config = paramhub_trust::caller_by_token();
    let mut caller = rustls::ClientConnection::new(config, paramhub_trust::manager_name()).unwrap();
    let mut hello = Vec::new();
    caller.write_tls(&mut hello).unwrap();
    hello
}

/// UnauthenticatedClients that reconnect whenever they are turned away, until they are dropped.
struct UnauthenticatedClients {
    quit: Arc<AtomicBool>,
    opened: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

impl UnauthenticatedClients {
    fn at(manager: SocketAddr, count: usize, addresses: u8) -> UnauthenticatedClients {
        let (quit, opened) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let thread = std::thread::spawn({
            let (quit, opened) = (quit.clone(), opened.clone());
            move || {
                let behaviours = behaviours();
                let mut sockets: Vec<Option<Socket>> = (0..count).map(|_| None).collect();
                while !quit.load(Ordering::Relaxed) {
                    for (index, place) in sockets.iter_mut().enumerate() {
                        let behaviour = &behaviours[index % behaviours.len()];
                        let from = Ipv4Addr::new(127, 0, 7, 1 + (index % usize::from(addresses)) as u8);
                        if place.as_ref().is_none_or(|socket| is_gone(socket, behaviour)) {
                            *place = open(manager, from, behaviour);
                            opened.fetch_add(1, Ordering::Relaxed);
                        }
                        if quit.load(Ordering::Relaxed) {
                            return;
                        }
                    }
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
        });
        let clients = UnauthenticatedClients { quit, opened, thread: Some(thread) };
        eventually("every client has called", || clients.opened.load(Ordering::Relaxed) >= count);
        clients
    }
}

impl Drop for UnauthenticatedClients {
    fn drop(&mut self) {
        self.quit.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn open(manager: SocketAddr, from: Ipv4Addr, behaviour: &ClientBehaviour) -> Option<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from((from, 0)).into()).ok()?;
    socket.connect_timeout(&manager.into(), Duration::from_secs(1)).ok()?;
    socket.set_nonblocking(true).unwrap();
    let _ = (&socket).write(&behaviour.beginning);
    Some(socket)
}

fn is_gone(mut socket: &Socket, behaviour: &ClientBehaviour) -> bool {
    if behaviour.drips && matches!(socket.write(b" "), Err(cause) if cause.kind() != ErrorKind::WouldBlock) {
        return true;
    }
    let mut answer = [0; 1024];
    !matches!(socket.read(&mut answer), Err(cause) if cause.kind() == ErrorKind::WouldBlock)
}

/// Checks a job that runs from before the clients come until after they have gone, and new jobs meanwhile.
fn jobs_are_served_beside(
    clients: impl FnOnce(SocketAddr) -> UnauthenticatedClients,
    config: ManagerConfig,
    new: usize,
) {
    let hub_timeout = config.hub_timeout;
    let manager = Manager::start(ManagerConfig { admin_token: Some(TOKEN.into()), ..config }).unwrap();
    // Hub, operator and ranks call over TLS, as they do from other machines.
    let url = format!("https://{}", manager.address());
    let client = ManagerClient::new(&url, Some(TOKEN.into())).unwrap();
    let authority = client.authority().unwrap().fingerprint;
    let worker = ManagerClient::of_worker(&url, Some(authority)).unwrap();
    let hub = Hub::join(&client, crate::common::HubBehaviour::Serve);
    let begin = |name: &str| {
        let job = Job { client: worker.clone(), ..Job::create(&client, name, 2) };
        for (rank, connected) in job.all_ranks(0..2, Job::connect).into_iter().enumerate() {
            connected.unwrap_or_else(|refused| panic!("{name}, rank {rank}: {refused}"));
        }
        for initialised in job.all_ranks(0..2, |job, rank| job.init(rank, settings(2000))) {
            initialised.unwrap();
        }
        job
    };
    let running = begin("running");
    let clients = clients(manager.address());
    let came = Instant::now();
    let mut round = 0;
    while round < new || came.elapsed() < 2 * hub_timeout {
        let job = begin(&format!("new-{round}"));
        hub.finish(&job);
        assert_eq!(client.job(&job.name).unwrap().state, JobState::Finished);
        round += 1;
    }
    assert_eq!(client.job("running").unwrap().state, JobState::Running);
    assert_eq!(client.hubs().unwrap().len(), 1);
    drop(clients);
    hub.finish(&running);
    assert_eq!(client.job("running").unwrap().state, JobState::Finished);
}

#[test]
fn unauthenticated_clients_at_the_workers_own_address_end_no_job_and_keep_none_out() {
    let config = ManagerConfig { unauthenticated_max: 48, hub_timeout: Duration::from_secs(3), ..config() };
    jobs_are_served_beside(|manager| UnauthenticatedClients::at(manager, 300, 1), config, 3);
}

#[test]
fn unauthenticated_clients_at_many_addresses_end_no_job_and_keep_none_out() {
    let config = ManagerConfig { unauthenticated_max: 48, hub_timeout: Duration::from_secs(3), ..config() };
    jobs_are_served_beside(|manager| UnauthenticatedClients::at(manager, 300, 100), config, 3);
}

#[test]
fn eight_thousand_unauthenticated_clients_end_no_job_and_keep_none_out() {
    let limit = getrlimit(Resource::Nofile);
    if limit.maximum.is_some_and(|most| most < 12_000) {
        println!("skipped: this process may not open 12,000 descriptors");
        return;
    }
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }).unwrap();
    jobs_are_served_beside(|manager| UnauthenticatedClients::at(manager, 8300, 1), config(), 1);
}

#[test]
fn a_hub_with_a_wrong_token_is_refused_before_its_body_is_read() {
    let (manager, client) = start(config());
    let hub = Hub::join(&client, crate::common::HubBehaviour::Serve);
    for (hub, status) in [(hub.registered.hub, "401"), (7, "404")] {
        let promised = format!(
            "POST /v1/hubs/{hub}/events HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer guess\r\ncontent-type: \
             application/json\r\ncontent-length: 4000000\r\n\r\n"
        );
        let answer = raw(manager.address(), promised.as_bytes());
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
    }
}

#[test]
fn two_dripping_key_tables_without_a_proof_hold_up_no_job() {
    let (manager, client) = start(config());
    let hub = Hub::join(&client, crate::common::HubBehaviour::Serve);
    let sockets: Vec<Socket> = (0..2)
        .map(|_| {
            let behaviour = ClientBehaviour { beginning: head(INIT, 512 << 20), drips: true };
            let socket = open(manager.address(), Ipv4Addr::LOCALHOST, &behaviour).unwrap();
            assert!(!is_gone(&socket, &behaviour));
            socket
        })
        .collect();
    let begun = Instant::now();
    let job = Job::create(&client, "prompt", 1);
    job.connect(0).unwrap();
    job.init(0, settings(8)).unwrap();
    assert!(begun.elapsed() < WAIT_TIMEOUT, "it waited for the minute of the unauthenticated clients");
    hub.finish(&job);
    drop(sockets);
}

#[test]
fn ranks_that_wait_for_others_leave_hubs_and_smaller_jobs_their_places() {
    let config = ManagerConfig {
        ranks_max: 40,
        unauthenticated_max: 64,
        hub_timeout: Duration::from_secs(2),
        ..config()
    };
    let (manager, client) = start(config);
    let hub = Hub::join(&client, crate::common::HubBehaviour::Serve);
    let crowd = Job::create(&client, "crowd", 33);
    let ask = |job: &Job, rank: u32| {
        let body = serde_json::to_string(&job.connect_request(rank, process(rank))).unwrap();
        request("POST", &format!("/v1/jobs/{}/connect", job.namespace), &body)
    };
    // All ranks but one, so that they wait.
    let waiting: Vec<TcpStream> = (0..32)
        .map(|rank| {
            let mut stream = TcpStream::connect(manager.address()).unwrap();
            stream.write_all(&ask(&crowd, rank)).unwrap();
            stream
        })
        .collect();
    eventually("all wait", || crowd.connected().len() == 32);
    let second = Job::create(&client, "second", 33);
    let answer = raw(manager.address(), &ask(&second, 0));
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 503 "), "{answer}");
    let refused: ServiceError = serde_json::from_str(body).unwrap();
    assert_eq!(refused.code, ErrorCode::Internal);
    assert!(refused.message.contains("places for 40"), "{}", refused.message);
    let small = Job::create(&client, "small", 2);
    assert!(small.all_ranks(0..2, Job::connect).iter().all(Result::is_ok));
    assert!(small.all_ranks(0..2, |job, rank| job.init(rank, settings(8))).iter().all(Result::is_ok));
    hub.finish(&small);
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(client.hubs().unwrap().len(), 1, "the hub polled beside them");
    // The last rank comes, and all of them advance.
    crowd.connect(32).unwrap();
    for mut stream in waiting {
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
}
