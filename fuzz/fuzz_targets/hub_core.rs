//! A hub's core under libFuzzer: authenticated frames over mixed streams, with resumes, Leave frames and ends
//! of jobs.
#![no_main]

#[cfg(not(fuzzing))]
compile_error!("without instrumentation libFuzzer is blind: use `cargo fuzz run`, or build inside fuzz/");

#[path = "../checks/total.rs"]
mod total;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    total::add("hub_core", paramhub_hub::fuzzing::hub_core(data));
});
