//! A hub's side of the handshake under libFuzzer: messages in clear and inside TLS, cut, altered, repeated and left out.
#![no_main]

#[cfg(not(fuzzing))]
compile_error!("without instrumentation libFuzzer is blind: use `cargo fuzz run`, or build inside fuzz/");

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    paramhub_hub::fuzzing::handshake(data);
});
