//! Ranks that a real `mpirun` starts: each is this program's own test [`rank`], which plays the part that the
//! environment names.
#![cfg(feature = "mpi")]

#[path = "../../../paramhub-collective/tests/integration/communicators/exercise.rs"]
mod collectives;
#[path = "../../../paramhub-collective/tests/integration/kvstore/exercise.rs"]
mod exercise;
#[path = "../../../paramhub-collective/tests/integration/communicators/group.rs"]
#[allow(dead_code, reason = "some of it is for the tests over there alone")]
mod group;
mod job;
mod parts;
#[path = "../../../paramhub-collective/tests/integration/kvstore/team.rs"]
#[allow(dead_code, reason = "some of it is for the tests over there alone")]
mod team;

use job::{Job, run};

#[test]
#[ignore = "a rank, which mpirun starts"]
fn rank() {
    match std::env::var(job::PART) {
        Ok(part) => parts::play(&part),
        Err(_) => println!("mpirun has not started this process as a rank"),
    }
}

#[test]
fn every_rank_gets_every_collective_s_result_whatever_the_world_s_size() {
    for size in 1..=4 {
        run(size, "collectives", Job::succeed);
    }
}

#[test]
fn duplicates_have_orders_of_their_own() {
    run(3, "duplicates", Job::succeed);
}

#[test]
fn blocks_that_do_not_fit_are_refused_before_anything_is_sent() {
    run(2, "misplaced", Job::succeed);
}

#[test]
fn an_error_of_mpi_is_quoted_and_stays() {
    // A communicator that has failed cannot be left, so the job does not count as ended well.
    run(2, "wrong root", |job| {
        job.fail();
        job.expect_output("rank 1: broadcast of `w`: MPI_ERR_ROOT");
        job.expect_output("played to the end");
    });
}

#[test]
fn calls_that_do_not_fit_together_are_named_at_all_ranks() {
    run(3, "mismatch", Job::succeed);
}

#[test]
fn stores_of_all_designs_come_to_what_they_come_to_on_the_native_communicator() {
    for size in [2, 4] {
        run(size, "stores", Job::succeed);
    }
}

#[test]
fn a_rank_that_is_killed_ends_the_job_with_its_name_and_leaves_no_process() {
    run(3, "killed", |job| {
        job.fail();
        job.expect_output("rank 1");
        job.expect_output("signal 9");
    });
}

#[test]
fn ranks_whose_mpirun_is_killed_do_not_stay() {
    job::kill_mpirun(3, "without end");
}

#[test]
fn a_rank_that_ends_without_leaving_ends_the_job() {
    // mpirun names the rank in a table of all ranks that it was waiting for.
    run(3, "gone", |job| {
        job.fail();
        job.expect_output("rank 1");
    });
    run(3, "panics", |job| {
        job.fail();
        job.expect_output("the loss is not a number");
        job.expect_output(",1],1]\n  Exit code:    101");
    });
}

#[test]
fn an_aborted_job_ends_at_all_ranks_and_says_why() {
    run(3, "aborted", |job| {
        job.fail();
        job.expect_output("rank 1 of 3 ends the job: the loss is not a number");
    });
}

#[test]
fn an_mpi_that_takes_one_thread_at_a_time_is_refused_for_many_and_does_for_one() {
    job::run_over_serialized_mpi(2, "one thread at a time", Job::succeed);
}

#[test]
fn concom_is_refused_where_mpi_was_started_for_one_thread() {
    // A store that could not be made keeps the communicator, and no one leaves it.
    run(2, "concom over one thread", |job| {
        job.fail();
        job.expect_output("rank 1: collectives of several threads: MPI was started for one thread at a time");
        job.expect_output("played to the end");
    });
}

#[test]
fn an_mpi_that_other_code_began_is_used_where_it_suffices() {
    run(2, "begun before", Job::succeed);
    run(2, "begun before with less", Job::succeed);
}

#[test]
fn a_second_thread_is_refused_where_mpi_takes_one() {
    run(2, "a second thread", |job| {
        job.fail();
        job.expect_output("another thread of this process is in MPI");
    });
}
