//! The handle with which user threads use a mesh.

mod checks;

use std::fmt;

use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use paramhub_transport::runtime::on_io_thread;
use paramhub_transport::{ReceiveRegion, SendRegion, Waker};

use crate::command::{MeshCommand, MeshInbox, OUTSTANDING_MAX};
use crate::config::MeshConfig;
use crate::descriptor::{Collective, Descriptor};
use crate::element::{ElementType, ReduceOp};
use crate::error::{MeshError, MeshRank};
use crate::handle::{Handle, OperationCompleter};
use crate::join::{MeshJoin, Redialler};
use crate::memory::agreement::SharedMemoryAgreement;
use crate::memory::{Plan, SlotLayout};
use crate::noted::Noted;
use crate::operation::{OperationBuffer, OperationKind, OperationRequest};
use crate::progress_engine::{ProgressEngine, SharedEngine};
use crate::schedule::{self, BufferRange, Schedule, Work};
use crate::socket::PeerSocket;

/// The time that leaving waits, beyond its own bound, for the outcome from the mesh's thread.
const LEAVE_GRACE: Duration = Duration::from_secs(5);
/// The bytes of the largest operation that its caller begins, and runs while it waits. To wake another thread for it would
/// take a good part of the operation's time.
const CALLER_BYTES_MAX: usize = 1 << 20;

/// Connections to all other ranks, and operations over them.
///
/// Every operation is asynchronous: it takes regions, returns a [`Handle`] and runs without its caller. A small one runs on
/// its caller's thread while that waits.
/// Regions may be lent with [`paramhub_transport::lend`] or promised with their `from_raw`; they are dropped
/// when the operation ends.
///
/// **Point to point.** A receive is matched with the sends of its peer that have the same tag, in the order
/// in which both were issued. A send waits until the peer has issued the receive: the mesh buffers nothing.
///
/// **Collectives** must be called by all ranks in the same order. They begin in that order, and a few may be
/// under way at a time. If ranks call different collectives, or pass different lengths, the mesh fails with
/// an error that names both.
///
/// Threads share a mesh by reference; the order between their operations is that in which their calls return.
pub struct Mesh {
    this_rank: MeshRank,
    size: u32,
    /// The layout for plans, or why there is no shared memory.
    memory: Result<SlotLayout, Arc<str>>,
    pub(crate) inbox: Arc<MeshInbox>,
    engine: Arc<SharedEngine>,
    thread: Mutex<MeshThread>,
}

/// The mesh's thread, or its outcome.
enum MeshThread {
    Runs(Receiver<Result<(), MeshError>>),
    Ended(Result<(), MeshError>),
}

impl Mesh {
    pub(crate) fn start(
        config: &MeshConfig,
        sockets: Vec<Option<PeerSocket>>,
        memory: SharedMemoryAgreement,
        join: Option<MeshJoin>,
    ) -> Result<Mesh, MeshError> {
        let this_rank = config.this_rank();
        let system = |what: &'static str| {
            let this_rank = this_rank.clone();
            move |error: std::io::Error| MeshError::System {
                this_rank,
                what,
                reason: error.to_string().into(),
            }
        };
        let waker = Waker::new().map_err(system("make a waker"))?;
        let inbox = Arc::new(MeshInbox::new(waker.clone(), OUTSTANDING_MAX));
        let (segment, memory) = match memory {
            Ok(segment) => {
                let layout = segment.layout();
                (Some(segment), Ok(layout))
            }
            Err(why) => (None, Err(why)),
        };
        let redialler = join
            .map(|join| Redialler::start(join, Arc::clone(&inbox)))
            .transpose()
            .map_err(system("start a thread"))?;
        let (commands, dead_after) = (Arc::clone(&inbox), config.dead_after);
        let engine =
            ProgressEngine::new(this_rank.clone(), sockets, waker, commands, dead_after, segment, redialler);
        let engine = engine.and_then(SharedEngine::new).map(Arc::new).map_err(system("make a poller"))?;
        let ended = SharedEngine::start(&engine).map_err(system("start a thread"))?;
        let thread = Mutex::new(MeshThread::Runs(ended));
        Ok(Mesh { this_rank, size: config.size, memory, inbox, engine, thread })
    }

    /// The rank of this process.
    pub fn rank(&self) -> u32 {
        self.this_rank.rank
    }

    /// Ranks in the mesh.
    pub fn size(&self) -> u32 {
        self.size
    }

    /// `Ok` if collectives go through memory that all ranks share, else why not.
    pub fn shares_memory(&self) -> Result<(), &str> {
        self.memory.as_ref().map(|_| ()).map_err(|why| &**why)
    }

    pub(crate) fn this_rank(&self) -> &MeshRank {
        &self.this_rank
    }

    /// Returns the reason why the mesh takes no more operations, if it does not.
    pub fn failure(&self) -> Option<MeshError> {
        self.inbox.closed()
    }

    /// Sends `from` to `peer`, which must receive with the same tag and length. The send ends when the bytes
    /// have left, which is not before the peer has issued its receive; the peer may not have all of them yet.
    pub fn send(&self, peer: u32, tag: u64, from: SendRegion) -> Result<Handle, MeshError> {
        let kind = OperationKind::Send { peer, tag };
        self.check_peer(&kind, peer)?;
        let work = Work::Send { peer, index: 0, from: BufferRange::whole(0, from.bytes().len()) };
        self.issue(kind, vec![OperationBuffer::Send(from)], Schedule::of(work))
    }

    /// Receives from `peer` what it sends with the same tag; both lengths must be equal.
    pub fn receive(&self, peer: u32, tag: u64, into: ReceiveRegion) -> Result<Handle, MeshError> {
        let kind = OperationKind::Receive { peer, tag };
        self.check_peer(&kind, peer)?;
        let work = Work::Receive { peer, index: 0, into: BufferRange::whole(0, into.bytes().len()) };
        self.issue(kind, vec![OperationBuffer::Receive(into)], Schedule::of(work))
    }

    /// Receives from the peer that sends with this tag first; [`Handle::source`] names it. Costs a round trip
    /// more than [`receive`](Self::receive).
    pub fn receive_any(&self, tag: u64, into: ReceiveRegion) -> Result<Handle, MeshError> {
        let kind = OperationKind::ReceiveAny { tag };
        if self.size == 1 {
            return Err(self.misused(&kind, "a mesh of one rank has no peers".into()));
        }
        let work = Work::ReceiveAny { into: BufferRange::whole(0, into.bytes().len()) };
        self.issue(kind, vec![OperationBuffer::Receive(into)], Schedule::of(work))
    }

    /// Ends once every rank has begun the barrier.
    pub fn barrier(&self) -> Result<Handle, MeshError> {
        let kind = OperationKind::Collective(Descriptor::new(Collective::Barrier));
        let schedule = || schedule::barrier(self.rank(), self.size);
        self.issue_either(kind, Vec::new(), Plan::barrier, schedule)
    }

    /// Gives `root`'s bytes to every rank, in place. All ranks pass the same length.
    pub fn broadcast(&self, buffer: ReceiveRegion, root: u32) -> Result<Handle, MeshError> {
        self.broadcast_as(buffer, None, root)
    }

    /// Does the same as [`broadcast`](Self::broadcast), and fails if ranks give different element types.
    pub fn broadcast_of(
        &self,
        buffer: ReceiveRegion,
        element: ElementType,
        root: u32,
    ) -> Result<Handle, MeshError> {
        self.broadcast_as(buffer, Some(element), root)
    }

    fn broadcast_as(
        &self,
        buffer: ReceiveRegion,
        element: Option<ElementType>,
        root: u32,
    ) -> Result<Handle, MeshError> {
        let bytes = buffer.bytes().len();
        let kind = OperationKind::Collective(Noted::Broadcast { bytes, element, root }.descriptor());
        self.check_root(&kind, root)?;
        let plan = |layout| Plan::broadcast(layout, root, bytes);
        let schedule = || schedule::broadcast(self.rank(), self.size, root, bytes);
        self.issue_either(kind, vec![OperationBuffer::Receive(buffer)], plan, schedule)
    }

    /// Reduces all ranks' buffers, in place, at every rank. All ranks pass the same length, element and
    /// operator, and all get the same bits. The bits also stay the same from run to run, as long as the
    /// number of ranks, the length, the release and the [way](Self::shares_memory) do.
    pub fn allreduce(
        &self,
        buffer: ReceiveRegion,
        element: ElementType,
        op: ReduceOp,
    ) -> Result<Handle, MeshError> {
        let bytes = buffer.bytes().len();
        let kind = OperationKind::Collective(Noted::AllReduce { bytes, element, op }.descriptor());
        self.check_reduction(&kind, element, op, [bytes])?;
        let is_average = op == ReduceOp::Average;
        let plan = |layout| Plan::reduce(layout, bytes, element.bytes(), None);
        let schedule = || schedule::allreduce(self.rank(), self.size, bytes, element.bytes(), is_average);
        self.issue_either(kind, vec![OperationBuffer::Receive(buffer)], plan, schedule)
    }

    /// Declares a collective that takes place elsewhere, for example through a hub, or in several operations. It
    /// moves no data and waits for no rank, but is compared like all collectives: if ranks call another one
    /// here, or pass another length, the mesh fails.
    pub fn note(&self, noted: Noted<'_>) -> Result<Handle, MeshError> {
        let descriptor = noted.descriptor();
        let kind = OperationKind::Collective(descriptor);
        self.check_root(&kind, descriptor.root)?;
        if let Noted::AllGather { lengths } | Noted::ReduceScatter { lengths, .. } = noted {
            self.check_count(&kind, "lengths", lengths.len())?;
        }
        if let Some((element, op)) = descriptor.reduction {
            self.check_reduction(&kind, element, op, [])?;
        }
        self.issue(kind, Vec::new(), Schedule::default())
    }

    /// Reduces all ranks' buffers into `root`'s. The contents of the other ranks' buffers are unspecified
    /// afterwards.
    pub fn reduce(
        &self,
        buffer: ReceiveRegion,
        element: ElementType,
        op: ReduceOp,
        root: u32,
    ) -> Result<Handle, MeshError> {
        let bytes = buffer.bytes().len();
        let kind = OperationKind::Collective(Noted::Reduce { bytes, element, op, root }.descriptor());
        self.check_root(&kind, root)?;
        self.check_reduction(&kind, element, op, [bytes])?;
        let is_average = op == ReduceOp::Average;
        let plan = |layout| Plan::reduce(layout, bytes, element.bytes(), Some(root));
        let schedule = || schedule::reduce(self.rank(), self.size, root, bytes, element.bytes(), is_average);
        self.issue_either(kind, vec![OperationBuffer::Receive(buffer)], plan, schedule)
    }

    /// Gives every rank's block to every rank. `outputs` has one region for each rank, which may differ in
    /// length; all ranks pass the same lengths. `input` is this rank's block, as long as its output; without
    /// an input the block is in that output already.
    pub fn allgather(
        &self,
        input: Option<SendRegion>,
        outputs: Vec<ReceiveRegion>,
    ) -> Result<Handle, MeshError> {
        self.allgather_as(|descriptor| descriptor, Some(Plan::allgather), schedule::allgather, input, outputs)
    }

    /// [`allgather`](Self::allgather) for ranks of which several share a host; `hosts` has the host of each
    /// rank. A block crosses to another host once, and a rank there passes it on, so links carry it once for
    /// all ranks of a host. All ranks pass the same hosts; any numbers will do.
    pub fn allgather_between_hosts(
        &self,
        input: Option<SendRegion>,
        outputs: Vec<ReceiveRegion>,
        hosts: &[u32],
    ) -> Result<Handle, MeshError> {
        self.check_count(
            &OperationKind::Collective(Descriptor::new(Collective::AllGather)),
            "hosts",
            hosts.len(),
        )?;
        let schedule = |rank, lengths: &[usize], has_input| {
            schedule::allgather_between_hosts(rank, hosts, lengths, has_input)
        };
        // A plan is for ranks of one host, and these are on several.
        let plan = None::<fn(SlotLayout, &[usize], bool) -> Plan>;
        self.allgather_as(|descriptor| descriptor.with_hosts(hosts), plan, schedule, input, outputs)
    }

    /// The number of blocks that this rank sends in an
    /// [`allgather_between_hosts`](Self::allgather_between_hosts): its own, to each peer of its host and once
    /// to each other host, and those of other ranks that it passes on.
    pub fn blocks_sent_between_hosts(&self, hosts: &[u32]) -> usize {
        let schedule = schedule::allgather_between_hosts(self.rank(), hosts, &vec![0; hosts.len()], false);
        schedule.work.iter().filter(|work| matches!(work, Work::Send { .. })).count()
    }

    fn allgather_as(
        &self,
        describe: impl FnOnce(Descriptor) -> Descriptor,
        plan: Option<impl FnOnce(SlotLayout, &[usize], bool) -> Plan>,
        schedule: impl FnOnce(u32, &[usize], bool) -> Schedule,
        input: Option<SendRegion>,
        outputs: Vec<ReceiveRegion>,
    ) -> Result<Handle, MeshError> {
        let lengths: Vec<usize> = outputs.iter().map(|region| region.bytes().len()).collect();
        let descriptor = Descriptor::new(Collective::AllGather).with_lengths(lengths.iter().copied());
        let kind = OperationKind::Collective(describe(descriptor));
        self.check_count(&kind, "outputs", lengths.len())?;
        let own = lengths[self.rank() as usize];
        self.check_same(&kind, input.as_ref().map(|input| input.bytes().len()), own)?;
        let has_input = input.is_some();
        let buffers = outputs
            .into_iter()
            .map(OperationBuffer::Receive)
            .chain(input.map(OperationBuffer::Send))
            .collect();
        let schedule = || schedule(self.rank(), &lengths, has_input);
        match plan {
            Some(plan) => {
                self.issue_either(kind, buffers, |layout| plan(layout, &lengths, has_input), schedule)
            }
            None => self.issue(kind, buffers, schedule()),
        }
    }

    /// Reduces all ranks' `inputs[i]` into rank i's `output`. The lengths of the inputs may differ; all ranks
    /// pass the same. This rank's own input may be in `output` already: then `in_place` is set, and its place
    /// in `inputs` is an empty region.
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
        self.check_count(&OperationKind::Collective(descriptor), "inputs", lengths.len())?;
        if in_place {
            lengths[self.rank() as usize] = own;
        }
        let kind = OperationKind::Collective(descriptor.with_lengths(lengths.iter().copied()));
        self.check_same(&kind, Some(own), lengths[self.rank() as usize])?;
        self.check_reduction(&kind, element, op, lengths.iter().copied())?;
        let is_average = op == ReduceOp::Average;
        let plan = |layout| Plan::reduce_scatter(layout, &lengths, in_place);
        let schedule =
            || schedule::reduce_scatter(self.rank(), &lengths, element.bytes(), is_average, !in_place);
        let output = std::iter::once(OperationBuffer::Receive(output));
        let buffers = inputs.into_iter().map(OperationBuffer::Send).chain(output).collect();
        self.issue_either(kind, buffers, plan, schedule)
    }

    /// Gives every rank's block to `root`. At the root, `outputs` has one region for each rank, and `input`
    /// may be missing if the root's block is in its output already; elsewhere `outputs` is empty and `input`
    /// is required.
    pub fn gather(
        &self,
        input: Option<SendRegion>,
        outputs: Vec<ReceiveRegion>,
        root: u32,
    ) -> Result<Handle, MeshError> {
        let kind = OperationKind::Collective(Descriptor { root, ..Descriptor::new(Collective::Gather) });
        self.check_root(&kind, root)?;
        let mut lengths: Vec<usize> = outputs.iter().map(|region| region.bytes().len()).collect();
        let input_bytes = input.as_ref().map(|input| input.bytes().len());
        if self.rank() == root {
            self.check_count(&kind, "outputs", lengths.len())?;
            self.check_same(&kind, input_bytes, lengths[root as usize])?;
        } else {
            self.check_none(&kind, "outputs", lengths.len())?;
            lengths.push(input_bytes.ok_or_else(|| self.misused(&kind, "an input is missing".into()))?);
        }
        let schedule = schedule::gather(self.rank(), self.size, root, &lengths, input.is_some());
        let buffers = outputs
            .into_iter()
            .map(OperationBuffer::Receive)
            .chain(input.map(OperationBuffer::Send))
            .collect();
        self.issue(kind, buffers, schedule)
    }

    /// Gives each rank its block of `root`'s. At the root, `inputs` has one region for each rank, and
    /// `output` may be missing if the root's block is to stay; elsewhere `inputs` is empty and `output` is
    /// required.
    pub fn scatter(
        &self,
        inputs: Vec<SendRegion>,
        output: Option<ReceiveRegion>,
        root: u32,
    ) -> Result<Handle, MeshError> {
        let kind = OperationKind::Collective(Descriptor { root, ..Descriptor::new(Collective::Scatter) });
        self.check_root(&kind, root)?;
        let mut lengths: Vec<usize> = inputs.iter().map(|region| region.bytes().len()).collect();
        let output_bytes = output.as_ref().map(|output| output.bytes().len());
        if self.rank() == root {
            self.check_count(&kind, "inputs", lengths.len())?;
            self.check_same(&kind, output_bytes, lengths[root as usize])?;
        } else {
            self.check_none(&kind, "inputs", lengths.len())?;
            lengths.push(output_bytes.ok_or_else(|| self.misused(&kind, "an output is missing".into()))?);
        }
        let schedule = schedule::scatter(self.rank(), self.size, root, &lengths, output.is_some());
        let buffers = inputs
            .into_iter()
            .map(OperationBuffer::Send)
            .chain(output.map(OperationBuffer::Receive))
            .collect();
        self.issue(kind, buffers, schedule)
    }

    /// Gives `inputs[i]` to rank i, and receives `outputs[i]` from it. Lengths may differ from pair to pair,
    /// and be zero; the bytes that one rank sends must be as long as those that the other expects.
    pub fn all_to_all(
        &self,
        inputs: Vec<SendRegion>,
        outputs: Vec<ReceiveRegion>,
    ) -> Result<Handle, MeshError> {
        let kind = OperationKind::Collective(Descriptor::new(Collective::AllToAll));
        self.check_count(&kind, "inputs", inputs.len())?;
        self.check_count(&kind, "outputs", outputs.len())?;
        let sent: Vec<usize> = inputs.iter().map(|region| region.bytes().len()).collect();
        let received: Vec<usize> = outputs.iter().map(|region| region.bytes().len()).collect();
        let own = self.rank() as usize;
        self.check_same(&kind, Some(sent[own]), received[own])?;
        let schedule = schedule::all_to_all(self.rank(), &sent, &received);
        let outputs = outputs.into_iter().map(OperationBuffer::Receive);
        self.issue(kind, inputs.into_iter().map(OperationBuffer::Send).chain(outputs).collect(), schedule)
    }

    /// Leaves in order: waits until only receives without a sender are under way, fails those, sends a leave
    /// message, and waits until every peer has read it. Peers go on without this rank; an operation there
    /// that still needs it fails with an error that names it. A second call returns the outcome of the first.
    ///
    /// # Panics
    /// On the mesh's thread, that is in a callback: the thread would wait for itself.
    pub fn leave(&self, timeout: Duration) -> Result<(), MeshError> {
        assert!(!on_io_thread(), "a callback must not leave the mesh: it would wait for itself");
        // The outcome of a mesh that has ended follows below.
        let _ = self.inbox.put(MeshCommand::Leave { timeout });
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let MeshThread::Runs(ended) = &*thread {
            let outcome = ended.recv_timeout(timeout.saturating_add(LEAVE_GRACE)).unwrap_or_else(|_| {
                let reason = "it does not answer: does a callback block it?".into();
                Err(MeshError::Internal { this_rank: self.this_rank.clone(), reason })
            });
            *thread = MeshThread::Ended(outcome);
        }
        match &*thread {
            MeshThread::Ended(outcome) => outcome.clone(),
            MeshThread::Runs(_) => unreachable!("the thread has ended"),
        }
    }

    /// Ends the mesh at once, here and at every peer: every outstanding operation fails, at the peers with
    /// `reason`. For a program that cannot go on and wants to give the other ranks the reason. Does nothing
    /// to a mesh that has ended.
    pub fn abort(&self, reason: &str) {
        let _ = self.inbox.put(MeshCommand::Abort { reason: reason.into() });
    }

    fn issue(
        &self,
        kind: OperationKind,
        buffers: Vec<OperationBuffer>,
        schedule: Schedule,
    ) -> Result<Handle, MeshError> {
        self.issue_as(kind, buffers, schedule, None)
    }

    /// Issues a plan where memory is shared, and a schedule where it is not.
    fn issue_either(
        &self,
        kind: OperationKind,
        buffers: Vec<OperationBuffer>,
        plan: impl FnOnce(SlotLayout) -> Plan,
        schedule: impl FnOnce() -> Schedule,
    ) -> Result<Handle, MeshError> {
        match &self.memory {
            Ok(layout) => self.issue_as(kind, buffers, Schedule::default(), Some(plan(*layout))),
            Err(_) => self.issue_as(kind, buffers, schedule(), None),
        }
    }

    fn issue_as(
        &self,
        kind: OperationKind,
        buffers: Vec<OperationBuffer>,
        schedule: Schedule,
        plan: Option<Plan>,
    ) -> Result<Handle, MeshError> {
        let (completer, completion) =
            OperationCompleter::new(None, |_| {}, MeshError::Left { this_rank: self.this_rank.clone() });
        let bytes: usize = buffers.iter().map(OperationBuffer::len).sum();
        let request = Box::new(OperationRequest { kind, buffers, schedule, plan, completer });
        let full =
            || MeshError::Congested { this_rank: self.this_rank.clone(), outstanding: OUTSTANDING_MAX };
        self.inbox.put_counted_quietly(MeshCommand::Run(request), Duration::ZERO, full)?;
        let is_small = bytes <= CALLER_BYTES_MAX;
        match is_small {
            true => self.engine.begin(),
            false => self.engine.wake(),
        }
        let engine = is_small.then(|| Arc::downgrade(&self.engine));
        Ok(Handle::new(completion, Arc::downgrade(&self.inbox), engine))
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        // No caller is left to receive an error; the inbox of a mesh that has ended is closed already.
        let reason = format!("rank {} dropped its mesh without leaving it", self.this_rank.rank).into();
        let _ = self.inbox.put(MeshCommand::Abort { reason });
    }
}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mesh")
            .field("rank", &self.this_rank)
            .field("size", &self.size)
            .field("shares_memory", &self.shares_memory())
            .finish_non_exhaustive()
    }
}
