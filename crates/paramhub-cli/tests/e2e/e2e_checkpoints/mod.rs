//! Checkpoints: real files, hubs that are killed, and trainings that go on to the same bits.

mod by_itself;
mod cluster;
mod ends;
mod files;
mod going_on;
mod obstacles;
mod quantised;
