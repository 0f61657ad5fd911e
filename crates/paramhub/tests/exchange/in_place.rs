//! Exchanges whose result replaces the gradient: the same numbers, in the same memory, over every transport.

use paramhub_core::codec::{Codec, Dtype};
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_transport::ReceiveRegion;
use paramhub_worker::{Job, RegionRequest};

use crate::cluster::{Cluster, Transports, await_true, gradient, keys, sgd};

over_transports!(
    [tcp shm mixed]
    results_in_place_equal_results_elsewhere_in_every_type_and_codec,
    thousands_of_tiny_keys_land_in_place,
    slices_regions_and_requests_of_other_kinds_go_side_by_side,
    tensors_of_an_arena_may_be_exchanged_in_place,
    a_key_is_free_once_its_request_has_ended_whether_or_not_it_was_waited_for,
);

/// Both sides of the chunk size, odd ones, one element, and one of many chunks.
const SIZES: [u64; 6] = [1, 8191, 8193, 50_001, 7, 1_000_003];
const STEPS: u32 = 3;

fn encoded(values: &[f32], dtype: Dtype) -> Vec<u8> {
    let mut bytes = vec![0; values.len() * dtype.bytes()];
    paramhub_kernels::convert::encode(values, &mut bytes, dtype.codec());
    bytes
}

/// The bytes of every key after every step, exchanged key by key into separate memory, or in place.
fn exchanged(job: &Job, is_in_place: bool) -> Vec<Vec<u8>> {
    let table = job.settings().keys.keys();
    let sizes = || table.iter().map(|key| key.elements().unwrap() as usize);
    if job.settings().has_parameters() {
        let start = sizes().zip(table).zip(0..);
        let mut start: Vec<Vec<u8>> =
            start.map(|((n, key), number)| encoded(&gradient(9, number, 0, n), key.dtype)).collect();
        job.broadcast(&mut start, 0).unwrap();
    }
    let mut reached = Vec::new();
    for step in 0..STEPS {
        let gradients = sizes()
            .zip(table)
            .zip(0..)
            .map(|((n, key), number)| encoded(&gradient(job.rank(), number, step, n), key.dtype));
        if is_in_place {
            let handles: Vec<_> = gradients
                .zip(0..)
                .map(|(gradient, key)| {
                    (gradient.as_ptr() as usize, job.push_pull_in_place(key, gradient).unwrap())
                })
                .collect();
            reached.extend(handles.into_iter().map(|(memory, handle)| {
                let ((), out) = handle.wait().unwrap();
                assert_eq!(out.as_ptr() as usize, memory, "it is in place");
                out
            }));
        } else {
            let handles: Vec<_> = gradients
                .zip(0..)
                .map(|(gradient, key)| {
                    let out = vec![0_u8; gradient.len()];
                    job.push_pull(key, gradient, out).unwrap()
                })
                .collect();
            reached.extend(handles.into_iter().map(|handle| handle.wait().unwrap().1));
        }
    }
    reached
}

fn results_in_place_equal_results_elsewhere_in_every_type_and_codec(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    for (dtype, codec) in [
        (Dtype::F32, None),
        (Dtype::F32, Some(Codec::BF16)),
        (Dtype::F32, Some(Codec::F16)),
        (Dtype::BF16, None),
        (Dtype::F16, Some(Codec::F32)),
    ] {
        for optimizer in [OptimizerChoice::named("sum"), sgd(0.05, 0.9)] {
            let table = SIZES.iter().zip(0..).map(|(&n, number)| Key {
                dtype,
                // The last key is the most urgent.
                priority: number,
                ..Key::new(format!("layer{number}"), [n])
            });
            let keys = KeyTable::new(table.collect()).unwrap();
            let settings = Settings { optimizer, codec, reproducible: true, ..Settings::new(keys) };
            let what = format!("{}-{dtype}-{codec:?}", settings.optimizer.name).replace(['(', ')'], "-");
            let elsewhere =
                cluster.job(&format!("{what}-elsewhere"), 3).run(&settings, |job| exchanged(job, false));
            let in_place =
                cluster.job(&format!("{what}-in-place"), 3).run(&settings, |job| exchanged(job, true));
            assert!(in_place == elsewhere, "{what}");
            assert!(in_place[0].iter().flatten().any(|&byte| byte != 0));
        }
    }
}

fn thousands_of_tiny_keys_land_in_place(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let settings =
        Settings { optimizer: OptimizerChoice::named("sum"), ..Settings::new(keys(&vec![3; 4000])) };
    cluster.job("tiny", 3).run(&settings, |job| {
        for step in 0..3 {
            let handles: Vec<_> = (0..4000)
                .map(|key| job.push_pull_in_place(key, vec![(key + step) as f32; 3]).unwrap())
                .collect();
            for (handle, key) in handles.into_iter().zip(0..) {
                assert_eq!(handle.wait().unwrap().1, [(3 * (key + step)) as f32; 3]);
            }
        }
    });
}

fn slices_regions_and_requests_of_other_kinds_go_side_by_side(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let settings = Settings { reproducible: true, ..Settings::new(keys(&[30_000, 30_000, 30_000, 5])) };
    let mean = |key: u32, step: u32, n: usize| -> Vec<f32> {
        let both = [gradient(0, key, step, n), gradient(1, key, step, n)];
        both[0].iter().zip(&both[1]).map(|(one, other)| (one + other) * 0.5).collect()
    };
    cluster.job("kinds", 2).run(&settings, |job| {
        for step in 0..4 {
            let own = |key: u32, n: usize| gradient(job.rank(), key, step, n);
            let (mut lent, mut small) = (own(0, 30_000), own(3, 5));
            let (plain, mut out) = (own(1, 30_000), vec![f32::NAN; 30_000]);
            let region = ReceiveRegion::owned(own(2, 30_000));
            job.scope(|scope| {
                let in_place = scope.push_pull_in_place(0, &mut lent).unwrap();
                let elsewhere = scope.push_pull(1, &plain, &mut out).unwrap();
                let submitted = job.submit(2, RegionRequest::PushPullInPlace(region)).unwrap();
                let again = scope.push_pull_in_place(3, &mut small).unwrap();
                for handle in [in_place, elsewhere, submitted, again] {
                    handle.wait().unwrap();
                }
            });
            assert!(lent == mean(0, step, 30_000) && out == mean(1, step, 30_000), "step {step}");
            assert_eq!(small, mean(3, step, 5));
            // A later pull gets the parameters that were received in place.
            let (_, pulled) = job.pull(2, vec![f32::NAN; 30_000]).unwrap().wait().unwrap();
            assert!(pulled == mean(2, step, 30_000), "step {step}");
        }
        let length = job.push_pull_in_place(3, vec![0.0_f32; 4]).unwrap_err().to_string();
        assert!(length.contains("the gradient in place has 16"), "{length}");
        assert_eq!(job.next_step(3).unwrap(), 4, "what was refused counts for nothing");
    });
}

fn tensors_of_an_arena_may_be_exchanged_in_place(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    for (codec, settings) in
        [None, Some(Codec::BF16)].map(|codec| (codec, Settings { codec, ..Settings::new(keys(&SIZES)) }))
    {
        cluster.job(&format!("tensors-{}", codec.is_some()), 2).run(&settings, |job| {
            let whole = |rank: u32, key: u32, step: u32, n: usize| -> Vec<f32> {
                gradient(rank, key, step, n).iter().map(|value| (value * 8.0).round()).collect()
            };
            for step in 0..STEPS {
                let handles: Vec<_> = (0..SIZES.len() as u32)
                    .map(|key| {
                        // Either half of the arena can be used, also in turn.
                        let mut tensor = match (step + key) % 2 {
                            0 => job.gradient_tensor(key).unwrap(),
                            _ => job.parameter_tensor(key).unwrap(),
                        };
                        let elements = tensor.elements_mut::<f32>();
                        elements.copy_from_slice(&whole(job.rank(), key, step, elements.len()));
                        job.push_pull_in_place(key, tensor).unwrap()
                    })
                    .collect();
                for (handle, key) in handles.into_iter().zip(0..) {
                    let ((), tensor) = handle.wait().unwrap();
                    let found = tensor.elements::<f32>();
                    let both = [0, 1].map(|rank| whole(rank, key, step, found.len()));
                    for (element, &found) in found.iter().enumerate() {
                        let expected = (both[0][element] + both[1][element]) / 2.0;
                        assert_eq!(found, expected, "step {step}, key {key}, element {element}");
                    }
                }
            }
        });
    }
}

fn a_key_is_free_once_its_request_has_ended_whether_or_not_it_was_waited_for(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    cluster.job("early", 1).run(
        &Settings { optimizer: sgd(1.0, 0.0), ..Settings::new(keys(&[300])) },
        |job| {
            job.broadcast(&mut [vec![0.0_f32; 300]], 0).unwrap();
            let mut unwaited = Vec::new();
            for _ in 0..3 {
                let handle = job.push_pull(0, vec![1.0_f32; 300], vec![0.0_f32; 300]).unwrap();
                await_true("its end", || handle.is_done().then_some(()));
                unwaited.push(handle);
            }
            for (step, handle) in (1..).zip(unwaited) {
                assert_eq!(handle.wait().unwrap().1, vec![-(step as f32); 300]);
            }
        },
    );
}
