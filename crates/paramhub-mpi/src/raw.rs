//! MPI's functions, for callers with a permit: all of this crate's `unsafe`.

use std::ffi::{c_char, c_int, c_void};

use mpi::ffi;

use crate::process::CallPermit;

unsafe extern "C" {
    /// `MPI_IN_PLACE`, from `in_place.c`.
    safe fn paramhub_mpi_in_place() -> *const c_void;
    /// The function of the C library.
    safe fn atexit(work: extern "C" fn()) -> c_int;
}

/// Room for an error message of MPI; at least `MPI_MAX_ERROR_STRING` of every MPI.
const ERROR_BYTES: usize = 2048;

/// A communicator's handle. It has no `Drop`, for all ranks must free a communicator together.
#[derive(Debug)]
pub(crate) struct Raw(ffi::MPI_Comm);

// SAFETY: Guard: a handle is used only with a `CallPermit`, which exists where MPI permits this thread to
// call it (MPI 3.1, section 12.4: from SERIALIZED up handles belong to no thread). Bound: it stands for one
// communicator and is freed once, by value. Duty of the caller: none.
unsafe impl Send for Raw {}

impl Raw {
    /// A duplicate of the communicator of all ranks of the program.
    pub(crate) fn of_world(permit: &CallPermit) -> Result<Raw, String> {
        // SAFETY: Guard: a constant of the shim in mpi-sys, initialised statically or at load. Bound: it is
        // read. Duty of the caller: none.
        let world = unsafe { ffi::RSMPI_COMM_WORLD };
        Raw(world).duplicate(permit)
    }

    pub(crate) fn duplicate(&self, _turn: &CallPermit) -> Result<Raw, String> {
        let mut copy = self.0;
        // SAFETY: Guard: the permit; the handle is of a live communicator. Bound: one handle is written.
        // Duty: all ranks call it.
        check(unsafe { ffi::MPI_Comm_dup(self.0, &mut copy) })?;
        // SAFETY: Guard: a constant of the shim in mpi-sys. Bound: it is read. Duty of the caller: none.
        let errors_return = unsafe { ffi::RSMPI_ERRORS_RETURN };
        // SAFETY: Guard: the permit; the communicator was just made. Bound: it alone changes. Duty of the
        // caller: none.
        check(unsafe { ffi::MPI_Comm_set_errhandler(copy, errors_return) })?;
        Ok(Raw(copy))
    }

    pub(crate) fn rank(&self, _turn: &CallPermit) -> u32 {
        rank_in(self.0)
    }

    pub(crate) fn size(&self, _turn: &CallPermit) -> u32 {
        let mut size = 0;
        // SAFETY: Guard: the permit; a live communicator. Bound: one int is written. Duty of the caller:
        // none.
        unsafe { ffi::MPI_Comm_size(self.0, &mut size) };
        size as u32
    }

    /// Sums `values` of all ranks in place.
    pub(crate) fn allreduce(&self, _turn: &CallPermit, values: &mut [f32]) -> Result<(), String> {
        let (float, sum) = (float(), sum());
        // SAFETY: Guard: the permit; a live communicator; in place, so that MPI reads only `values`. Bound:
        // `count` floats, which is the slice. Duty: all ranks call it with the same count.
        check(unsafe {
            ffi::MPI_Allreduce(
                paramhub_mpi_in_place(),
                values.as_mut_ptr().cast(),
                count(values.len()),
                float,
                sum,
                self.0,
            )
        })
    }

    pub(crate) fn broadcast(&self, _turn: &CallPermit, bytes: &mut [u8], root: u32) -> Result<(), String> {
        let byte = byte();
        // SAFETY: Guard: the permit; a live communicator; MPI refuses a root that is no rank. Bound: `count`
        // bytes, which is the slice. Duty: all ranks call it with the same count and root.
        check(unsafe {
            ffi::MPI_Bcast(bytes.as_mut_ptr().cast(), count(bytes.len()), byte, root as c_int, self.0)
        })
    }

    /// Sums a block of each rank; `values` has a block of `sum`'s length for each rank.
    pub(crate) fn reduce_scatter(
        &self,
        permit: &CallPermit,
        values: &[f32],
        sum_out: &mut [f32],
    ) -> Result<(), String> {
        assert_eq!(values.len(), sum_out.len() * self.size(permit) as usize, "a block for each rank");
        let (float, sum) = (float(), sum());
        // SAFETY: Guard: the permit; a live communicator; the slices do not overlap, one being borrowed
        // mutably. Bound: MPI writes `count` floats, which is `sum_out`, and reads as many for each rank,
        // which is `values` by the assertion. Duty: all ranks call it with the same count.
        check(unsafe {
            ffi::MPI_Reduce_scatter_block(
                values.as_ptr().cast(),
                sum_out.as_mut_ptr().cast(),
                count(sum_out.len()),
                float,
                sum,
                self.0,
            )
        })
    }

    /// Gathers each rank's block at all ranks; `all` has room for a block of each.
    pub(crate) fn allgather(&self, permit: &CallPermit, block: &[u8], all: &mut [u8]) -> Result<(), String> {
        assert_eq!(all.len(), block.len() * self.size(permit) as usize, "a block of each rank");
        let (byte, count) = (byte(), count(block.len()));
        // SAFETY: Guard: the permit; a live communicator; the slices do not overlap, one being borrowed
        // mutably. Bound: MPI reads `count` bytes, which is `block`, and writes as many of each rank, which
        // is `all` by the assertion. Duty: all ranks call it with the same count.
        check(unsafe {
            ffi::MPI_Allgather(
                block.as_ptr().cast(),
                count,
                byte,
                all.as_mut_ptr().cast(),
                count,
                byte,
                self.0,
            )
        })
    }

    pub(crate) fn barrier(&self, _turn: &CallPermit) -> Result<(), String> {
        // SAFETY: Guard: the permit; a live communicator. Bound: no memory. Duty: all ranks call it.
        check(unsafe { ffi::MPI_Barrier(self.0) })
    }

    pub(crate) fn free(mut self, _turn: &CallPermit) -> Result<(), String> {
        // SAFETY: Guard: the permit; a live communicator, and never the world, which is in no `Raw` outside
        // `of_world`. Bound: the handle, which was taken by value, so that no one uses it afterwards. Duty:
        // all ranks call it.
        check(unsafe { ffi::MPI_Comm_free(&mut self.0) })
    }
}

/// The rank of this process in the world. MPI must be running.
pub(crate) fn world_rank() -> u32 {
    // SAFETY: Guard: a constant of the shim in mpi-sys. Bound: it is read. Duty of the caller: none.
    rank_in(unsafe { ffi::RSMPI_COMM_WORLD })
}

fn rank_in(communicator: ffi::MPI_Comm) -> u32 {
    let mut rank = 0;
    // SAFETY: Guard: the callers have a live communicator. Bound: one int is written. Duty of the caller: MPI
    // is running.
    unsafe { ffi::MPI_Comm_rank(communicator, &mut rank) };
    rank as u32
}

/// Ends the program, at all ranks. Returns only if MPI cannot.
pub(crate) fn abort(_turn: &CallPermit) {
    // SAFETY: Guard: a constant of the shim in mpi-sys. Bound: it is read. Duty of the caller: none.
    let world = unsafe { ffi::RSMPI_COMM_WORLD };
    // SAFETY: Guard: the permit. Bound: no memory. Duty of the caller: to want all ranks ended.
    unsafe { ffi::MPI_Abort(world, 1) };
}

/// Ends MPI in this process; waits until all ranks call it.
pub(crate) fn finalize() {
    // SAFETY: Guard: `process::end` calls it while MPI is running, at the exit of the process, when all
    // communicators have been left, so that no thread has a reason to call MPI. Bound: no memory of ours.
    // Duty of the caller: to keep to that.
    unsafe { ffi::MPI_Finalize() };
}

/// Registers `work` to run when the process exits in order.
pub(crate) fn at_exit(work: extern "C" fn()) {
    // If it cannot be registered, MPI is not ended, and `mpirun` reports that.
    let _ = atexit(work);
}

fn float() -> ffi::MPI_Datatype {
    // SAFETY: Guard: a constant of the shim in mpi-sys. Bound: it is read. Duty of the caller: none.
    unsafe { ffi::RSMPI_FLOAT }
}

fn byte() -> ffi::MPI_Datatype {
    // SAFETY: Guard: a constant of the shim in mpi-sys. Bound: it is read. Duty of the caller: none.
    unsafe { ffi::RSMPI_UINT8_T }
}

fn sum() -> ffi::MPI_Op {
    // SAFETY: Guard: a constant of the shim in mpi-sys. Bound: it is read. Duty of the caller: none.
    unsafe { ffi::RSMPI_SUM }
}

fn count(elements: usize) -> c_int {
    c_int::try_from(elements).expect("calls are cut to what MPI can count")
}

/// Turns MPI's code into a result, with MPI's message of a failure.
fn check(code: c_int) -> Result<(), String> {
    // The value of `MPI_SUCCESS` in every MPI.
    const SUCCESS: c_int = 0;
    if code == SUCCESS {
        return Ok(());
    }
    let mut text = [0_u8; ERROR_BYTES];
    let mut length = 0;
    // SAFETY: Guard: the callers have just called MPI. Bound: MPI writes at most `MPI_MAX_ERROR_STRING`
    // bytes, for which there is room. Duty of the caller: none.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &mut length) };
    let length = usize::try_from(length).unwrap_or(0).min(ERROR_BYTES);
    Err(String::from_utf8_lossy(&text[..length]).into_owned())
}
