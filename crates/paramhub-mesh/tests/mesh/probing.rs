use std::time::Duration;

use paramhub_mesh::{Bandwidths, Mesh, MeshError, Pairs, Probe};

use crate::common::{Way, at_all, meshes, run};

fn probe(milliseconds: u64, pairs: Pairs) -> Probe {
    Probe { budget: Duration::from_millis(milliseconds), pairs }
}

fn assert_complete(measured: &Bandwidths, size: usize) {
    assert_eq!(measured.size(), size);
    for from in 0..size {
        for to in 0..size {
            for rate in [measured.alone(from, to), measured.both(from, to)] {
                assert_eq!(rate.is_some(), from != to, "{from} to {to}: {rate:?}");
                // Loopback carries more than a megabit and less than a petabit.
                assert!(rate.is_none_or(|rate| (1e6..1e15).contains(&rate.bits_per_second())), "{rate:?}");
            }
        }
    }
}

#[test]
fn every_rank_learns_every_pairs_rates() {
    for pairs in [Pairs::OneByOne, Pairs::Together] {
        for size in [1, 2, 3, 4] {
            let measured = run(Way::Memory, size, |mesh| mesh.probe(&probe(600, pairs)).unwrap());
            assert_complete(&measured[0], size as usize);
            assert!(measured.iter().all(|each| *each == measured[0]), "the ranks disagree: {measured:?}");
            let slowest = measured[0].slowest();
            assert_eq!(slowest.is_some(), size > 1);
            if let Some((from, to, rate)) = slowest {
                assert_eq!(measured[0].both(from, to), Some(rate));
            }
        }
    }
}

#[test]
fn a_mesh_works_on_after_a_probe() {
    run(Way::Memory, 3, |mesh| {
        mesh.probe(&probe(200, Pairs::OneByOne)).unwrap();
        mesh.barrier().unwrap().wait().unwrap();
        assert_complete(&mesh.probe(&probe(300, Pairs::Together)).unwrap(), 3);
    });
}

#[test]
fn too_little_time_is_refused_with_what_would_do() {
    run(Way::Memory, 4, |mesh| {
        let refused = mesh.probe(&probe(100, Pairs::OneByOne)).unwrap_err();
        assert!(matches!(refused, MeshError::Configuration { .. }), "{refused:?}");
        let refused = refused.to_string();
        assert!(refused.contains("6 rounds") && refused.contains("allow 1 s"), "{refused}");
        assert!(refused.contains("disjoint pairs together"), "{refused}");
    });
}

#[test]
fn ranks_that_measure_differently_are_refused() {
    run(Way::Memory, 3, |mesh| {
        let pairs = if mesh.rank() == 2 { Pairs::Together } else { Pairs::OneByOne };
        let refused = mesh.probe(&probe(400, pairs)).unwrap_err().to_string();
        let other = if mesh.rank() == 2 { "rank 0" } else { "rank 2" };
        assert!(refused.contains("measure alike") && refused.contains(other), "{refused}");
        // The mesh still works.
        mesh.probe(&probe(400, Pairs::Together)).unwrap();
    });
}

#[test]
fn a_rank_that_goes_away_ends_the_probe_of_the_others() {
    let outcomes = at_all(meshes(Way::Memory, 3), |mesh: Mesh| {
        if mesh.rank() == 2 {
            std::thread::sleep(Duration::from_millis(50));
            mesh.abort("rank 2 was asked to");
            return None;
        }
        Some(mesh.probe(&probe(60_000, Pairs::OneByOne)).unwrap_err())
    });
    for error in outcomes.into_iter().flatten() {
        assert!(error.to_string().contains("rank 2"), "{error}");
    }
}
