//! This module starts a launcher's worker processes, watches them and stops them. No worker outlives the launcher for long.
//!
//! Each worker leads a process group of its own, so that a signal also reaches the processes that it started.
//! A supervisor process ([`supervise_groups`]) holds the other end of a pipe from the launcher. If the launcher is
//! killed, the supervisor reports that to the job's connection manager and ends those groups. (The kernel's
//! parent-death signal would reach the leaders only, not the processes that they started.)

mod environment;
mod lines;
mod program;
mod signals;
mod supervise;
mod worker;
mod worker_supervisor;

pub use environment::{RankEnvironment, free_port};
pub use lines::{Line, OutputStream};
pub use program::{set_this_program_command, this_program_command};
pub use signals::Signals;
pub use supervise::{Launch, LaunchEnd, LaunchObserver, OnWorkerFailure, interruption_reason};
pub use worker::describe_exit;
pub use worker_supervisor::{SupervisedJob, supervise_groups};
