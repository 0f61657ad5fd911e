//! The `paramhub` command.
fn main() {}
