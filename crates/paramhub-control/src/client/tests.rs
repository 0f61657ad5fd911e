//! The client with servers that answer as they are told.

use super::*;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Mutex;

use paramhub_core::service::{ServiceError, refusal};

/// A server that answers one connection with these bytes.
fn answering(bytes: &'static [u8]) -> (String, std::thread::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = listener.local_addr().unwrap().to_string();
    let server = std::thread::spawn(move || {
        let mut connection = listener.accept().unwrap().0;
        assert!(connection.read(&mut [0; 4096]).unwrap() > 0);
        connection.write_all(bytes).unwrap();
    });
    (url, server)
}

#[test]
fn a_silent_port_says_what_to_start() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let client = ManagerClient::new(&format!("127.0.0.1:{port}"), None).unwrap();
    let refused = client.jobs().unwrap_err();
    assert!(matches!(refused, ControlError::Unreachable { .. }), "{refused:?}");
    assert!(refused.to_string().contains("Is `paramhub hub`"), "{refused}");
    assert!(refused.to_string().contains(&port.to_string()), "{refused}");
}

#[test]
fn another_server_is_distinguished_from_a_manager() {
    for bytes in [
        &b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"[..],
        b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    ] {
        let (url, server) = answering(bytes);
        let refused = ManagerClient::new(&url, None).unwrap().jobs().unwrap_err();
        assert!(matches!(refused, ControlError::Protocol { .. }), "{refused:?}");
        server.join().unwrap();
    }
}

#[test]
fn retries_outlast_a_manager_that_starts_late() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let server = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        let mut connection = TcpListener::bind(address).unwrap().accept().unwrap().0;
        assert!(connection.read(&mut [0; 4096]).unwrap() > 0);
        connection.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]").unwrap();
    });
    let client = ManagerClient::new(&address.to_string(), None).unwrap();
    assert!(client.with_retry_timeout(Duration::from_secs(30)).jobs().unwrap().is_empty());
    server.join().unwrap();
}

#[test]
fn a_job_name_is_one_path_segment() {
    assert_eq!(job_path("team/run.7"), "/v1/jobs/team%2Frun%2E7");
    assert_eq!(job_path(".."), "/v1/jobs/%2E%2E");
}

/// What a server does with one connection.
enum Step {
    /// It answers with a status line and a body.
    Answer(&'static str, String),
    /// It closes the connection without an answer.
    Break,
    /// It does not answer as long as the server is there.
    Silent,
}

/// A server that handles one connection after the other, and refuses those that come later.
struct Server {
    address: String,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Server {
    fn start(steps: Vec<Step>) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = requests.clone();
        std::thread::spawn(move || {
            let mut silent = Vec::new();
            for step in steps {
                let mut connection = listener.accept().unwrap().0;
                let mut request = vec![0; 4096];
                let bytes = connection.read(&mut request).unwrap();
                seen.lock().unwrap().push(String::from_utf8_lossy(&request[..bytes]).into_owned());
                match step {
                    Step::Answer(status, body) => {
                        let head = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n", body.len());
                        connection.write_all((head + &body).as_bytes()).unwrap();
                    }
                    Step::Break => {}
                    Step::Silent => silent.push(connection),
                }
            }
        });
        Server { address, requests }
    }

    fn calls(&self) -> usize {
        self.requests.lock().unwrap().len()
    }
}

fn follows(leader: Option<&Server>) -> Step {
    let leader = leader.map(|leader| format!("http://{}", leader.address));
    let refused = ServiceError { leader, ..refusal(ErrorCode::NotLeader, "it follows another") };
    Step::Answer("503 Service Unavailable", serde_json::to_string(&refused).unwrap())
}

fn no_jobs() -> Step {
    Step::Answer("200 OK", "[]".to_owned())
}

fn client_of(servers: &[&Server]) -> ManagerClient {
    let urls: Vec<&str> = servers.iter().map(|server| server.address.as_str()).collect();
    ManagerClient::new(&urls.join(","), None).unwrap()
}

/// A port on which nothing listens.
fn nobody() -> Server {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    Server { address, requests: Arc::default() }
}

#[test]
fn a_call_goes_to_the_manager_that_leads_which_is_remembered() {
    let (follower, leader) = (Server::start(vec![follows(None)]), Server::start(vec![no_jobs(), no_jobs()]));
    let client = client_of(&[&nobody(), &follower, &leader]);
    assert!(client.jobs().unwrap().is_empty());
    assert!(client.clone().jobs().unwrap().is_empty(), "the follower would refuse the connection");
    assert_eq!((follower.calls(), leader.calls()), (1, 2));
    assert_eq!(client.host_and_port(), leader.address);
}

#[test]
fn a_follower_says_whom_to_call_next() {
    let (between, leader) = (Server::start(vec![no_jobs()]), Server::start(vec![no_jobs()]));
    let follower = Server::start(vec![follows(Some(&leader))]);
    client_of(&[&follower, &between, &leader]).jobs().unwrap();
    assert_eq!((between.calls(), leader.calls()), (0, 1));
}

#[test]
fn a_call_waits_until_a_manager_leads() {
    let other = Server::start(vec![follows(None), follows(None)]);
    let next = Server::start(vec![Step::Break, follows(None), no_jobs()]);
    client_of(&[&next, &other]).jobs().unwrap();
    assert_eq!(next.calls(), 3);
    // Who names one manager alone, which follows, is patient, too.
    let alone = Server::start((0..9).map(|_| follows(None)).chain([no_jobs()]).collect());
    client_of(&[&alone]).jobs().unwrap();
}

#[test]
fn a_call_that_no_manager_takes_names_all_of_them() {
    let servers = [nobody(), nobody()];
    let client = client_of(&[&servers[0], &servers[1]]).with_retry_timeout(Duration::ZERO);
    let refused = client.jobs().unwrap_err();
    assert!(refused.is_away() && matches!(refused, ControlError::Unreachable { .. }), "{refused:?}");
    assert!(servers.iter().all(|server| refused.to_string().contains(&server.address)), "{refused}");
    let follower = Server::start((0..20).map(|_| follows(None)).collect());
    let refused = client_of(&[&servers[0], &follower]).with_retry_timeout(Duration::ZERO).jobs().unwrap_err();
    assert!(refused.is_away() && matches!(refused, ControlError::NoLeader { .. }), "{refused:?}");
    assert!(refused.to_string().contains("it follows another"), "{refused}");
}

#[test]
fn a_manager_that_is_silent_is_given_up_once_another_leads() {
    let frozen = Server::start(vec![Step::Silent, Step::Silent]);
    let leads = || Step::Answer("200 OK", "ok, leads\n".to_owned());
    let leader =
        Server::start(vec![Step::Answer("200 OK", "ok, follows nobody\n".into()), leads(), no_jobs()]);
    let client = client_of(&[&frozen, &leader]);
    assert!(client.jobs().unwrap().is_empty());
    assert_eq!((frozen.calls(), leader.calls()), (1, 3));
}

#[test]
fn a_job_whose_creation_was_not_answered_is_found_by_the_next_call() {
    let created = r#"{"namespace": "00000000000000000000000000000001", "nonce": "NONCE"}"#;
    let created = created.replace("NONCE", &"1".repeat(64));
    let dying = Server::start(vec![Step::Break]);
    let next = Server::start(vec![Step::Answer("200 OK", created)]);
    let client = client_of(&[&dying, &next]);
    client
        .create_service(&CreateService { name: "j".into(), workers: 1, options: Default::default() })
        .unwrap();
    let key = |server: &Server| {
        let requests = server.requests.lock().unwrap();
        let line = requests[0].lines().find(|line| line.to_lowercase().starts_with("idempotency-key: "));
        line.expect("the call has a key").to_lowercase()
    };
    assert_eq!(key(&dying), key(&next));
}
