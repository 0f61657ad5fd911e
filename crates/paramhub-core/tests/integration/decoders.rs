//! The checks of `fuzz/` on seeded random input: a short search in every test run, on any machine. libFuzzer,
//! which follows the branches of the code, finds more: `cargo xtask test --only fuzz`.

#[path = "../../../../fuzz/checks/frame_decoder.rs"]
mod frame_decoder;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{SystemTime, UNIX_EPOCH};

use paramhub_core::auth::{Incarnation, Namespace, Proof};
use paramhub_core::hyperparameters::Hyperparameters;
use paramhub_core::wire::{
    Attempt, Caller, Capabilities, Direction, Failure, Header, Hello, Norm, Notice, Operation, Refusal,
    Release, Verdict, Welcome,
};

const INPUTS: usize = 2_000_000;
const INPUT_BYTES_MAX: usize = 2048;
/// Set this variable to a printed seed to reproduce a failure.
const SEED_VARIABLE: &str = "PARAMHUB_FUZZ_SEED";

#[test]
fn no_bytes_break_the_frame_decoder() {
    let seed = std::env::var(SEED_VARIABLE).ok().map_or_else(seed_from_clock, |seed| {
        seed.parse().unwrap_or_else(|_| panic!("{SEED_VARIABLE}={seed} is no number"))
    });
    println!("{SEED_VARIABLE}={seed}");
    let mut random = Random(seed);
    let sound = sound_streams();
    let frames: usize = sound.iter().map(|stream| frame_decoder::check(stream)).sum();
    assert_eq!(frames, 23, "the starting points must be read to their end, or the hunt stays at their edge");
    for _ in 0..INPUTS {
        let mut input = match random.below(8) {
            0 => random.bytes(64),
            _ => sound[random.below(sound.len())].clone(),
        };
        for _ in 0..random.below(6) {
            mutate(&mut input, &sound, &mut random);
        }
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| frame_decoder::check(&input))) {
            println!("the input was {input:02x?}");
            resume_unwind(panic);
        }
    }
}

/// The messages that well-behaved peers send, for each end: its handshake message, and one frame of each
/// operation.
fn sound_streams() -> Vec<Vec<u8>> {
    let hello = Hello {
        caller: Caller::Worker { rank: 3, shares_parameters: false },
        interface: 1,
        core: 2,
        standby_route: None,
        offered: Capabilities::ENCRYPTED,
        required: Capabilities::default(),
        attempt: Attempt::first(1),
        namespace: Namespace([1; 16]),
        incarnation: Incarnation([2; 16]),
        placement: [3; 32],
        challenge: [4; 32],
    };
    let message = "rank 3 has gone; start the job again".to_owned();
    let refused = Verdict::refused(Refusal::RankTaken, &message);
    let frames = [
        (Operation::Push, vec![0; 64]),
        (Operation::Pull, vec![]),
        (Operation::PushPull, vec![0x3f; 128]),
        (Operation::Initialise, vec![0; 16]),
        (Operation::Retune, Hyperparameters::default().to_wire().to_vec()),
        (Operation::Leave, vec![]),
        (Operation::Heartbeat, vec![]),
        (Operation::PullState, vec![]),
        (Operation::InitialiseState, vec![2; 40]),
        (Operation::Release, Release(0.5).encode().to_vec()),
        (Operation::Factors, vec![4; 40]),
        (Operation::SaveProgramState, vec![5; 20]),
        (Operation::PullProgramState, vec![]),
        (Operation::Parameters, vec![1; 64]),
        (Operation::Applied, vec![]),
        (Operation::Failure, Failure { rank: Some(3), message: message.clone() }.encode()),
        (Operation::Notice, Notice { rank: None, message }.encode()),
        (Operation::State, vec![3; 40]),
        (Operation::Norm, Norm(4.0).encode().to_vec()),
        (Operation::ProgramStateSaved, vec![]),
        (Operation::ProgramState, vec![6; 20]),
    ];
    let mut to_hub = [&[0], &hello.encode()[..]].concat();
    let mut to_worker = vec![1];
    for (operation, payload) in frames {
        let header = Header { length: payload.len() as u32, chunk: 7, step: 9, ..Header::bare(operation) };
        let frame = [&header.encode(), payload.as_slice()].concat();
        match operation.goes() {
            Direction::ToHub => to_hub.extend(frame),
            Direction::ToWorker => to_worker.extend(frame),
            Direction::Both => {
                to_hub.extend(&frame);
                to_worker.extend(&frame);
            }
        }
    }
    let welcome = Welcome { state_slots: 2, epoch: 1, ..Welcome::default() };
    let verdicts = [Verdict::welcome(&welcome, |_| Proof([5; 32])), refused];
    let verdicts = verdicts.iter().map(|verdict| [&[1], verdict.as_slice()].concat());
    verdicts.chain([to_hub, to_worker]).collect()
}

fn mutate(input: &mut Vec<u8>, sound: &[Vec<u8>], random: &mut Random) {
    if input.is_empty() {
        input.push(random.next() as u8);
    }
    let at = random.below(input.len());
    match random.below(6) {
        0 => input[at] ^= 1 << random.below(8),
        1 => input[at] = random.next() as u8,
        2 => {
            let edge = [0, 1, 0x7f, 0x80, 0xff][random.below(5)];
            let end = (at + 1 + random.below(8)).min(input.len());
            input[at..end].fill(edge);
        }
        3 => input.truncate(at),
        4 => drop(input.drain(at..(at + 1 + random.below(16)).min(input.len()))),
        _ => {
            let other = &sound[random.below(sound.len())];
            input.truncate(at);
            input.extend(&other[random.below(other.len())..]);
            input.truncate(INPUT_BYTES_MAX);
        }
    }
}

/// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn bytes(&mut self, length_max: usize) -> Vec<u8> {
        (0..self.below(length_max)).map(|_| self.next() as u8).collect()
    }
}

fn seed_from_clock() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_nanos() as u64)
}
