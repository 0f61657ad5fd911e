//! A real etcd on free loopback ports. The tests of this crate and of the program include this file.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its part")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// Far above what an etcd takes to start on two busy cores.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// An etcd with one member. It is killed, by its id, when it is dropped.
pub struct EtcdServer {
    process: Option<Child>,
    folder: TempDir,
    client_port: u16,
    peer_port: u16,
}

impl EtcdServer {
    pub fn start() -> EtcdServer {
        for _ in 0..5 {
            let [client_port, peer_port] = free_ports();
            let folder = tempfile::tempdir().expect("a temporary folder");
            let mut server = EtcdServer { process: None, folder, client_port, peer_port };
            if server.try_start() {
                return server;
            }
        }
        panic!("etcd does not start: is Debian's package etcd-server installed?");
    }

    /// What a manager gets as its state.
    pub fn address(&self, prefix: &str) -> String {
        format!("etcd://127.0.0.1:{}/{prefix}", self.client_port)
    }

    /// For etcd's own client.
    pub fn endpoint(&self) -> String {
        format!("127.0.0.1:{}", self.client_port)
    }

    /// Kills it. Its data stay.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    /// Starts it again, with its data.
    pub fn start_again(&mut self) {
        assert!(self.try_start(), "etcd does not start again");
    }

    /// The process, to freeze it.
    pub fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(self.process.as_ref().expect("it runs"))
    }

    /// Returns false if it ends, as it does where another process has taken a port.
    fn try_start(&mut self) -> bool {
        let client = format!("http://127.0.0.1:{}", self.client_port);
        let peer = format!("http://127.0.0.1:{}", self.peer_port);
        let log = std::fs::File::create(self.folder.path().join("log")).expect("a log");
        let process = Command::new("etcd")
            .args(["--name", "only", "--log-level", "error", "--data-dir"])
            .arg(self.folder.path().join("data"))
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("only={peer}")])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("etcd is on PATH: Debian's package is etcd-server");
        let process = self.process.insert(process);
        let begun = Instant::now();
        while !is_healthy(self.client_port) {
            if process.try_wait().expect("it can be waited for").is_some() {
                self.process = None;
                return false;
            }
            assert!(begun.elapsed() < START_TIMEOUT, "etcd is not healthy after {START_TIMEOUT:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
        true
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        self.kill();
    }
}

fn free_ports() -> [u16; 2] {
    let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").expect("a free port"));
    listeners.map(|listener| listener.local_addr().expect("it listens").port())
}

fn is_healthy(port: u16) -> bool {
    let ask = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_read_timeout(Some(Duration::from_secs(2)))?;
        stream.write_all(b"GET /health HTTP/1.0\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    ask().is_ok_and(|answer| answer.contains(r#""health":"true""#))
}
