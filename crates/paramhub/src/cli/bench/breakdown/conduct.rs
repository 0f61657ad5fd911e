//! The launcher's side of a breakdown's processes.

use std::os::unix::net::UnixListener;
use std::sync::atomic::AtomicBool;

use anyhow::bail;

use super::peer::{Learnt, Lesson};
use super::stage::Stage;
use crate::cli::bench::conductor::{Company, LEAD, accept, ask};
use crate::cli::bench::spec::{Meeting, Order, Report};
use crate::cli::bench::usage;

/// Runs one stage with the processes that come to the listener; what each worker has done.
pub(super) fn conduct(
    lesson: &Lesson,
    listener: &UnixListener,
    is_over: &AtomicBool,
) -> anyhow::Result<Vec<Learnt>> {
    let mut lines = accept(listener, lesson.train.workers() as usize + 1, is_over)?;
    let mut hub = lines.pop().expect("one more than workers");
    let at: Option<Meeting> = match lesson.stage {
        // Nobody needs it.
        Stage::Compute => None,
        _ => match ask("the hub", &mut hub, &Order::Teach { lesson: lesson.clone() })? {
            Report::Hosting(at) => Some(at),
            other => bail!("the hub answered {other:?}"),
        },
    };
    let mut company = Company { workers: lines, hubs: vec![hub] };
    for (rank, line) in (0..).zip(&mut company.workers) {
        line.say(&Order::Attend { lesson: lesson.clone(), rank, at: at.clone() })?;
    }
    for report in company.reports() {
        let Report::Joined = report? else { bail!("a worker answered out of turn") };
    }
    company.order_workers(&Order::Learn { start: usage::monotonic() + LEAD })?;
    let mut learnt = Vec::new();
    for report in company.reports() {
        let Report::Learnt(of_one) = report? else { bail!("a worker answered out of turn") };
        learnt.push(of_one);
    }
    company.part();
    Ok(learnt)
}
