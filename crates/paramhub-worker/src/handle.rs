//! The end of a request: a caller waits for it, polls it or has it call back, and gets the buffers back.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use paramhub_transport::runtime::{Completer, Completion};
use paramhub_transport::shm::Tensor;
use paramhub_transport::{ReceiveRegion, SendRegion};

use crate::error::WorkerError;

/// A request under way. It ends whether or not anyone waits: after its handle is dropped it continues, and
/// its end frees its buffers.
///
/// `G` is the buffer sent from and `P` the buffer received into; each is `()` where there is no such buffer
/// or it is borrowed. A buffer exchanged in place is `P`.
pub struct Handle<G, P> {
    completion: Arc<RequestCompletion>,
    unpack: fn(RequestBuffers) -> (G, P),
}

/// How a request ended. The buffers come back either way; after a failure some chunks of `parameters` may be
/// new.
#[derive(Debug)]
pub struct Finished<G, P> {
    /// `Ok` if the hubs answered the request.
    pub outcome: Result<(), WorkerError>,
    /// The buffer that was sent from.
    pub gradient: G,
    /// The buffer that was received into.
    pub parameters: P,
    /// The number of updates that the sent or pulled optimizer state had had; 0 after a failure or any other
    /// request.
    pub updates: u64,
}

impl<G, P> Handle<G, P> {
    pub(crate) fn new(completion: Arc<RequestCompletion>, unpack: fn(RequestBuffers) -> (G, P)) -> Self {
        Handle { completion, unpack }
    }

    /// Waits for the end and gives the buffers back; an error frees them, see [`Handle::finish`].
    ///
    /// # Panics
    /// On the I/O thread, that is in a callback: the thread would wait for itself.
    pub fn wait(self) -> Result<(G, P), WorkerError> {
        let Finished { outcome, gradient, parameters, .. } = self.finish();
        outcome.map(|()| (gradient, parameters))
    }

    /// Waits for the end and gives the buffers back even after an error.
    ///
    /// # Panics
    /// See [`Handle::wait`].
    pub fn finish(self) -> Finished<G, P> {
        let (outcome, buffers) =
            self.completion.wait(|outcome, buffers| (outcome.clone(), std::mem::take(buffers)));
        let updates = if outcome.is_ok() { buffers.updates } else { 0 };
        let (gradient, parameters) = (self.unpack)(buffers);
        Finished { outcome, gradient, parameters, updates }
    }

    /// Waits at most `timeout`; `Ok(true)` if the request has ended well, `Ok(false)` if it goes on, and the
    /// error if it failed. The buffers stay until [`Handle::wait`].
    ///
    /// # Panics
    /// See [`Handle::wait`].
    pub fn wait_timeout(&mut self, timeout: Duration) -> Result<bool, WorkerError> {
        self.completion.wait_timeout(timeout)
    }

    /// Whether the request has ended, well or not.
    pub fn is_done(&self) -> bool {
        self.completion.is_done()
    }

    /// Calls `callback` once when the request has ended: on the I/O thread, or here if the request has ended
    /// already. The callback must be quick, for every stream waits meanwhile, and may not wait for another
    /// request. A panic in it ends the job.
    pub fn on_complete(&self, callback: impl FnOnce(&Result<(), WorkerError>) + Send + 'static) {
        self.completion.on_complete(callback);
    }
}

impl<G, P> fmt::Debug for Handle<G, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").field("is_done", &self.is_done()).finish_non_exhaustive()
    }
}

/// The state of a request that a handle and the I/O thread share.
pub(crate) type RequestCompletion = Completion<RequestBuffers, WorkerError>;

/// The I/O thread's end of a request.
pub(crate) type Ticket = Completer<RequestBuffers, WorkerError>;

/// The buffers of a request, and what it brings besides. The larger parts that few requests have are boxed, because a job has
/// as many of these as keys, and reads them for every frame.
#[derive(Debug, Default)]
pub(crate) struct RequestBuffers {
    pub(crate) send: Option<SendRegion>,
    pub(crate) receive: Option<ReceiveRegion>,
    /// The output gradients of a request of factors; `send` has the inputs.
    pub(crate) output_gradients: Option<Box<SendRegion>>,
    /// The places in the arena that the request passes through and holds until it ends; `None` if it passes through none.
    pub(crate) claims: Option<Box<[Option<Tensor>; 2]>>,
    /// Whether the gradient is sent from the buffer that the parameters are received into.
    pub(crate) is_in_place: bool,
    /// For optimizer state sent or received: the number of updates that its least updated chunk has had.
    pub(crate) updates: u64,
    /// The norm of a step's mean gradient.
    pub(crate) norm: f64,
    /// The program state that was asked for, if the hub has it.
    pub(crate) program_state: Option<Vec<u8>>,
}

impl RequestBuffers {
    /// The bytes to send, if there are any.
    pub(crate) fn sent_from(&self) -> Option<&[u8]> {
        match &self.receive {
            Some(region) if self.is_in_place => Some(region.bytes()),
            _ => self.send.as_ref().map(SendRegion::bytes),
        }
    }
}

/// Both ends of a request. If the request `keeps_buffers`, its handle gets them back; otherwise they are dropped before the
/// end is announced.
pub(crate) fn new_request(keeps_buffers: bool, if_lost: WorkerError) -> (Ticket, Arc<RequestCompletion>) {
    let release: fn(&mut RequestBuffers) = match keeps_buffers {
        true => |_| {},
        false => |buffers| {
            *buffers = RequestBuffers { updates: buffers.updates, ..RequestBuffers::default() };
        },
    };
    Completer::new(RequestBuffers::default(), release, if_lost)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    use crate::error::WorkerId;

    fn lost() -> WorkerError {
        WorkerError::Left { who: WorkerId { job: "j".into(), rank: 0 } }
    }

    fn owned() -> (Ticket, Handle<Vec<f32>, ()>) {
        let (mut ticket, completion) = new_request(true, lost());
        ticket.value.send = Some(SendRegion::owned(vec![1.0_f32, 2.0]));
        (ticket, Handle::new(completion, |buffers| (buffers.send.unwrap().into_owned().unwrap(), ())))
    }

    #[test]
    fn the_buffer_comes_back_to_a_waiter_on_another_thread() {
        let (ticket, handle) = owned();
        assert!(!handle.is_done());
        let waiter = std::thread::spawn(move || handle.wait().unwrap().0);
        ticket.finish(Ok(())).unwrap();
        assert_eq!(waiter.join().unwrap(), [1.0, 2.0]);
    }

    #[test]
    fn a_lost_ticket_fails_the_request_and_returns_the_buffer() {
        let (ticket, mut handle) = owned();
        drop(ticket);
        assert!(matches!(handle.wait_timeout(Duration::ZERO), Err(WorkerError::Left { .. })));
        let finished = handle.finish();
        assert!(finished.outcome.is_err());
        assert_eq!(finished.gradient, [1.0, 2.0]);
    }

    #[test]
    fn a_borrowed_buffer_is_let_go_though_the_handle_lives_on() {
        let (told, hear) = mpsc::channel();
        std::thread::spawn(move || {
            let mut out = [0.0_f32; 2];
            // `lend` returns after the region is dropped.
            let handle: Handle<(), ()> = paramhub_transport::lend(|lending| {
                let (mut ticket, completion) = new_request(false, lost());
                let mut receive = lending.receive(&mut out);
                receive.bytes_mut().fill(1);
                ticket.value.receive = Some(receive);
                ticket.finish(Ok(())).unwrap();
                Handle::new(completion, |_| ((), ()))
            });
            told.send((handle, out)).unwrap();
        });
        let (handle, out) = hear.recv_timeout(Duration::from_secs(30)).expect("the region was let go");
        handle.wait().unwrap();
        assert_eq!(out, [f32::from_bits(0x0101_0101); 2]);
    }

    #[test]
    fn a_borrowed_buffer_is_let_go_before_a_callback_hears_of_the_end() {
        let (give, take) = mpsc::channel();
        let (returned, has_returned) = mpsc::channel();
        let lender = std::thread::spawn(move || {
            let out = [0.0_f32; 2];
            paramhub_transport::lend(|lending| {
                let (mut ticket, completion) = new_request(false, lost());
                ticket.value.send = Some(lending.send(&out));
                give.send((ticket, completion)).unwrap();
            });
            returned.send(()).unwrap();
        });
        let (ticket, completion) = take.recv().unwrap();
        let handle: Handle<(), ()> = Handle::new(completion, |_| ((), ()));
        // `lend` returns after the region is dropped, so a callback that came first would wait in vain.
        handle.on_complete(move |_| has_returned.recv_timeout(Duration::from_secs(30)).unwrap());
        ticket.finish(Ok(())).unwrap();
        lender.join().unwrap();
    }
}
