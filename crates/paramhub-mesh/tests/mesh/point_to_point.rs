use std::sync::{Arc, mpsc};
use std::time::Duration;

use paramhub_mesh::{MeshError, ReceiveRegion, SendRegion};
use paramhub_transport::lend;

use crate::common::{Random, WAIT_TIMEOUT, Way, at_all, done, meshes, run, seed};

in_every_way!(
    a_message_goes_from_rank_to_rank_around,
    a_receive_names_its_source,
    many_receives_from_any_rank_take_every_message_once,
    mixed_tags_are_matched_in_order_per_tag,
    small_messages_overtake_a_large_one,
    different_lengths_fail_the_mesh_on_both_sides,
    callbacks_issue_operations_and_a_panic_in_one_fails_the_mesh,
    a_peer_that_left_fails_only_operations_that_need_it,
    leaving_waits_for_sends_and_gives_up_receives,
    a_mesh_that_is_dropped_is_named,
    an_abort_gives_all_ranks_its_reason,
    a_timeout_names_the_awaited_ranks,
    an_impossible_operation_is_refused_at_once,
);

fn a_message_goes_from_rank_to_rank_around(way: Way) {
    run(way, 4, |mesh| {
        let (rank, size) = (mesh.rank(), mesh.size());
        let out = vec![rank as u8; 1000 + rank as usize];
        let before = (rank + size - 1) % size;
        let mut into = vec![0; 1000 + before as usize];
        lend(|lending| {
            let receive = mesh.receive(before, 7, lending.receive(&mut into))?;
            let send = mesh.send((rank + 1) % size, 7, lending.send(&out))?;
            done(Ok(receive))?;
            done(Ok(send))
        })
        .unwrap();
        assert_eq!(into, vec![before as u8; 1000 + before as usize]);
    });
}

fn a_receive_names_its_source(way: Way) {
    run(way, 3, |mesh| {
        if mesh.rank() != 0 {
            return done(mesh.send(0, 5, SendRegion::owned(vec![mesh.rank() as u8]))).unwrap();
        }
        let mut sources = Vec::new();
        let mut values = [0_u8; 2];
        lend(|lending| {
            for value in &mut values {
                let handle = mesh.receive_any(5, lending.receive(std::slice::from_mut(value))).unwrap();
                handle.wait().unwrap();
                sources.push(handle.source().unwrap());
            }
        });
        assert_eq!(sources, values.map(u32::from));
        sources.sort_unstable();
        assert_eq!(sources, [1, 2]);
    });
}

fn many_receives_from_any_rank_take_every_message_once(way: Way) {
    const MESSAGES: u32 = 200;
    run(way, 4, |mesh| {
        // Every rank sends to every other, and receives from any, all at once.
        let mut values = vec![[0_u32; 2]; 3 * MESSAGES as usize];
        let out: Vec<[u32; 2]> = (0..MESSAGES).map(|number| [mesh.rank(), number]).collect();
        let sources: Vec<u32> = lend(|lending| {
            let receives: Vec<_> =
                values.iter_mut().map(|value| mesh.receive_any(9, lending.receive(value)).unwrap()).collect();
            let sends: Vec<_> = out
                .iter()
                .flat_map(|message| (0..4).filter(|to| *to != mesh.rank()).map(move |to| (message, to)))
                .map(|(message, to)| mesh.send(to, 9, lending.send(message)).unwrap())
                .collect();
            sends.into_iter().for_each(|send| done(Ok(send)).unwrap());
            receives
                .into_iter()
                .map(|receive| {
                    assert!(receive.wait_timeout(WAIT_TIMEOUT).unwrap());
                    receive.source().unwrap()
                })
                .collect()
        });
        for source in (0..4).filter(|source| *source != mesh.rank()) {
            // All have come, in order.
            let numbers: Vec<u32> = std::iter::zip(&values, &sources)
                .filter(|(_, from)| **from == source)
                .map(|(value, _)| {
                    assert_eq!(value[0], source);
                    value[1]
                })
                .collect();
            assert_eq!(numbers, (0..MESSAGES).collect::<Vec<_>>());
        }
    });
}

fn mixed_tags_are_matched_in_order_per_tag(way: Way) {
    let seed = seed();
    run(way, 2, |mesh| {
        // Both ranks know all messages; each issues its side in a random order that keeps the order within a
        // tag.
        let mut random = Random(seed);
        let messages: Vec<(u64, Vec<u8>)> = (0..400)
            .map(|_| {
                let length = random.pick(&[0, 1, 7, 500, 70_000]);
                (random.next() % 5, random.bytes(length))
            })
            .collect();
        let mut own = Random(seed ^ u64::from(mesh.rank() + 1));
        let mut by_tag: Vec<Vec<usize>> = vec![Vec::new(); 5];
        for (number, (tag, _)) in messages.iter().enumerate().rev() {
            by_tag[*tag as usize].push(number);
        }
        let mut order = Vec::new();
        while order.len() < messages.len() {
            order.extend(by_tag[own.below(5)].pop());
        }
        let mut into: Vec<Vec<u8>> = messages.iter().map(|(_, bytes)| vec![0; bytes.len()]).collect();
        lend(|lending| {
            let mut handles = Vec::new();
            let mut targets: Vec<Option<&mut Vec<u8>>> = into.iter_mut().map(Some).collect();
            for number in order {
                let (tag, bytes) = &messages[number];
                handles.push(match mesh.rank() {
                    0 => mesh.send(1, *tag, lending.send(bytes)),
                    _ => mesh.receive(0, *tag, lending.receive(targets[number].take().unwrap())),
                });
            }
            handles.into_iter().for_each(|handle| done(handle).unwrap());
        });
        if mesh.rank() == 1 {
            assert!(std::iter::zip(&messages, &into).all(|((_, sent), got)| sent == got));
        }
    });
}

fn small_messages_overtake_a_large_one(way: Way) {
    const LARGE: usize = 64 << 20;
    const SMALL: usize = 20;
    at_all(meshes(way, 2), |mesh| {
        if mesh.rank() == 0 {
            let large = mesh.send(1, 1, SendRegion::owned(vec![3_u8; LARGE])).unwrap();
            let small: Vec<_> =
                (0..SMALL).map(|_| mesh.send(1, 2, SendRegion::owned(vec![4_u8; 10])).unwrap()).collect();
            // Both sends wait for the receives, which follow the barrier.
            done(mesh.barrier()).unwrap();
            small.into_iter().chain([large]).for_each(|send| done(Ok(send)).unwrap());
            return mesh.leave(WAIT_TIMEOUT).unwrap();
        }
        let mesh = Arc::new(mesh);
        let (mut large, mut small) = (vec![0_u8; LARGE], vec![[0_u8; 10]; SMALL]);
        let (sender, receiver) = mpsc::channel();
        lend(|lending| {
            // A callback announces all of them at once, the large one first.
            let mut regions = vec![(1, lending.receive(&mut large))];
            regions.extend(small.iter_mut().map(|small| (2, lending.receive(small))));
            let on_thread = Arc::clone(&mesh);
            mesh.barrier().unwrap().on_complete(move |_| {
                for (tag, region) in regions {
                    let sender = sender.clone();
                    let receive = on_thread.receive(0, tag, region).unwrap();
                    receive.on_complete(move |outcome| sender.send((tag, outcome.is_ok())).unwrap());
                }
            });
        });
        let order: Vec<_> = receiver.iter().collect();
        assert_eq!(order[SMALL], (1, true), "the large transfer did not give way: {order:?}");
        assert_eq!(order.len(), 1 + SMALL);
        assert!(large.iter().all(|byte| *byte == 3) && small.iter().flatten().all(|byte| *byte == 4));
        Arc::into_inner(mesh).unwrap().leave(WAIT_TIMEOUT).unwrap();
    });
}

fn different_lengths_fail_the_mesh_on_both_sides(way: Way) {
    let errors = at_all(meshes(way, 2), |mesh| {
        let outcome = match mesh.rank() {
            0 => done(mesh.send(1, 11, SendRegion::owned(vec![0_u8; 8]))),
            _ => done(mesh.receive(0, 11, ReceiveRegion::owned(vec![0_u8; 12]))),
        };
        let error = outcome.unwrap_err();
        assert!(mesh.failure().is_some());
        assert!(mesh.barrier().is_err(), "a failed mesh takes nothing");
        error.to_string()
    });
    for error in errors {
        for part in ["rank 0 sends 8 bytes", "rank 1 expects 12", "tag 11"] {
            assert!(error.contains(part), "{error}");
        }
    }
}

fn callbacks_issue_operations_and_a_panic_in_one_fails_the_mesh(way: Way) {
    at_all(meshes(way, 2), |mesh| {
        let mesh = Arc::new(mesh);
        let (sender, receiver) = mpsc::channel();
        let again = Arc::downgrade(&mesh);
        mesh.barrier().unwrap().on_complete(move |outcome| {
            assert!(outcome.is_ok());
            let mesh = again.upgrade().unwrap();
            mesh.barrier().unwrap().on_complete(move |outcome| sender.send(outcome.is_ok()).unwrap());
        });
        assert!(receiver.recv_timeout(WAIT_TIMEOUT).unwrap());
        if mesh.rank() == 0 {
            let handle = mesh.receive(1, 1, ReceiveRegion::owned(vec![0_u8; 1])).unwrap();
            handle.on_complete(|_| panic!("on purpose"));
            // The callback is registered before the operation ends, so it runs on the mesh's thread.
            done(mesh.send(1, 2, SendRegion::owned(vec![0_u8; 1]))).unwrap();
        } else {
            done(mesh.receive(0, 2, ReceiveRegion::owned(vec![0_u8; 1]))).unwrap();
            done(mesh.send(0, 1, SendRegion::owned(vec![0_u8; 1]))).unwrap();
        }
        // Operations that were under way may still end well.
        let error = loop {
            if let Err(error) = done(mesh.barrier()) {
                break error.to_string();
            }
        };
        assert!(error.contains("on purpose"), "{error}");
    });
}

fn a_peer_that_left_fails_only_operations_that_need_it(way: Way) {
    at_all(meshes(way, 3), |mesh| {
        done(mesh.barrier()).unwrap();
        if mesh.rank() == 2 {
            return mesh.leave(WAIT_TIMEOUT).unwrap();
        }
        // A receive from the rank that leaves fails with an error that says so.
        let error = done(mesh.receive(2, 1, ReceiveRegion::owned(vec![0_u8; 4]))).unwrap_err();
        assert!(matches!(error, MeshError::PeerLeft { rank: 2, .. }), "{error}");
        let error = done(mesh.send(2, 1, SendRegion::owned(vec![0_u8; 4]))).unwrap_err();
        assert!(matches!(error, MeshError::PeerLeft { rank: 2, .. }), "{error}");
        let error = done(mesh.barrier()).unwrap_err();
        assert!(matches!(error, MeshError::PeerLeft { rank: 2, .. }), "{error}");
        // The others go on.
        let other = 1 - mesh.rank();
        let mut got = [0_u8; 4];
        lend(|lending| {
            let receive = mesh.receive(other, 3, lending.receive(&mut got));
            done(mesh.send(other, 3, SendRegion::owned(vec![other as u8; 4]))).unwrap();
            done(receive).unwrap();
        });
        assert_eq!(got, [mesh.rank() as u8; 4]);
        mesh.leave(WAIT_TIMEOUT).unwrap();
    });
}

fn leaving_waits_for_sends_and_gives_up_receives(way: Way) {
    at_all(meshes(way, 2), |mesh| {
        if mesh.rank() == 0 {
            let send = mesh.send(1, 1, SendRegion::owned(vec![5_u8; 3 << 20])).unwrap();
            let never = mesh.receive(1, 99, ReceiveRegion::owned(vec![0_u8; 1])).unwrap();
            mesh.leave(WAIT_TIMEOUT).unwrap();
            assert!(send.wait().is_ok());
            // The other rank leaves as soon as it has the data, maybe before this one, which waits until they are taken.
            let error = never.wait().unwrap_err();
            assert!(matches!(error, MeshError::Left { .. } | MeshError::PeerLeft { rank: 1, .. }), "{error}");
            return;
        }
        std::thread::sleep(Duration::from_millis(100));
        let mut got = vec![0_u8; 3 << 20];
        lend(|lending| done(mesh.receive(0, 1, lending.receive(&mut got)))).unwrap();
        assert!(got.iter().all(|byte| *byte == 5));
        mesh.leave(WAIT_TIMEOUT).unwrap();
    });
}

fn a_mesh_that_is_dropped_is_named(way: Way) {
    at_all(meshes(way, 2), |mesh| {
        if mesh.rank() == 1 {
            return;
        }
        let error = done(mesh.barrier()).unwrap_err().to_string();
        assert!(error.contains("rank 1 dropped its mesh"), "{error}");
    });
}

fn an_abort_gives_all_ranks_its_reason(way: Way) {
    at_all(meshes(way, 3), |mesh| {
        // If the rank is late, even the call fails.
        let never = mesh.receive((mesh.rank() + 1) % 3, 1, ReceiveRegion::owned(vec![0_u8; 4]));
        if mesh.rank() == 1 {
            mesh.abort("the sun has set");
        }
        let error = done(never).unwrap_err();
        assert_eq!(error.rank(), Some(1), "{error}");
        assert!(error.to_string().ends_with("ended the mesh: the sun has set"), "{error}");
        assert_eq!(mesh.leave(WAIT_TIMEOUT).unwrap_err().to_string(), error.to_string());
        assert!(mesh.leave(WAIT_TIMEOUT).is_err(), "again");
    });
}

fn a_timeout_names_the_awaited_ranks(way: Way) {
    at_all(meshes(way, 3), |mesh| {
        if mesh.rank() == 0 {
            let handle = mesh.receive(2, 4, ReceiveRegion::owned(vec![0_u8; 1])).unwrap();
            assert!(!handle.wait_timeout(Duration::from_millis(20)).unwrap());
            assert_eq!(handle.awaited_ranks(), [2]);
            done(mesh.send(2, 5, SendRegion::owned(vec![1_u8]))).unwrap();
            done(Ok(handle)).unwrap();
        } else if mesh.rank() == 2 {
            done(mesh.receive(0, 5, ReceiveRegion::owned(vec![0_u8; 1]))).unwrap();
            done(mesh.send(0, 4, SendRegion::owned(vec![1_u8]))).unwrap();
        }
        mesh.leave(WAIT_TIMEOUT).unwrap();
    });
}

fn an_impossible_operation_is_refused_at_once(way: Way) {
    run(way, 2, |mesh| {
        let region = || SendRegion::owned(vec![0_u8; 4]);
        let misused = [
            mesh.send(mesh.rank(), 0, region()),
            mesh.send(2, 0, region()),
            mesh.broadcast(ReceiveRegion::owned(vec![0_u8; 4]), 2),
            mesh.all_to_all(vec![region()], vec![]),
            mesh.gather(None, Vec::new(), 1 - mesh.rank()),
        ];
        for refused in misused {
            let error = refused.unwrap_err();
            assert!(matches!(error, MeshError::Misused { .. }), "{error}");
        }
        // The failure affected no other operation.
        done(mesh.barrier()).unwrap();
    });
}
