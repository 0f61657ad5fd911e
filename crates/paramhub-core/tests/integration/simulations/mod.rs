//! The state machines of manager, hub and worker under random interleavings of events, in one thread and virtual
//! time. A failure prints its seed and the shortest sequence of actions that leads to it.

mod job_control;
mod leadership;
mod membership;
mod worker_job;
