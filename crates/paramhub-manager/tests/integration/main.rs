//! A real manager on a loopback port, and real clients of its HTTP interface. What limits the whole process is
//! in `full_disk.rs`, a program of its own.

mod access;
mod backup;
mod common;
mod http;
mod hubs;
mod information_book;
mod meeting;
mod rendezvous;
mod state;
mod teams;
mod tls;
mod tokens;
mod unauthenticated;
