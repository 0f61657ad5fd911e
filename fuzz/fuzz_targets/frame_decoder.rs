//! The wire decoders under libFuzzer.
#![no_main]

#[cfg(not(fuzzing))]
compile_error!("without instrumentation libFuzzer is blind: use `cargo fuzz run`, or build inside fuzz/");

#[path = "../checks/frame_decoder.rs"]
mod frame_decoder;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    frame_decoder::check(data);
});
