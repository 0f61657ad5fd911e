//! One request for many keys: it gives what a request for each gives, and is made whole or not at all.

use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_worker::{Job, WorkerError};

use crate::cluster::{Cluster, Transports, gradient, keys, sgd};

over_transports!(
    [tcp shm mixed]
    one_request_for_all_keys_gives_what_a_request_for_each_gives,
    of_many_keys_none_is_exchanged_if_one_is_refused,
    a_job_that_ends_fails_a_request_of_many_keys,
);

/// Small keys, one of more than a chunk, and one of a single element.
const SIZES: [u64; 5] = [256, 1, 50_001, 7, 8192];
const STEPS: u32 = 3;

/// The parameters after each step, exchanged by one request for all keys or by one for each.
fn trained(job: &Job, together: bool) -> Vec<Vec<Vec<f32>>> {
    let sizes = || SIZES.iter().map(|&elements| elements as usize);
    let mut parameters: Vec<Vec<f32>> =
        sizes().zip(0..).map(|(elements, key)| gradient(9, key, 0, elements)).collect();
    job.broadcast(&mut parameters, 0).unwrap();
    let before = job.statistics().requests;
    let of_steps = (0..STEPS).map(|step| {
        let gradients: Vec<Vec<f32>> =
            sizes().zip(0..).map(|(elements, key)| gradient(job.rank(), key, step, elements)).collect();
        let keys = gradients.iter().zip(&mut parameters).zip(0..);
        let exchanges = keys.map(|((gradient, out), key)| (key, &gradient[..], &mut out[..]));
        let exchanged = job.scope(|scope| match together {
            true => scope.push_pull_many(exchanges)?.wait().map(drop),
            false => {
                let handles = exchanges.map(|(key, gradient, out)| scope.push_pull(key, gradient, out));
                let handles: Vec<_> = handles.collect::<Result<_, _>>()?;
                handles.into_iter().try_for_each(|handle| handle.wait().map(drop))
            }
        });
        exchanged.unwrap();
        parameters.clone()
    });
    let of_steps = of_steps.collect();
    assert_eq!(job.statistics().requests - before, u64::from(STEPS) * SIZES.len() as u64);
    of_steps
}

fn one_request_for_all_keys_gives_what_a_request_for_each_gives(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let settings = Settings { optimizer: sgd(0.5, 0.9), ..Settings::new(keys(&SIZES)) };
    let [together, apart] = [true, false].map(|together| {
        let name = if together { "together" } else { "apart" };
        cluster.job(name, 2).run(&settings, |job| trained(job, together))
    });
    assert_eq!(together, apart);
    assert_eq!(together[0], together[1], "all ranks have the same");
}

fn of_many_keys_none_is_exchanged_if_one_is_refused(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let settings = Settings { optimizer: OptimizerChoice::named("sum"), ..Settings::new(keys(&[4, 4, 4])) };
    cluster.job("refused", 1).run(&settings, |job| {
        let gradient = [1.0_f32, 2.0, 3.0, 4.0];
        let mut outs = [[0.0_f32; 4]; 3];
        job.scope(|scope| {
            let [first, second, third] = &mut outs;
            let exchanges = [(0, &gradient[..], &mut first[..]), (1, &gradient[..3], &mut second[..])];
            let refused = scope.push_pull_many(exchanges).unwrap_err();
            assert!(matches!(refused, WorkerError::Length { .. }), "{refused}");
            let refused = scope.push_pull_many([(3, &gradient[..], &mut third[..])]).unwrap_err();
            assert!(matches!(refused, WorkerError::NoSuchKey { key: 3, keys: 3, .. }), "{refused}");
        });
        let (mut once, mut again) = ([0.0_f32; 4], [0.0_f32; 4]);
        job.scope(|scope| {
            let twice = [(2, &gradient[..], &mut once[..]), (2, &gradient[..], &mut again[..])];
            let refused = scope.push_pull_many(twice).unwrap_err();
            assert!(matches!(refused, WorkerError::KeyBusy { .. }), "{refused}");
        });
        assert_eq!([0, 1, 2].map(|key| job.next_step(key).unwrap()), [0; 3], "no key has gone on");
        job.scope(|scope| {
            let exchanges = outs.iter_mut().zip(0..).map(|(out, key)| (key, &gradient[..], &mut out[..]));
            scope.push_pull_many(exchanges).unwrap().wait().unwrap();
            let none: [(u32, &[f32], &mut [f32]); 0] = [];
            scope.push_pull_many(none).unwrap().wait().unwrap();
        });
        assert_eq!(outs, [gradient; 3]);
        assert_eq!([0, 1, 2].map(|key| job.next_step(key).unwrap()), [1; 3]);
    });
}

fn a_job_that_ends_fails_a_request_of_many_keys(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let ticket = cluster.job("ended", 2);
    let settings = Settings { optimizer: OptimizerChoice::named("mean"), ..Settings::new(keys(&SIZES)) };
    std::thread::scope(|threads| {
        let other = threads.spawn(|| {
            let job = ticket.join(1, settings.clone()).unwrap();
            // Half of the keys are complete when the job ends.
            job.push(0, vec![1.0_f32; 256]).unwrap().wait().unwrap();
            job.abort_handle().abort("it has seen enough");
            job.leave().unwrap_err();
        });
        let job = ticket.join(0, settings.clone()).unwrap();
        let gradients: Vec<Vec<f32>> = SIZES.iter().map(|&elements| vec![1.0; elements as usize]).collect();
        let mut outs = gradients.clone();
        let error = job.scope(|scope| {
            let keys = gradients.iter().zip(&mut outs).zip(0..);
            let exchanges = keys.map(|((gradient, out), key)| (key, &gradient[..], &mut out[..]));
            scope.push_pull_many(exchanges).unwrap().wait().unwrap_err()
        });
        assert!(error.to_string().contains("it has seen enough"), "{error}");
        let refused = job.scope(|scope| scope.push_pull(0, &gradients[0][..], &mut outs[0][..]).unwrap_err());
        assert!(refused.to_string().contains("it has seen enough"), "{refused}");
        job.leave().unwrap_err();
        other.join().unwrap();
    });
}
