//! The trainer without processes: the readers of its data, training in one process, and training through the
//! engine and key-value stores between threads.

mod dataflow;
mod readers;
mod training;
