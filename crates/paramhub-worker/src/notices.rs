//! What hubs want a person to know while the job goes on.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// A hub's remark, such as a rank that has been silent, which rank 0 gets; whom all wait for; and that this worker's own streams go on another way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubNotice {
    /// The hub's address.
    pub hub: Arc<str>,
    /// The rank it is about, if it is about one.
    pub rank: Option<u32>,
    /// Who and what.
    pub message: String,
}

impl fmt::Display for HubNotice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hub {}: {}", self.hub, self.message)
    }
}

type Listener = Arc<dyn Fn(&HubNotice) + Send + Sync>;

/// The newest notices, and who wants to hear of new ones.
#[derive(Default)]
pub(crate) struct Notices {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    kept: VecDeque<HubNotice>,
    listener: Option<Listener>,
}

impl Notices {
    /// Older ones are forgotten.
    const KEPT_MAX: usize = 64;

    /// Keeps a notice and tells the listener. A panic of the listener is the caller's to catch.
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

    /// Tells `listener` of every notice from now on, in place of the last one.
    pub(crate) fn listen(&self, listener: Listener) {
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
