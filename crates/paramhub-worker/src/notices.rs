//! Notices of the hubs for people, sent while the job goes on.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// A notice of a hub: of a silent rank, which rank 0 receives, or of the rank for which all wait. Also this
/// worker's own notice that it has opened its streams again by another path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubNotice {
    /// The hub's address.
    pub hub: Arc<str>,
    /// The rank that the notice concerns, if it concerns one.
    pub rank: Option<u32>,
    /// What happened, and to which rank or stream.
    pub message: String,
}

impl fmt::Display for HubNotice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hub {}: {}", self.hub, self.message)
    }
}

type NoticeListener = Arc<dyn Fn(&HubNotice) + Send + Sync>;

/// The newest notices, and the listener for new ones.
#[derive(Default)]
pub(crate) struct Notices {
    state: Mutex<NoticesState>,
}

#[derive(Default)]
struct NoticesState {
    kept: VecDeque<HubNotice>,
    listener: Option<NoticeListener>,
}

impl Notices {
    /// The number of notices kept; older ones are dropped.
    const KEPT_MAX: usize = 64;

    /// Keeps a notice and calls the listener. The caller must catch a panic of the listener.
    pub(crate) fn add(&self, notice: HubNotice) {
        let listener = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            if state.kept.len() == Self::KEPT_MAX {
                state.kept.pop_front();
            }
            state.kept.push_back(notice.clone());
            state.listener.clone()
        };
        if let Some(listener) = listener {
            listener(&notice);
        }
    }

    /// The newest notices, oldest first.
    pub(crate) fn kept(&self) -> Vec<HubNotice> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).kept.iter().cloned().collect()
    }

    /// Calls `listener` with every notice from now on, in place of the last one.
    pub(crate) fn listen(&self, listener: NoticeListener) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).listener = Some(listener);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn the_newest_are_kept_and_each_is_told_once() {
        let (notices, heard) = (Notices::default(), Arc::new(AtomicUsize::new(0)));
        let counter = Arc::clone(&heard);
        notices.listen(Arc::new(move |_| {
            counter.fetch_add(1, Ordering::Relaxed);
        }));
        for rank in 0..100 {
            notices.add(HubNotice { hub: "h:1".into(), rank: Some(rank), message: "silent".into() });
        }
        let kept = notices.kept();
        assert_eq!((kept.len(), kept[0].rank, heard.load(Ordering::Relaxed)), (64, Some(36), 100));
    }
}
