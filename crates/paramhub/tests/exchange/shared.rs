//! Parameters that the workers of a host read in one place, tensors that stay where the hub reads them, and
//! the same bits over every transport.

use paramhub_core::codec::{Codec, Dtype};
use paramhub_core::consistency::Consistency;
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_hub::{HubConfig, RunningHub};
use paramhub_worker::{Job, Member, Options, ParameterSharing, RegionRequest, Transport, WorkerError};

use crate::cluster::{Cluster, Ticket, Transports, gradient, keys, sgd};
use crate::numerics::expected;

/// Sizes on both sides of the chunk size, odd ones, and one element.
const SIZES: [u64; 5] = [1, 8191, 8193, 50_001, 7];
const STEPS: u32 = 4;

fn join(ticket: &Ticket, rank: u32, options: Options, settings: &Settings) -> Result<Job, WorkerError> {
    Member::connect_with(ticket.membership(rank), options)?.init(settings.clone())
}

fn over(transport: Transport) -> Options {
    Options { transport, ..Default::default() }
}

fn sharing() -> Options {
    Options { shared_parameters: ParameterSharing::Always, ..over(Transport::Shm) }
}

/// Runs `work` as every rank at once, each with its own options. Returns each rank's result.
fn run<T: Send>(
    ticket: &Ticket,
    settings: &Settings,
    options: &[Options],
    work: impl Fn(&Job) -> T + Sync,
) -> Vec<T> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..)
            .zip(options)
            .map(|(rank, options)| {
                let work = &work;
                scope.spawn(move || {
                    let job = join(ticket, rank, options.clone(), settings).unwrap();
                    let made = work(&job);
                    job.leave().unwrap();
                    made
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The initial parameters that [`expected`] uses.
fn start(elements: u64) -> Vec<f32> {
    (0..elements).map(|element| element as f32 / 1000.0).collect()
}

/// Runs one rank of a job and checks its every step, whatever the transport.
fn train(job: &Job, after: &[Vec<Vec<f32>>]) {
    let shares = (0..SIZES.len() as u32).all(|key| job.shared_parameters(key).is_ok());
    let read = |key: u32| {
        let mut copy = vec![f32::NAN; SIZES[key as usize] as usize];
        job.shared_parameters(key).unwrap().read(&mut copy);
        copy
    };
    let mut model: Vec<Vec<f32>> = SIZES.iter().map(|&n| vec![f32::NAN; n as usize]).collect();
    for (key, elements) in (0..).zip(SIZES) {
        let received = &mut model[key as usize];
        match (job.rank(), shares) {
            (0, _) => {
                *received = job.initialise(key, start(elements), 0).unwrap().wait().unwrap().0;
            }
            (_, true) => {
                job.pull_shared(key).unwrap().wait().unwrap();
                *received = read(key);
            }
            (_, false) => {
                let out = std::mem::take(received);
                *received = job.pull(key, out).unwrap().wait().unwrap().1;
            }
        }
        assert_eq!(*received, start(elements), "rank {}, key {key}", job.rank());
        if shares {
            assert_eq!(read(key), start(elements), "rank {}, key {key}", job.rank());
        }
    }
    for step in 0..STEPS {
        let underway: Vec<_> = (0..SIZES.len() as u32)
            .rev()
            .map(|key| {
                let out = std::mem::take(&mut model[key as usize]);
                let gradient = gradient(job.rank(), key, step, out.len());
                match shares {
                    true => (key, Some(job.push_pull_shared(key, gradient).unwrap()), None, out),
                    false => {
                        let handle = job.push_pull(key, gradient, out).unwrap();
                        (key, None, Some(handle), Vec::new())
                    }
                }
            })
            .collect();
        for (key, shared, own, out) in underway {
            model[key as usize] = match (shared, own) {
                (Some(handle), _) => {
                    handle.wait().unwrap();
                    assert_eq!(out.len() as u64, SIZES[key as usize]);
                    read(key)
                }
                (None, Some(handle)) => handle.wait().unwrap().1,
                (None, None) => unreachable!(),
            };
        }
        for (key, (model, after)) in model.iter().zip(&after[step as usize]).enumerate() {
            assert!(model == after, "rank {}, step {step}, key {key}", job.rank());
        }
    }
}

#[test]
fn workers_that_share_parameters_read_the_right_ones_after_every_step() {
    let cluster = Cluster::new(Transports::shm(), 2);
    // With an arena at every rank, sums are made in rank order in either mode.
    for reproducible in [false, true] {
        let optimizer = sgd(0.05, 0.9);
        let settings = Settings { optimizer, reproducible, ..Settings::new(keys(&SIZES)) };
        let after: Vec<_> = (1..=STEPS).map(|steps| expected(&settings, 3, steps)).collect();
        let ticket = cluster.job(&format!("shared-{reproducible}"), 3);
        run(&ticket, &settings, &vec![sharing(); 3], |job| train(job, &after));
    }
}

#[test]
fn ranks_that_share_parameters_receive_them_or_use_tcp_agree() {
    let cluster = Cluster::new(Transports::shm(), 2);
    let settings = Settings { optimizer: sgd(0.05, 0.9), reproducible: true, ..Settings::new(keys(&SIZES)) };
    let after: Vec<_> = (1..=STEPS).map(|steps| expected(&settings, 3, steps)).collect();
    let mut roles = [sharing(), over(Transport::Shm), over(Transport::Tcp)];
    for turn in 0..3 {
        run(&cluster.job(&format!("mixed{turn}"), 3), &settings, &roles, |job| train(job, &after));
        roles.rotate_left(1);
    }
}

#[test]
fn parameters_received_into_own_memory_equal_the_shared_ones() {
    let cluster = Cluster::new(Transports::shm(), 1);
    let settings = Settings { optimizer: sgd(0.5, 0.0), ..Settings::new(keys(&[20_000])) };
    run(&cluster.job("both", 2), &settings, &vec![sharing(); 2], |job| {
        let mut model = [vec![0.0f32; 20_000]];
        job.broadcast(&mut model, 3).unwrap();
        let [mut out] = model;
        for step in 3..6 {
            assert_eq!(job.next_step(0).unwrap(), step);
            let gradient = vec![1.0f32; 20_000];
            out = match step {
                4 => job.push_pull_in_place(0, gradient).unwrap().wait().unwrap().1,
                _ => job.push_pull(0, gradient, out).unwrap().wait().unwrap().1,
            };
            let mut shared = vec![f32::NAN; 20_000];
            job.shared_parameters(0).unwrap().read(&mut shared);
            assert!(out == shared && out[0] == -0.5 * (step - 2) as f32, "step {step}");
        }
    });
}

#[test]
fn shared_parameters_are_refused_where_there_are_none() {
    let cluster = Cluster::new(Transports::shm(), 1);
    let synchronous = Settings { optimizer: sgd(0.1, 0.0), ..Settings::new(keys(&[4])) };
    let asynchronous = Settings { consistency: Consistency::Asynchronous, ..synchronous.clone() };
    for (name, transport, settings, reason) in [
        ("tcp", Transport::Tcp, &synchronous, "use the transport auto or shm"),
        ("async", Transport::Auto, &asynchronous, "the hub writes parameters while workers read them"),
    ] {
        let options = Options { shared_parameters: ParameterSharing::Always, ..over(transport) };
        let error = join(&cluster.job(name, 1), 0, options, settings).unwrap_err();
        assert!(matches!(error, WorkerError::Misused { .. }), "{error:?}");
        let error = error.to_string();
        assert!(error.contains(&format!("job `{name}`, rank 0")) && error.contains(reason), "{error}");
        // The others need not wait for a rank that has given up.
        assert!(cluster.await_end(name).message.contains(reason));
    }
    for (name, transport) in [("unasked", Transport::Shm), ("unasked-tcp", Transport::Tcp)] {
        run(&cluster.job(name, 1), &synchronous, &[over(transport)], |job| {
            let errors = [
                job.push_pull_shared(0, vec![0.0f32; 4]).err().unwrap(),
                job.pull_shared(0).err().unwrap(),
                job.submit(0, RegionRequest::PullShared).err().unwrap(),
                job.shared_parameters(0).err().unwrap(),
            ];
            for error in errors {
                assert!(matches!(error, WorkerError::Misused { .. }), "{error:?}");
                let error = error.to_string();
                assert!(error.contains("shares no parameters: ask for them in the options"), "{error}");
            }
            // The refused requests leave the key free for those that are possible.
            job.initialise(0, vec![1.0f32; 4], 0).unwrap().wait().unwrap();
            let (_, out) = job.pull(0, vec![0.0f32; 4]).unwrap().wait().unwrap();
            assert_eq!(out, [1.0; 4]);
        });
    }
    // With a second hub, no hub has all of the parameters.
    let second = RunningHub::start(cluster.client.clone(), HubConfig::default()).unwrap();
    let settings = Settings { chunk_bytes: 1024, ..Settings::new(keys(&[4096])) };
    let message = join(&cluster.job("two-hubs", 1), 0, sharing(), &settings).unwrap_err().to_string();
    assert!(message.contains("job `two-hubs`, rank 0") && message.contains("a single hub"), "{message}");
    second.stop();
}

#[test]
fn tensors_of_the_arena_exchange_the_numbers_of_plain_buffers() {
    let cluster = Cluster::new(Transports::shm(), 2);
    let settings = Settings { optimizer: sgd(0.05, 0.9), reproducible: true, ..Settings::new(keys(&SIZES)) };
    let expected = expected(&settings, 3, STEPS);
    for (name, transports) in [
        ("tensors", [Transport::Shm; 3]),
        ("tensors-mixed", [Transport::Tcp, Transport::Shm, Transport::Auto]),
    ] {
        let ticket = cluster.job(name, 3);
        let reached = run(&ticket, &settings, &transports.map(over), |job| {
            let keys = 0..SIZES.len() as u32;
            let mut gradients: Vec<_> =
                keys.clone().map(|key| Some(job.gradient_tensor(key).unwrap())).collect();
            let mut parameters: Vec<_> =
                keys.clone().map(|key| Some(job.parameter_tensor(key).unwrap())).collect();
            for key in keys.clone() {
                let mut tensor = parameters[key as usize].take().unwrap();
                let tensor = match job.rank() {
                    0 => {
                        tensor.elements_mut::<f32>().copy_from_slice(&start(SIZES[key as usize]));
                        job.initialise(key, tensor, 0).unwrap().wait().unwrap().0
                    }
                    _ => job.pull(key, tensor).unwrap().wait().unwrap().1,
                };
                assert!(tensor.elements::<f32>() == start(SIZES[key as usize]));
                parameters[key as usize] = Some(tensor);
            }
            for step in 0..STEPS {
                let underway: Vec<_> = keys
                    .clone()
                    .map(|key| {
                        let mut tensor = gradients[key as usize].take().unwrap();
                        let elements = tensor.elements_mut::<f32>();
                        elements.copy_from_slice(&gradient(job.rank(), key, step, elements.len()));
                        let out = parameters[key as usize].take().unwrap();
                        job.push_pull(key, tensor, out).unwrap()
                    })
                    .collect();
                for (key, handle) in underway.into_iter().enumerate() {
                    let (gradient_back, out) = handle.wait().unwrap();
                    let sent = gradient(job.rank(), key as u32, step, out.elements::<f32>().len());
                    assert!(gradient_back.elements::<f32>() == sent, "a gradient comes back as it went");
                    (gradients[key], parameters[key]) = (Some(gradient_back), Some(out));
                }
            }
            let model = |tensor: &Option<_>| -> Vec<f32> {
                let tensor: &paramhub_worker::Tensor = tensor.as_ref().unwrap();
                tensor.elements::<f32>().to_vec()
            };
            parameters.iter().map(model).collect::<Vec<_>>()
        });
        for (rank, model) in reached.iter().enumerate() {
            assert!(*model == expected, "{name}, rank {rank}");
        }
    }
}

#[test]
fn a_part_of_the_arena_is_given_out_once_at_a_time() {
    let cluster = Cluster::new(Transports::shm(), 1);
    let settings = Settings::new(keys(&[100, 5]));
    run(&cluster.job("takes", 1), &settings, &[over(Transport::Shm)], |job| {
        let (first, parameters) = (job.gradient_tensor(0).unwrap(), job.parameter_tensor(0).unwrap());
        for (what, refused) in [("gradient", job.gradient_tensor(0)), ("parameters", job.parameter_tensor(0))]
        {
            let message = refused.expect_err("it is given out").to_string();
            assert!(message.contains("`layer0`") && message.contains("is given out already"), "{message}");
            assert!(message.contains(what) && message.contains("job `takes`, rank 0"), "{message}");
        }
        // Other keys have memory of their own, and a key that is under way can be given out as well.
        job.gradient_tensor(1).unwrap();
        let underway = job.push_pull(0, first, parameters).unwrap();
        assert!(job.gradient_tensor(0).is_err());
        let (first, parameters) = underway.wait().unwrap();
        assert!(job.gradient_tensor(0).is_err() && job.parameter_tensor(0).is_err());
        // Tensors that are exchanged from elsewhere use the same memory.
        let errors =
            [job.push(0, vec![0.0f32; 100]).err().unwrap(), job.pull(0, vec![0.0f32; 100]).err().unwrap()];
        assert!(errors.iter().all(|error| error.to_string().contains("exchange that tensor, or drop it")));
        drop((first, parameters));
        let (mut again, out) = (job.gradient_tensor(0).unwrap(), job.parameter_tensor(0).unwrap());
        again.elements_mut::<f32>().fill(6.0);
        let (_, mean) = job.push_pull(0, again, out).unwrap().wait().unwrap();
        assert_eq!(mean.elements::<f32>(), [6.0; 100]);
        assert!(job.gradient_tensor(2).unwrap_err().to_string().contains("key 2 does not exist"));
    });
}

/// The final parameters of a job whose ranks use these transports, one after the other, as the bytes of each
/// key.
fn reached(cluster: &Cluster, name: &str, settings: &Settings, transports: &[Transport]) -> Vec<Vec<u8>> {
    let keys = settings.keys.keys();
    let encode = |values: Vec<f32>, dtype: Dtype| -> Vec<u8> {
        let half = |value: &f32| half::f16::from_f32(*value).to_le_bytes();
        let bf16_bytes = |value: &f32| half::bf16::from_f32(*value).to_le_bytes();
        match dtype.codec() {
            Codec::F16 => values.iter().flat_map(half).collect(),
            Codec::BF16 => values.iter().flat_map(bf16_bytes).collect(),
            _ => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        }
    };
    let options: Vec<Options> = transports.iter().copied().map(over).collect();
    let models = run(&cluster.job(name, options.len() as u32), settings, &options, |job| {
        let mut model: Vec<Vec<u8>> = (0..)
            .zip(keys)
            .map(|(number, key)| {
                let elements = key.elements().unwrap() as usize;
                encode(gradient(9, number, 0, elements), key.dtype)
            })
            .collect();
        if settings.has_parameters() {
            job.broadcast(&mut model, 0).unwrap();
        }
        for step in 0..3 {
            for (number, key) in (0..).zip(keys) {
                let out = std::mem::take(&mut model[number as usize]);
                let values = gradient(job.rank(), number, step, key.elements().unwrap() as usize);
                let handle = job.push_pull(number, encode(values, key.dtype), out).unwrap();
                model[number as usize] = handle.wait().unwrap().1;
            }
        }
        model
    });
    assert!(models.windows(2).all(|pair| pair[0] == pair[1]), "{name}: all ranks reach the same");
    models.into_iter().next().unwrap()
}

#[test]
fn every_element_type_and_codec_reaches_the_same_bits_over_every_transport() {
    let cluster = Cluster::new(Transports::shm(), 2);
    let adam = OptimizerChoice::named("adam");
    let table = |dtype: Dtype| {
        let key = |(number, &elements): (usize, &u64)| {
            let mut key = Key::new(format!("layer{number}"), [elements]);
            key.dtype = dtype;
            key
        };
        KeyTable::new(SIZES.iter().enumerate().map(key).collect()).unwrap()
    };
    let mixes: [&[Transport]; 4] = [
        &[Transport::Shm; 3],
        &[Transport::Shm, Transport::Tcp, Transport::Shm],
        &[Transport::Tcp, Transport::Shm, Transport::Tcp],
        &[Transport::Tcp, Transport::Tcp, Transport::Shm],
    ];
    for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
        for codec in [None, Some(Codec::F16), Some(Codec::BF16)] {
            for (optimizer, kind) in
                [(OptimizerChoice::default(), "mean"), (sgd(0.05, 0.9), "sgd"), (adam.clone(), "adam")]
            {
                let settings =
                    Settings { optimizer, codec, reproducible: true, ..Settings::new(table(dtype)) };
                let name = |how: usize| format!("{kind}-{dtype:?}-{codec:?}-{how}").replace(['(', ')'], "-");
                let over_tcp = reached(&cluster, &name(0), &settings, &[Transport::Tcp; 3]);
                for (how, transports) in (1..).zip(mixes) {
                    let reached = reached(&cluster, &name(how), &settings, transports);
                    assert!(reached == over_tcp, "{kind}, {dtype:?}, {codec:?}, {transports:?}");
                }
            }
        }
    }
}

#[test]
fn several_hubs_and_streams_work_on_one_arena() {
    let settings = Settings {
        optimizer: sgd(0.05, 0.9),
        reproducible: true,
        chunk_bytes: 4096,
        ..Settings::new(keys(&SIZES))
    };
    let alone = Cluster::new(Transports::shm(), 1);
    let expected = reached(&alone, "alone", &settings, &[Transport::Tcp; 3]);
    let several = Cluster::with(Transports::shm(), |config| (config.cores, config.streams) = (2, 3));
    let over_streams = reached(&several, "streams", &settings, &[Transport::Shm; 3]);
    assert!(over_streams == expected, "two cores with three streams each");
    for shared_memory in [true, false] {
        let cluster = Cluster::with(Transports::shm(), |config| config.cores = 2);
        let config = HubConfig { shared_memory, ..Default::default() };
        let second = RunningHub::start(cluster.client.clone(), config).unwrap();
        for (name, transports) in [
            ("auto", [Transport::Auto; 3]),
            ("some", [Transport::Tcp, Transport::Auto, Transport::Auto]),
            ("last", [Transport::Auto, Transport::Auto, Transport::Tcp]),
        ] {
            let reached = reached(&cluster, name, &settings, &transports);
            assert!(reached == expected, "{name}, the second hub shares memory: {shared_memory}");
        }
        // If one of the hubs offers no shared memory, half of an arena is of no use to a worker that insists
        // on it.
        let insists = join(&cluster.job("insists", 1), 0, over(Transport::Shm), &settings);
        match insists {
            Ok(job) => assert!(shared_memory && job.shares_memory()),
            Err(error) => {
                let hub = second.addresses()[0].to_string();
                assert!(!shared_memory && error.to_string().contains(&hub), "{error}");
            }
        }
        second.stop();
    }
}

#[test]
fn packed_neighbours_are_exchanged_from_and_into_one_tensor() {
    let cluster = Cluster::new(Transports::shm(), 2);
    let sizes = [1001, 7, 50_000, 3];
    let all: u64 = sizes.iter().sum();
    let settings = Settings { packed: true, ..Settings::new(keys(&sizes)) };
    for (name, options) in [
        ("own", over(Transport::Shm)),
        ("shared", Options { shared_parameters: ParameterSharing::WherePossible, ..over(Transport::Auto) }),
        ("tcp", Options { shared_parameters: ParameterSharing::WherePossible, ..over(Transport::Tcp) }),
    ] {
        let ticket = cluster.job(name, 2);
        let made = run(&ticket, &settings, &vec![options; 2], |job| {
            let mut gradients = job.gradient_tensors(0..4).unwrap();
            for (element, value) in (0..).zip(gradients.elements_mut::<f32>()) {
                *value = (element * (job.rank() + 1)) as f32;
            }
            let second = job.gradient_tensors(3..4);
            assert_eq!(second.is_err(), job.shares_memory(), "the first tensor has it");
            let mut parts = Vec::new();
            let mut rest = gradients.elements::<f32>();
            for &size in &sizes {
                let (part, behind) = rest.split_at(size as usize);
                parts.push(part.to_vec());
                rest = behind;
            }
            if job.shares_parameters() {
                let handles: Vec<_> =
                    (0..).zip(parts).map(|(key, part)| job.push_pull_shared(key, part)).collect();
                // The tensor over all of them is given out, so tensors elsewhere cannot use the memory.
                assert!(handles.iter().all(Result::is_err));
                drop(gradients);
                let handles: Vec<_> = (0..4)
                    .map(|key| {
                        let mut gradient = job.gradient_tensor(key).unwrap();
                        let first: u64 = sizes[..key as usize].iter().sum();
                        for (element, value) in (first as u32..).zip(gradient.elements_mut::<f32>()) {
                            *value = (element * (job.rank() + 1)) as f32;
                        }
                        job.push_pull_shared(key, gradient).unwrap()
                    })
                    .collect();
                handles.into_iter().for_each(|handle| drop(handle.wait().unwrap()));
                let mut means = vec![0.0_f32; all as usize];
                job.shared_parameters_of(0..4).unwrap().read(&mut means);
                return means;
            }
            drop(gradients);
            let handles: Vec<_> = (0..)
                .zip(parts)
                .map(|(key, part)| {
                    let elements = part.len();
                    job.push_pull(key, part, vec![0.0_f32; elements]).unwrap()
                })
                .collect();
            handles.into_iter().flat_map(|handle| handle.wait().unwrap().1).collect()
        });
        for means in made {
            let expected: Vec<f32> = (0..all).map(|element| element as f32 * 1.5).collect();
            assert_eq!(means, expected, "{name}");
        }
    }
}

#[test]
fn tensors_that_are_not_packed_cannot_be_had_as_one() {
    let cluster = Cluster::new(Transports::shm(), 1);
    let ticket = cluster.job("apart", 1);
    let settings = Settings::new(keys(&[7, 9]));
    run(&ticket, &settings, &[sharing()], |job| {
        for refused in [
            job.gradient_tensors(0..2).map(drop),
            job.parameter_tensors(0..2).map(drop),
            job.shared_parameters_of(0..2).map(drop),
        ] {
            let message = refused.expect_err("there is a gap").to_string();
            assert!(
                message.contains("key 1 does not lie behind the one before it: ask for packed tensors"),
                "{message}"
            );
        }
        assert!(job.gradient_tensors(1..1).unwrap_err().to_string().contains("at least one"));
        assert!(matches!(job.parameter_tensors(1..3), Err(WorkerError::NoSuchKey { key: 2, .. })));
        assert_eq!(job.gradient_tensors(1..2).unwrap().elements::<f32>().len(), 9);
    });
}
