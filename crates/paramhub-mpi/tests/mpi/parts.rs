//! The parts that ranks play.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use paramhub_collective::communicator::{CheckedCommunicator, Communicator, CommunicatorError};
use paramhub_collective::engine::EngineConfig;
use paramhub_collective::kvstore::{KvStore, StoreKind, StoreOptions, create};
use paramhub_core::codec::Dtype;
use paramhub_mpi::{MpiCommunicator, ThreadLevel};

use crate::team::{DESIGNS, engine};
use crate::{collectives, exercise, job, team};

/// The seed of the ranks' random pauses; any will do.
const SEED: u64 = 20_261_121;

/// Plays a part.
pub(crate) fn play(part: &str) {
    match part {
        "collectives" => all_collectives(),
        "duplicates" => duplicates(),
        "wrong root" => wrong_root(),
        "misplaced" => misused(),
        "mismatch" => mismatch(),
        "stores" => stores(),
        "killed" => killed(),
        "without end" => without_end(),
        "gone" => gone(),
        "panics" => panics(),
        "aborted" => aborted(),
        "one thread at a time" => one_thread_at_a_time(),
        "concom over one thread" => concom_over_one_thread(),
        "begun before" => begun_before(),
        "begun before with less" => begun_before_with_less(),
        "a second thread" => a_second_thread(),
        other => panic!("there is no part {other}"),
    }
    println!("played to the end");
}

/// Joins, and writes the process id of this rank.
fn join(threads: ThreadLevel) -> MpiCommunicator {
    let mpi = MpiCommunicator::start(threads).unwrap();
    here(mpi.rank());
    mpi
}

fn here(rank: u32) {
    std::fs::write(job::pid_file(&folder(), rank), std::process::id().to_string()).unwrap();
}

fn folder() -> PathBuf {
    std::env::var_os(job::FOLDER).unwrap().into()
}

fn all_collectives() {
    let mpi = join(ThreadLevel::Serialized);
    collectives::exercise(&mpi);
    mpi.leave().unwrap();
    assert!(mpi.barrier().unwrap_err().to_string().ends_with("this communicator has been left"));
    // These collectives run in pieces, of halves and of f32 that are unaligned at one rank.
    let cut = MpiCommunicator::start(ThreadLevel::Serialized).unwrap().with_pieces(30_011);
    collectives::exercise(&cut);
    let unaligned = usize::from(cut.rank() == 0);
    let count = 70_001;
    let mut memory = vec![0_u8; 4 * count + 1];
    let values = &mut memory[unaligned..][..4 * count];
    values.chunks_exact_mut(4).for_each(|out| out.copy_from_slice(&1.0_f32.to_le_bytes()));
    cut.allreduce("unaligned", values, Dtype::F32).unwrap();
    let sum = (cut.size() as f32).to_le_bytes();
    assert!(values.chunks_exact(4).all(|value| value == sum));
    let of_rank = 4 * count / cut.size() as usize / 4 * 4;
    let mut own = vec![0_u8; of_rank + 1];
    let own = &mut own[unaligned..][..of_rank];
    cut.reduce_scatter("unaligned", &values[..of_rank * cut.size() as usize], own, Dtype::F32).unwrap();
    let square = ((cut.size() * cut.size()) as f32).to_le_bytes();
    assert!(own.chunks_exact(4).all(|value| value == square));
    cut.leave().unwrap();
}

fn wrong_root() {
    let mpi = join(ThreadLevel::Serialized);
    let refused = mpi.broadcast("w", &mut [0; 4], mpi.size()).unwrap_err().to_string();
    println!("{refused}");
    assert_eq!(mpi.barrier().unwrap_err().to_string(), refused, "it stays so");
    assert_eq!(mpi.leave().unwrap_err().to_string(), refused);
}

fn duplicates() {
    let mpi = join(ThreadLevel::Multiple);
    collectives::duplicates(&mpi);
    mpi.leave().unwrap();
}

fn misused() {
    let mpi = join(ThreadLevel::Serialized);
    collectives::misused(&mpi);
    let message = mpi.allreduce("g", &mut [0; 6], Dtype::F32).unwrap_err().to_string();
    assert_eq!(message, "collective `g`: 6 bytes are no whole number of f32");
    mpi.leave().unwrap();
}

fn mismatch() {
    let checking = CheckedCommunicator::new(join(ThreadLevel::Serialized));
    let names = if checking.rank() == 2 { ["b", "a"] } else { ["a", "b"] };
    let message =
        names.iter().find_map(|name| checking.allreduce(name, &mut [0; 400], Dtype::F32).err()).unwrap();
    let expected = "rank 2 does not do what rank 0 does: call 0 of this communicator is allreduce of `b`";
    assert!(message.to_string().starts_with(expected), "{message}");
    checking.leave().unwrap();
}

/// A store whose calls are checked.
fn store(kind: StoreKind, mpi: MpiCommunicator) -> Box<dyn KvStore> {
    let engine = engine(EngineConfig { compute_threads: 2, ..Default::default() });
    create(kind, StoreOptions::over(engine, CheckedCommunicator::new(mpi))).unwrap()
}

fn stores() {
    // One run for all kinds: every store is over another communicator, and MPI ends after the last.
    let first = join(ThreadLevel::Multiple);
    for kind in DESIGNS {
        let checked = store(kind, MpiCommunicator::start(ThreadLevel::Multiple).unwrap());
        exercise::sums(&*checked);
        checked.leave().unwrap();

        let checked = store(kind, MpiCommunicator::start(ThreadLevel::Multiple).unwrap());
        let (rank, size) = (checked.rank(), checked.size());
        let found = exercise::trained(&*checked, &[rank]);
        checked.leave().unwrap();
        if rank == 0 {
            let native = team::stores(kind, size, |store| exercise::trained(store, &[store.rank()]));
            assert!(native[0] == found, "{kind}");
        }

        let checked = store(kind, MpiCommunicator::start(ThreadLevel::Multiple).unwrap());
        exercise::disorder(&*checked, SEED);
        checked.leave().unwrap();
    }
    first.leave().unwrap();
}

fn killed() {
    let mpi = join(ThreadLevel::Serialized);
    let mut values = vec![0; 400_000];
    for round in 0.. {
        if (mpi.rank(), round) == (1, 20) {
            Command::new("kill").args(["-9", &std::process::id().to_string()]).status().unwrap();
        }
        mpi.allreduce("g", &mut values, Dtype::F32).unwrap();
    }
}

fn without_end() {
    let mpi = join(ThreadLevel::Serialized);
    loop {
        mpi.allreduce("g", &mut [0; 4000], Dtype::F32).unwrap();
    }
}

fn gone() {
    let mpi = join(ThreadLevel::Serialized);
    mpi.barrier().unwrap();
    // This ends like a program that returns from its main function with an error that no one looks at.
    if mpi.rank() == 1 {
        std::process::exit(0);
    }
    mpi.barrier().unwrap();
}

fn panics() {
    let mpi = join(ThreadLevel::Serialized);
    mpi.barrier().unwrap();
    assert!(mpi.rank() != 1, "the loss is not a number");
    mpi.barrier().unwrap();
}

fn aborted() {
    let mpi = join(ThreadLevel::Serialized);
    mpi.barrier().unwrap();
    if mpi.rank() == 1 {
        mpi.abort("the loss is not a number");
    }
    mpi.barrier().unwrap();
}

fn one_thread_at_a_time() {
    let message = MpiCommunicator::start(ThreadLevel::Multiple).unwrap_err().to_string();
    assert!(message.contains("start of MPI for several threads: "), "{message}");
    assert!(
        message.contains("provides MPI_THREAD_SERIALIZED, and MPI_THREAD_MULTIPLE is needed: "),
        "{message}"
    );
    assert!(message.contains("or choose depcha or funnel"), "{message}");

    let mpi = join(ThreadLevel::Serialized);
    for kind in [StoreKind::Funnel, StoreKind::DepCha] {
        let store = store(kind, MpiCommunicator::start(ThreadLevel::Serialized).unwrap());
        exercise::disorder(&*store, SEED);
        store.leave().unwrap();
    }
    mpi.leave().unwrap();
}

fn concom_over_one_thread() {
    let options = StoreOptions::over(engine(EngineConfig::default()), join(ThreadLevel::Serialized));
    println!("{}", create(StoreKind::ConCom, options).err().unwrap());
}

fn begun_before() {
    let (universe, _) = mpi::initialize_with_threading(mpi::Threading::Multiple).unwrap();
    let mpi = join(ThreadLevel::Multiple);
    collectives::duplicates(&mpi);
    mpi.leave().unwrap();
    drop(universe);
    let message = MpiCommunicator::start(ThreadLevel::Serialized).unwrap_err().to_string();
    assert!(message.contains("MPI has ended in this process"), "{message}");
}

fn begun_before_with_less() {
    let universe = mpi::initialize().unwrap();
    let message = MpiCommunicator::start(ThreadLevel::Serialized).unwrap_err().to_string();
    let expected = "start of MPI: the MPI that this process has begun provides MPI_THREAD_SINGLE, and MPI_THREAD_SERIALIZED is needed";
    assert!(message.contains(expected), "{message}");
    here(mpi::traits::Communicator::rank(&universe.world()) as u32);
}

fn a_second_thread() {
    let mpi = join(ThreadLevel::Serialized);
    let (waits, tries) = (mpi.duplicate().unwrap(), mpi.duplicate().unwrap());
    let refused = folder().join("refused");
    match mpi.rank() {
        0 => {
            std::thread::scope(|scope| {
                let barrier = scope.spawn(|| waits.barrier());
                // There is nothing to sum: the call only asks for a permit.
                let attempt = || tries.allreduce("g", &mut [], Dtype::F32);
                let error: CommunicatorError = loop {
                    if let Err(error) = attempt() {
                        break error;
                    }
                    if barrier.is_finished() {
                        // The barrier began during one of the attempts, so that it was refused itself. The other rank waits in
                        // vain, and mpirun ends it.
                        println!("{}", barrier.join().unwrap().unwrap_err());
                        std::fs::write(&refused, "").unwrap();
                        std::process::exit(1);
                    }
                };
                println!("{error}");
                std::fs::write(&refused, "").unwrap();
            });
        }
        _ => {
            while !refused.exists() {
                std::thread::sleep(Duration::from_millis(5));
            }
            waits.barrier().unwrap();
        }
    }
    mpi.leave().unwrap();
}
