//! Pollers, sockets, shared memory and interfaces: every transport by the conformance suite, and each by what it
//! promises beyond.

mod conformance;
mod encrypted;
mod interface;
mod memory;
mod poll;
mod shm;
mod socket;
mod tcp;
