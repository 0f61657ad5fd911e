//! Checkpoints: real files, hubs that are killed, and training that goes on to the same bits.

mod cluster;
#[path = "../common/mod.rs"]
mod common;
mod ends;
mod files;
mod going_on;
mod obstacles;
mod quantised;
