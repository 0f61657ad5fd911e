//! The store and the number of compute threads do not change the parameters, except for the order in which a
//! sum is added.

use paramhub_collective::kvstore::StoreKind;
use paramhub_kernels::Registry;
use paramhub_train::local::LocalExchange;
use paramhub_train::net::NetKind;
use paramhub_train::trainer::{Progress, Report, train};

use super::group::{RUN, Run, SEED, digits, local, sgd};

const DESIGNS: [StoreKind; 3] = [StoreKind::Funnel, StoreKind::ConCom, StoreKind::DepCha];

/// The largest difference of two parameters.
fn difference(one: &Report, other: &Report) -> f32 {
    let flat = |report: &Report| -> Vec<f32> { report.parameters.iter().flatten().copied().collect() };
    let (one, other) = (flat(one), flat(other));
    assert_eq!(one.len(), other.len());
    assert!(one.iter().all(|value| value.is_finite()));
    one.iter().zip(&other).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn a_local_store_trains_as_the_trainer_without_an_engine_does() {
    let data = digits();
    for kind in NetKind::ALL {
        let run = Run { kind, epochs: 2, per_rank: 4, ..RUN };
        let (mut losses, mut expected_losses) = (Vec::new(), Vec::new());
        let store = local(run.engine());
        // A step after which the accuracy was measured is reported a second time, with it.
        let mut note =
            |progress: &Progress| losses.extend(progress.accuracy.is_none().then_some(progress.loss));
        let found = run.through(&data, &*store, sgd(), &mut note).unwrap();

        let mut network = run.network(&data, 0);
        let (optimizer, aggregator) = (sgd(), Registry::with_builtins().aggregator("sum").unwrap());
        let numbers = run.hyperparameters(&*optimizer);
        let mut exchange = LocalExchange::new(network.keys(), run.per_rank, aggregator, optimizer, numbers);
        let expected = train(&run.config(), &data, &mut network, &mut exchange, &mut |progress| {
            expected_losses.push(progress.loss);
        })
        .unwrap();

        assert!(found.parameters == expected.parameters, "{kind} (seed {SEED})");
        assert_eq!(losses, expected_losses, "{kind}");
        assert_eq!(found.steps, 2 * (1437 / 64));
        assert_eq!((found.loss, found.accuracy), (expected.loss, expected.accuracy));
        assert_eq!(found.epochs, expected.epochs);
        assert_eq!(
            found.epochs.iter().map(|epoch| epoch.accuracy.is_some()).collect::<Vec<_>>(),
            [false, true]
        );
        let whole = found.compute_seconds + found.wait_seconds;
        assert!((whole - found.seconds).abs() < 1e-6 && found.compute_seconds > 0.0);
        assert_eq!((found.exchange_seconds, found.bytes_sent), (0.0, 0));
    }
}

#[test]
fn any_number_of_compute_threads_makes_the_same_bits() {
    let data = digits();
    let run = Run { kind: NetKind::Inception, per_rank: 2, batch: 32, ..RUN };
    let expected = run.alone(&data);
    for threads in [2, 5] {
        let found = Run { threads, ..run }.alone(&data);
        assert!(found.parameters == expected.parameters, "{threads} threads (seed {SEED})");
        assert_eq!(found.loss, expected.loss);
    }
    let together = |threads| Run { threads, per_rank: 1, ..run }.together(&data, StoreKind::DepCha, 2);
    assert!(together(1)[0].parameters == together(3)[0].parameters);
}

/// Compares all designs, with this many ranks, with one process that computes all shards.
fn designs(run: Run, size: u32) {
    let (data, kind) = (digits(), run.kind);
    let alone = Run { per_rank: size as usize, ..run }.alone(&data);
    let initial = Run { epochs: 0, ..run }.alone(&data);
    let moved = difference(&alone, &initial);
    assert!(moved > 1e-2, "{kind} has learnt nothing");
    let reports = DESIGNS.map(|design| run.together(&data, design, size));
    for (design, reports) in DESIGNS.iter().zip(&reports) {
        for report in reports {
            assert!(report.parameters == reports[0].parameters, "{kind} {design}: ranks differ");
            let elements: usize = report.parameters.iter().map(Vec::len).sum();
            assert_eq!(report.bytes_sent, (report.steps * elements * 4) as u64);
            assert!((0.0..=1.0).contains(&report.hidden_fraction) && report.exchange_seconds > 0.0);
        }
        let largest = difference(&reports[0], &alone);
        // A sum of two is the same in any order. With more terms another order changes the last bits, and a
        // ReLU or a maximum that then chooses another side amplifies them: how much depends on network, data
        // and processor. A contribution that is lost or counted twice would change a large part of what the
        // training has moved.
        let tolerance = if size == 2 { 0.0 } else { moved / 20.0 };
        assert!(
            largest <= tolerance,
            "{kind} {design}, {size} ranks: {largest} from one process (seed {SEED})"
        );
        if size == 2 {
            assert_eq!(reports[0].accuracy, alone.accuracy);
        }
        // Each rank has the losses of its own shards.
        let mean = reports.iter().map(|report| report.loss).sum::<f64>() / f64::from(size);
        let tolerance = if size == 2 { 1e-5 } else { alone.loss / 20.0 };
        assert!((mean - alone.loss).abs() < tolerance, "{mean} for {}", alone.loss);
    }
    let [funnel, _, depcha] = &reports;
    assert!(funnel[0].parameters == depcha[0].parameters, "{kind}: depcha differs from funnel");
}

#[test]
fn designs_agree_on_mlp() {
    designs(RUN, 2);
    designs(RUN, 3);
}

#[test]
fn designs_agree_on_lenet() {
    designs(Run { kind: NetKind::Lenet, ..RUN }, 3);
}

#[test]
fn designs_agree_on_cifar_quick() {
    designs(Run { kind: NetKind::CifarQuick, ..RUN }, 3);
}

#[test]
fn designs_agree_on_inception() {
    let inception = Run { kind: NetKind::Inception, ..RUN };
    designs(inception, 2);
    // In larger steps rounding grows so much that it could be taken for a lost contribution.
    designs(Run { learning_rate: 0.005, ..inception }, 3);
}

#[test]
fn ranks_may_stand_for_several_workers() {
    let data = digits();
    let run = Run { per_rank: 4, ..RUN };
    let (alone, initial) = (run.alone(&data), Run { epochs: 0, ..run }.alone(&data));
    for design in DESIGNS {
        let reports = Run { per_rank: 2, ..run }.together(&data, design, 2);
        let (largest, moved) = (difference(&reports[1], &alone), difference(&alone, &initial));
        assert!(largest <= moved / 20.0, "{design}: {largest} of {moved} (seed {SEED})");
    }
}

#[test]
fn inception_learns_the_digits() {
    let data = digits();
    // So trained, 60 of 60 trainings with other seeds and last bits reached 0.96. With larger steps or fewer epochs some end
    // below 0.95, depending on the last bits of products.
    let report = Run { kind: NetKind::Inception, epochs: 20, learning_rate: 0.01, ..RUN }.alone(&data);
    println!("inception: {report_accuracy:?} in {:.1} s", report.seconds, report_accuracy = report.accuracy);
    assert!(report.accuracy.unwrap() >= 0.95, "{:?}", report.accuracy);
}
