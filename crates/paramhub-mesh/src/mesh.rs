//! The handle that user threads work with.

mod checks;

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use paramhub_transport::{ReceiveRegion, SendRegion, Waker};

use crate::config::MeshConfig;
use crate::descriptor::{Collective, Descriptor};
use crate::element::{ElementType, ReduceOp};
use crate::engine::Engine;
use crate::error::{MeshError, Who};
use crate::handle::{Handle, Ticket, on_mesh_thread};
use crate::inbox::{Command, Inbox};
use crate::memory::agreement::Agreed;
use crate::memory::{Plan, Room};
use crate::operation::{Buffer, Request, What};
use crate::schedule::{self, Schedule, Span, Work};

/// Beyond its own bound, how much longer leaving may take for the mesh's thread to say so.
const LEAVE_GRACE: Duration = Duration::from_secs(5);

/// Connections to all other ranks, and operations over them.
///
/// Every operation is asynchronous: it takes regions, returns a [`Handle`] and goes on by itself. Regions may be lent with
/// [`paramhub_transport::lend`] or promised with their `from_raw`; they are dropped when the operation ends.
///
/// **Point to point.** A receive is matched with the sends of its peer that have the same tag, in the order in which both were
/// issued. A send waits until the peer has issued the receive: nothing is buffered.
///
/// **Collectives** must be called by all ranks in the same order. They begin in that order, and a few may be under way at a
/// time. If ranks call different ones, or name different lengths, the mesh fails with an error that names both.
///
/// A mesh is shared by reference; the order between threads is that in which their calls return.
pub struct Mesh {
    who: Who,
    size: u32,
    /// What plans are made for, or why there are none.
    memory: Result<Room, Arc<str>>,
    inbox: Arc<Inbox>,
    thread: Mutex<Thread>,
}

/// The mesh's thread, as far as leaving needs it.
enum Thread {
    Runs(Receiver<Result<(), MeshError>>),
    Ended(Result<(), MeshError>),
}

impl Mesh {
    pub(crate) fn start(
        config: &MeshConfig,
        sockets: Vec<Option<OwnedFd>>,
        memory: Agreed,
    ) -> Result<Mesh, MeshError> {
        let who = config.who();
        let system = |what: &'static str| {
            let who = who.clone();
            move |error: std::io::Error| MeshError::System { who, what, reason: error.to_string().into() }
        };
        let waker = Waker::new().map_err(system("make a waker"))?;
        let inbox = Arc::new(Inbox::new(waker.clone()));
        let (commons, memory) = match memory {
            Ok(commons) => {
                let room = commons.room();
                (Some(commons), Ok(room))
            }
            Err(why) => (None, Err(why)),
        };
        let (heed, dead_after) = (Arc::clone(&inbox), config.dead_after);
        let engine = Engine::new(who.clone(), sockets, waker, heed, dead_after, commons)
            .map_err(system("make a poller"))?;
        let (tell, ended) = sync_channel(1);
        thread::Builder::new()
            .name("paramhub-mesh".into())
            .spawn(move || {
                // Nobody may wait for it.
                let _ = tell.send(engine.run());
            })
            .map_err(system("start a thread"))?;
        Ok(Mesh { who, size: config.size, memory, inbox, thread: Mutex::new(Thread::Runs(ended)) })
    }

    /// This process's place.
    pub fn rank(&self) -> u32 {
        self.who.rank
    }

    /// Ranks in the mesh.
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Whether collectives go through memory that all ranks share, or else why not.
    pub fn shares_memory(&self) -> Result<(), &str> {
        self.memory.as_ref().map(|_| ()).map_err(|why| &**why)
    }

    pub(crate) fn who(&self) -> &Who {
        &self.who
    }

    /// Why the mesh takes no more operations, if it does not.
    pub fn failure(&self) -> Option<MeshError> {
        self.inbox.closed()
    }

    /// Sends `from` to `peer`, which must receive with the same tag and length. Ends when the bytes have left, which is not
    /// before the peer has issued its receive; the peer may not have all of them yet.
    pub fn send(&self, peer: u32, tag: u64, from: SendRegion) -> Result<Handle, MeshError> {
        let what = What::Send { peer, tag };
        self.check_peer(&what, peer)?;
        let work = Work::Send { peer, index: 0, from: Span::whole(0, from.bytes().len()) };
        self.issue(what, vec![Buffer::Send(from)], Schedule::of(work))
    }

    /// Receives from `peer` what it sends with the same tag, which must be as long as `into`.
    pub fn receive(&self, peer: u32, tag: u64, into: ReceiveRegion) -> Result<Handle, MeshError> {
        let what = What::Receive { peer, tag };
        self.check_peer(&what, peer)?;
        let work = Work::Receive { peer, index: 0, into: Span::whole(0, into.bytes().len()) };
        self.issue(what, vec![Buffer::Receive(into)], Schedule::of(work))
    }

    /// Receives from whichever peer sends with this tag first; [`Handle::source`] tells which it was. Costs a round trip more
    /// than [`receive`](Self::receive).
    pub fn receive_any(&self, tag: u64, into: ReceiveRegion) -> Result<Handle, MeshError> {
        let what = What::ReceiveAny { tag };
        if self.size == 1 {
            return Err(self.misplaced(&what, "a mesh of one rank has no peers".into()));
        }
        let work = Work::ReceiveAny { into: Span::whole(0, into.bytes().len()) };
        self.issue(what, vec![Buffer::Receive(into)], Schedule::of(work))
    }

    /// Ends once every rank has begun it.
    pub fn barrier(&self) -> Result<Handle, MeshError> {
        let what = What::Collective(Descriptor::new(Collective::Barrier));
        let schedule = || schedule::barrier(self.rank(), self.size);
        self.issue_either(what, Vec::new(), Plan::barrier, schedule)
    }

    /// Gives `root`'s bytes to every rank, in place. All ranks name the same length.
    pub fn broadcast(&self, buffer: ReceiveRegion, root: u32) -> Result<Handle, MeshError> {
        let bytes = buffer.bytes().len();
        let descriptor = Descriptor { root, bytes: bytes as u64, ..Descriptor::new(Collective::Broadcast) };
        let what = What::Collective(descriptor);
        self.check_root(&what, root)?;
        let plan = |room| Plan::broadcast(room, root, bytes);
        let schedule = || schedule::broadcast(self.rank(), self.size, root, bytes);
        self.issue_either(what, vec![Buffer::Receive(buffer)], plan, schedule)
    }

    /// Reduces all ranks' buffers, in place, at every rank. All ranks name the same length, element and operator; all get the
    /// same bits, today and tomorrow, as long as size, length, release and [way](Self::shares_memory) stay the same.
    pub fn allreduce(
        &self,
        buffer: ReceiveRegion,
        element: ElementType,
        op: ReduceOp,
    ) -> Result<Handle, MeshError> {
        let bytes = buffer.bytes().len();
        let descriptor = Descriptor {
            reduction: Some((element, op)),
            bytes: bytes as u64,
            ..Descriptor::new(Collective::AllReduce)
        };
        let what = What::Collective(descriptor);
        self.check_reduction(&what, element, op, [bytes])?;
        let is_average = op == ReduceOp::Average;
        let plan = |room| Plan::reduce(room, bytes, element.bytes(), None);
        let schedule = || schedule::allreduce(self.rank(), self.size, bytes, element.bytes(), is_average);
        self.issue_either(what, vec![Buffer::Receive(buffer)], plan, schedule)
    }

    /// Says that an allreduce of so many bytes comes here, which goes another way, for example through a hub. It moves nothing
    /// and waits for nobody, but is compared as all collectives are: ranks that call another one here, or name another length,
    /// fail the mesh.
    pub fn note_allreduce(
        &self,
        bytes: usize,
        element: ElementType,
        op: ReduceOp,
    ) -> Result<Handle, MeshError> {
        let descriptor = Descriptor {
            reduction: Some((element, op)),
            bytes: bytes as u64,
            ..Descriptor::new(Collective::AllReduce)
        };
        let what = What::Collective(descriptor);
        self.check_reduction(&what, element, op, [bytes])?;
        self.issue(what, Vec::new(), Schedule::default())
    }

    /// Reduces all ranks' buffers into `root`'s. What the others' hold afterwards is not specified.
    pub fn reduce(
        &self,
        buffer: ReceiveRegion,
        element: ElementType,
        op: ReduceOp,
        root: u32,
    ) -> Result<Handle, MeshError> {
        let bytes = buffer.bytes().len();
        let descriptor = Descriptor {
            reduction: Some((element, op)),
            root,
            bytes: bytes as u64,
            ..Descriptor::new(Collective::Reduce)
        };
        let what = What::Collective(descriptor);
        self.check_root(&what, root)?;
        self.check_reduction(&what, element, op, [bytes])?;
        let is_average = op == ReduceOp::Average;
        let plan = |room| Plan::reduce(room, bytes, element.bytes(), Some(root));
        let schedule = || schedule::reduce(self.rank(), self.size, root, bytes, element.bytes(), is_average);
        self.issue_either(what, vec![Buffer::Receive(buffer)], plan, schedule)
    }

    /// Gives every rank's block to every rank. `outputs` has one region for each rank, which may differ in length; all ranks
    /// name the same lengths. `input` is this rank's block, as long as its output; without one the block is in that output
    /// already.
    pub fn allgather(
        &self,
        input: Option<SendRegion>,
        outputs: Vec<ReceiveRegion>,
    ) -> Result<Handle, MeshError> {
        self.allgather_as(|descriptor| descriptor, Some(Plan::allgather), schedule::allgather, input, outputs)
    }

    /// The same where several ranks share a host, of which `hosts` tells for each rank: a block crosses to another host once and
    /// is passed on there, so that links carry it once for all ranks of a host. All ranks name the same hosts, by any numbers.
    pub fn allgather_between_hosts(
        &self,
        input: Option<SendRegion>,
        outputs: Vec<ReceiveRegion>,
        hosts: &[u32],
    ) -> Result<Handle, MeshError> {
        self.check_count(&What::Collective(Descriptor::new(Collective::AllGather)), "hosts", hosts.len())?;
        let schedule = |rank, lengths: &[usize], has_input| {
            schedule::allgather_between_hosts(rank, hosts, lengths, has_input)
        };
        // Where all of them are one, these are no hosts.
        let plan = None::<fn(Room, &[usize], bool) -> Plan>;
        self.allgather_as(|descriptor| descriptor.with_hosts(hosts), plan, schedule, input, outputs)
    }

    /// How many blocks this rank sends in an [`allgather_between_hosts`](Self::allgather_between_hosts): its own, to each peer of
    /// its host and once to each other host, and those of others that it passes on.
    pub fn blocks_sent_between_hosts(&self, hosts: &[u32]) -> usize {
        let schedule = schedule::allgather_between_hosts(self.rank(), hosts, &vec![0; hosts.len()], false);
        schedule.work.iter().filter(|work| matches!(work, Work::Send { .. })).count()
    }

    fn allgather_as(
        &self,
        describe: impl FnOnce(Descriptor) -> Descriptor,
        plan: Option<impl FnOnce(Room, &[usize], bool) -> Plan>,
        schedule: impl FnOnce(u32, &[usize], bool) -> Schedule,
        input: Option<SendRegion>,
        outputs: Vec<ReceiveRegion>,
    ) -> Result<Handle, MeshError> {
        let lengths: Vec<usize> = outputs.iter().map(|region| region.bytes().len()).collect();
        let descriptor = Descriptor::new(Collective::AllGather).with_lengths(lengths.iter().copied());
        let what = What::Collective(describe(descriptor));
        self.check_count(&what, "outputs", lengths.len())?;
        let own = lengths[self.rank() as usize];
        self.check_same(&what, input.as_ref().map(|input| input.bytes().len()), own)?;
        let has_input = input.is_some();
        let buffers = outputs.into_iter().map(Buffer::Receive).chain(input.map(Buffer::Send)).collect();
        let schedule = || schedule(self.rank(), &lengths, has_input);
        match plan {
            Some(plan) => self.issue_either(what, buffers, |room| plan(room, &lengths, has_input), schedule),
            None => self.issue(what, buffers, schedule()),
        }
    }

    /// Reduces all ranks' `inputs[i]` into rank i's `output`. The lengths of the inputs may differ; all ranks name the same.
    /// The own input may be missing, an empty region in its place and `in_place` set: then it is in `output` already.
    pub fn reduce_scatter(
        &self,
        inputs: Vec<SendRegion>,
        output: ReceiveRegion,
        in_place: bool,
        element: ElementType,
        op: ReduceOp,
    ) -> Result<Handle, MeshError> {
        let own = output.bytes().len();
        let mut lengths: Vec<usize> = inputs.iter().map(|region| region.bytes().len()).collect();
        let mut descriptor = Descriptor::new(Collective::ReduceScatter);
        descriptor.reduction = Some((element, op));
        self.check_count(&What::Collective(descriptor), "inputs", lengths.len())?;
        if in_place {
            lengths[self.rank() as usize] = own;
        }
        let what = What::Collective(descriptor.with_lengths(lengths.iter().copied()));
        self.check_same(&what, Some(own), lengths[self.rank() as usize])?;
        self.check_reduction(&what, element, op, lengths.iter().copied())?;
        let is_average = op == ReduceOp::Average;
        let plan = |room| Plan::reduce_scatter(room, &lengths, in_place);
        let schedule =
            || schedule::reduce_scatter(self.rank(), &lengths, element.bytes(), is_average, !in_place);
        let output = std::iter::once(Buffer::Receive(output));
        let buffers = inputs.into_iter().map(Buffer::Send).chain(output).collect();
        self.issue_either(what, buffers, plan, schedule)
    }

    /// Gives every rank's block to `root`. There, `outputs` has one region for each rank, and `input` may be missing if the
    /// block is in its output already; elsewhere `outputs` is empty and there must be an `input`.
    pub fn gather(
        &self,
        input: Option<SendRegion>,
        outputs: Vec<ReceiveRegion>,
        root: u32,
    ) -> Result<Handle, MeshError> {
        let what = What::Collective(Descriptor { root, ..Descriptor::new(Collective::Gather) });
        self.check_root(&what, root)?;
        let mut lengths: Vec<usize> = outputs.iter().map(|region| region.bytes().len()).collect();
        let input_bytes = input.as_ref().map(|input| input.bytes().len());
        if self.rank() == root {
            self.check_count(&what, "outputs", lengths.len())?;
            self.check_same(&what, input_bytes, lengths[root as usize])?;
        } else {
            self.check_none(&what, "outputs", lengths.len())?;
            lengths.push(input_bytes.ok_or_else(|| self.misplaced(&what, "an input is missing".into()))?);
        }
        let schedule = schedule::gather(self.rank(), self.size, root, &lengths, input.is_some());
        let buffers = outputs.into_iter().map(Buffer::Receive).chain(input.map(Buffer::Send)).collect();
        self.issue(what, buffers, schedule)
    }

    /// Gives each rank its block of `root`'s. There, `inputs` has one region for each rank, and `output` may be missing if
    /// the own block is to stay; elsewhere `inputs` is empty and there must be an `output`.
    pub fn scatter(
        &self,
        inputs: Vec<SendRegion>,
        output: Option<ReceiveRegion>,
        root: u32,
    ) -> Result<Handle, MeshError> {
        let what = What::Collective(Descriptor { root, ..Descriptor::new(Collective::Scatter) });
        self.check_root(&what, root)?;
        let mut lengths: Vec<usize> = inputs.iter().map(|region| region.bytes().len()).collect();
        let output_bytes = output.as_ref().map(|output| output.bytes().len());
        if self.rank() == root {
            self.check_count(&what, "inputs", lengths.len())?;
            self.check_same(&what, output_bytes, lengths[root as usize])?;
        } else {
            self.check_none(&what, "inputs", lengths.len())?;
            lengths.push(output_bytes.ok_or_else(|| self.misplaced(&what, "an output is missing".into()))?);
        }
        let schedule = schedule::scatter(self.rank(), self.size, root, &lengths, output.is_some());
        let buffers = inputs.into_iter().map(Buffer::Send).chain(output.map(Buffer::Receive)).collect();
        self.issue(what, buffers, schedule)
    }

    /// Gives `inputs[i]` to rank i, and gets `outputs[i]` from it. Lengths may differ from pair to pair, and be zero; what one
    /// rank sends must be as long as what the other expects.
    pub fn all_to_all(
        &self,
        inputs: Vec<SendRegion>,
        outputs: Vec<ReceiveRegion>,
    ) -> Result<Handle, MeshError> {
        let what = What::Collective(Descriptor::new(Collective::AllToAll));
        self.check_count(&what, "inputs", inputs.len())?;
        self.check_count(&what, "outputs", outputs.len())?;
        let sent: Vec<usize> = inputs.iter().map(|region| region.bytes().len()).collect();
        let received: Vec<usize> = outputs.iter().map(|region| region.bytes().len()).collect();
        let own = self.rank() as usize;
        self.check_same(&what, Some(sent[own]), received[own])?;
        let schedule = schedule::all_to_all(self.rank(), &sent, &received);
        let outputs = outputs.into_iter().map(Buffer::Receive);
        self.issue(what, inputs.into_iter().map(Buffer::Send).chain(outputs).collect(), schedule)
    }

    /// Leaves in order: waits until nothing is under way but receives to which nothing has come, which fail, says goodbye, and
    /// waits until every peer has read it. Peers go on without this rank; what still needs it fails there, and says so. Called
    /// again, it says what the first call did.
    ///
    /// # Panics
    /// On the mesh's thread, that is in a callback: it would wait for itself.
    pub fn leave(&self, timeout: Duration) -> Result<(), MeshError> {
        assert!(!on_mesh_thread(), "a callback must not leave the mesh: it would wait for itself");
        // A mesh that has ended says below how.
        let _ = self.inbox.put(Command::Leave { timeout });
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Thread::Runs(ended) = &*thread {
            let outcome = ended.recv_timeout(timeout.saturating_add(LEAVE_GRACE)).unwrap_or_else(|_| {
                let reason = "it does not answer: does a callback block it?".into();
                Err(MeshError::Internal { who: self.who.clone(), reason })
            });
            *thread = Thread::Ended(outcome);
        }
        match &*thread {
            Thread::Ended(outcome) => outcome.clone(),
            Thread::Runs(_) => unreachable!("the thread has ended"),
        }
    }

    /// Ends the mesh at once, here and at every peer: everything outstanding fails, there with `reason`. For a program that
    /// cannot go on and wants the others to know why. Does nothing to a mesh that has ended.
    pub fn abort(&self, reason: &str) {
        let _ = self.inbox.put(Command::Abort { reason: reason.into() });
    }

    fn issue(&self, what: What, buffers: Vec<Buffer>, schedule: Schedule) -> Result<Handle, MeshError> {
        self.issue_as(what, buffers, schedule, None)
    }

    /// By a plan where memory is shared, and by a schedule where it is not.
    fn issue_either(
        &self,
        what: What,
        buffers: Vec<Buffer>,
        plan: impl FnOnce(Room) -> Plan,
        schedule: impl FnOnce() -> Schedule,
    ) -> Result<Handle, MeshError> {
        match &self.memory {
            Ok(room) => self.issue_as(what, buffers, Schedule::default(), Some(plan(*room))),
            Err(_) => self.issue_as(what, buffers, schedule(), None),
        }
    }

    fn issue_as(
        &self,
        what: What,
        buffers: Vec<Buffer>,
        schedule: Schedule,
        plan: Option<Plan>,
    ) -> Result<Handle, MeshError> {
        let (ticket, completion) = Ticket::new(MeshError::Left { who: self.who.clone() });
        self.inbox.put_request(&self.who, Request { what, buffers, schedule, plan, ticket })?;
        Ok(Handle::new(completion, Arc::clone(&self.inbox)))
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        // Nobody is left to tell; a mesh that has ended is closed already.
        let reason = format!("rank {} dropped its mesh without leaving it", self.who.rank).into();
        let _ = self.inbox.put(Command::Abort { reason });
    }
}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mesh")
            .field("who", &self.who)
            .field("size", &self.size)
            .field("shares_memory", &self.shares_memory())
            .finish_non_exhaustive()
    }
}
