//! What every I/O thread has in common: one end of each operation for the caller and one for the thread.
//!
//! A worker's I/O thread and a mesh's thread each run operations for the threads of a program. The program
//! keeps a [`Completion`] of each operation, the thread its [`Completer`]. Commands reach the thread through an
//! [`Inbox`].

mod completion;
mod inbox;

pub use completion::{Completer, Completion, as_io_thread, become_io_thread, on_io_thread, panic_message};
pub use inbox::Inbox;
