//! A worker against a hub that follows a script: real sockets, real handshakes, real frames, and answers that
//! no real hub sends.

mod exchange;
mod failures;
mod handshake;
mod hub;
mod program_states;
