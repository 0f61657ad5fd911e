//! Whatever bytes a peer sends, decoding ends in a value or an error and reads nothing past them, and an
//! accepted value encodes to the same bytes.
//!
//! A module of its own because two programs run it: libFuzzer (`fuzz_targets/frame_decoder.rs`) and a seeded test of
//! the workspace (`crates/paramhub-core/tests/integration/decoders.rs`).

use paramhub_core::wire::{
    Direction, Factors, Failure, HEADER_BYTES, HELLO_HEAD_BYTES, Header, HubHandshake, Norm, Notice,
    Operation, ProgramState, Release, Retune, State, Tensors, VERDICT_BYTES, VERSION, Verdict, hello_length,
};

/// Reads `data` as one end of a stream would and counts the frames. The first byte selects the end: an even
/// one selects the hub's.
pub(crate) fn check(data: &[u8]) -> usize {
    let Some((&end, mut stream)) = data.split_first() else { return 0 };
    // A stream that opens with a valid Hello goes on after it; any other bytes are frames from the start.
    let direction = if end % 2 == 0 {
        stream = check_hello(stream).unwrap_or(stream);
        Direction::ToHub
    } else {
        check_verdict(stream);
        Direction::ToWorker
    };
    let mut frames = 0;
    while let Some((wire, rest)) = stream.split_first_chunk::<HEADER_BYTES>() {
        let Ok(header) = Header::decode(wire, direction) else { break };
        assert_eq!(header.encode(), *wire, "{header:?} reads from bytes it does not write");
        assert!(header.length <= header.operation.length_max(), "{header:?} was let through");
        assert!(
            [direction, Direction::Both].contains(&header.operation.goes()),
            "{header:?} goes the other way"
        );
        let Some((payload, rest)) = rest.split_at_checked(header.length as usize) else { break };
        check_payload(header.operation, payload);
        stream = rest;
        frames += 1;
    }
    frames
}

/// The bytes after a valid Hello.
fn check_hello(stream: &[u8]) -> Option<&[u8]> {
    let head = stream.first_chunk::<HELLO_HEAD_BYTES>()?;
    let (wire, rest) = stream.split_at_checked(hello_length(head).ok()?)?;
    let hub = HubHandshake::begin(wire, [0; 32]).ok()?;
    if u16::from_le_bytes([wire[4], wire[5]]) == VERSION {
        // Only the oldest version that the caller speaks is not kept: this release chooses the newest.
        let again = hub.hello().encode();
        assert_eq!((&again[..10], &again[12..]), (&wire[..10], &wire[12..]));
    }
    Some(rest)
}

/// Shorter input is padded with zeros, as a verdict's text is.
fn check_verdict(stream: &[u8]) {
    let mut wire = [0; VERDICT_BYTES];
    let given = stream.len().min(VERDICT_BYTES);
    wire[..given].copy_from_slice(&stream[..given]);
    if let Ok(verdict) = Verdict::decode(&wire) {
        let again = match verdict {
            Verdict::Welcome { welcome, proof } => Verdict::welcome(&welcome, |_| proof),
            Verdict::Refused { refusal, message } => Verdict::refused(refusal, &message),
        };
        let again: [u8; VERDICT_BYTES] = again.try_into().expect("a verdict has a fixed size");
        Verdict::decode(&again).expect("what was decoded encodes to a verdict");
    }
}

fn check_payload(operation: Operation, payload: &[u8]) {
    match operation {
        Operation::Failure => {
            if let Some(failure) = Failure::decode(payload) {
                let again = Failure::decode(&failure.encode()).expect("what was decoded encodes");
                assert_eq!(again.rank, failure.rank);
                assert!(failure.message.starts_with(&again.message), "{failure:?} became {again:?}");
            }
        }
        Operation::Notice => {
            if let Some(notice) = Notice::decode(payload) {
                let again = Notice::decode(&notice.encode()).expect("what was decoded encodes");
                assert_eq!(again.rank, notice.rank);
                assert!(notice.message.starts_with(&again.message), "{notice:?} became {again:?}");
            }
        }
        Operation::Retune => {
            if let Some(retune) = Retune::decode(payload) {
                assert_eq!(Retune::decode(&retune.0.to_wire()), Some(retune));
            }
        }
        Operation::State | Operation::InitialiseState => {
            if let Some(state) = State::decode(payload) {
                assert_eq!([&State::head(state.updates), state.values].concat(), payload);
            }
        }
        Operation::Factors => {
            if let Some(factors) = Factors::decode(payload) {
                assert_eq!(
                    [&Factors::head(factors.samples, factors.piece), factors.values].concat(),
                    payload
                );
            }
        }
        Operation::SaveProgramState | Operation::ProgramState => {
            if let Some(state) = ProgramState::decode(payload) {
                assert_eq!([&ProgramState::head(state.total), state.piece].concat(), payload);
            }
        }
        Operation::Norm => {
            if let Some((norm, tensors)) = Norm::decode(payload) {
                assert_eq!(with_tensors(norm.encode().to_vec(), tensors), payload);
            }
        }
        Operation::Release => {
            if let Some((release, tensors)) = Release::decode(payload) {
                assert_eq!(with_tensors(release.encode().to_vec(), tensors), payload);
            }
        }
        // Tensor data may be any bytes. The other operations carry nothing.
        _ => {}
    }
}

fn with_tensors(mut payload: Vec<u8>, tensors: Tensors<'_>) -> Vec<u8> {
    Tensors::encode(&tensors.iter().collect::<Vec<_>>(), &mut payload);
    payload
}
