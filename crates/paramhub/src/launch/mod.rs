//! Worker processes: started, watched, stopped, and never left behind.
//!
//! Each worker leads a process group of its own, so that a signal reaches what it started too. A [`Warden`] process
//! holds the other end of a pipe from the launcher. Should the launcher itself be killed, the warden tells the job's connection
//! manager so and ends those groups. (The kernel's parent-death signal would reach the leaders only, not what they started.)

mod environment;
mod lines;
mod program;
mod signals;
mod supervise;
mod warden;
mod worker;

pub(crate) use environment::{Seat, free_port};
pub(crate) use lines::{Line, Stream};
pub(crate) use program::{started_as, this_program};
pub(crate) use signals::Signals;
pub(crate) use supervise::{Ended, Launch, Watch, interrupted_by};
pub(crate) use warden::{Charge, watch_over};
pub(crate) use worker::describe;
