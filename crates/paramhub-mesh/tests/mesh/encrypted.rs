//! Meshes whose connections are encrypted: what a listener sees, and ranks that do not agree.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use paramhub_mesh::{ElementType, Mesh, MeshConfig, ReduceOp};
use paramhub_transport::lend;

use crate::common::{WAIT_TIMEOUT, at_all, config, done, listeners, meshes_with};

/// The bytes that have passed through a relay.
type Heard = Arc<Mutex<Vec<u8>>>;

/// Passes one connection on to `to` and records what it carries.
fn relay(to: SocketAddr) -> (SocketAddr, Heard) {
    let (listener, heard) = (TcpListener::bind("127.0.0.1:0").unwrap(), Heard::default());
    let (address, recorded) = (listener.local_addr().unwrap(), heard.clone());
    thread::spawn(move || {
        let from = listener.accept().unwrap().0;
        let to = TcpStream::connect(to).unwrap();
        let copies = [(&from, &to), (&to, &from)]
            .map(|(from, to)| (from.try_clone().unwrap(), to.try_clone().unwrap(), recorded.clone()));
        let threads = copies.map(|(mut from, mut to, recorded)| {
            thread::spawn(move || {
                let mut piece = vec![0; 64 << 10];
                while let Ok(read @ 1..) = from.read(&mut piece) {
                    recorded.lock().unwrap().extend_from_slice(&piece[..read]);
                    if to.write_all(&piece[..read]).is_err() {
                        return;
                    }
                }
                let _ = to.shutdown(std::net::Shutdown::Write);
            })
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    (address, heard)
}

/// What is heard between two ranks that add up a tensor of twos.
fn heard_between_two(encrypts: bool) -> Vec<u8> {
    const ELEMENTS: usize = 100_000;
    let (listeners, mut addresses) = listeners(2);
    let (address, heard) = relay(addresses[0]);
    addresses[0] = address;
    let meshes: Vec<Mesh> = thread::scope(|scope| {
        let joins = listeners.into_iter().enumerate().map(|(rank, listener)| {
            let config = config(rank as u32, &addresses);
            let config = MeshConfig { shares_memory: false, encrypts, ..config };
            scope.spawn(move || listener.join(config).unwrap())
        });
        joins.collect::<Vec<_>>().into_iter().map(|join| join.join().unwrap()).collect()
    });
    at_all(meshes, |mesh| {
        let mut sum = 2.0_f32.to_le_bytes().repeat(ELEMENTS);
        lend(|lending| done(mesh.allreduce(lending.receive(&mut sum), ElementType::F32, ReduceOp::Sum)))
            .unwrap();
        assert!(sum == 4.0_f32.to_le_bytes().repeat(ELEMENTS));
        mesh.leave(WAIT_TIMEOUT).unwrap();
    });
    let heard = heard.lock().unwrap().clone();
    assert!(heard.len() >= ELEMENTS * 4, "only {} bytes were heard", heard.len());
    heard
}

fn has_twos(heard: &[u8]) -> bool {
    let twos = 2.0_f32.to_le_bytes().repeat(16);
    heard.windows(twos.len()).any(|bytes| bytes == twos)
}

#[test]
fn a_listener_sees_tensors_unless_they_are_encrypted() {
    assert!(has_twos(&heard_between_two(false)), "the listener works");
    assert!(!has_twos(&heard_between_two(true)));
}

#[test]
fn ranks_of_one_host_share_memory_also_where_connections_are_encrypted() {
    let meshes = meshes_with(3, |config| MeshConfig { encrypts: true, ..config });
    at_all(meshes, |mesh| {
        assert!(mesh.shares_memory().is_ok(), "{mesh:?}");
        done(mesh.barrier()).unwrap();
        mesh.leave(WAIT_TIMEOUT).unwrap();
    });
}

#[test]
fn ranks_that_do_not_agree_whether_to_encrypt_are_told_so() {
    for encrypts in [[true, false], [false, true]] {
        let (listeners, addresses) = listeners(2);
        let errors: Vec<String> = thread::scope(|scope| {
            let joins =
                listeners.into_iter().zip(encrypts).enumerate().map(|(rank, (listener, encrypts))| {
                    let config = config(rank as u32, &addresses);
                    let join_timeout = Duration::from_secs(2);
                    let config = MeshConfig { encrypts, join_timeout, ..config };
                    scope.spawn(move || listener.join(config).unwrap_err().to_string())
                });
            joins.collect::<Vec<_>>().into_iter().map(|join| join.join().unwrap()).collect()
        });
        let said = errors.iter().any(|error| error.contains("encrypt"));
        assert!(said, "{errors:?}");
    }
}
